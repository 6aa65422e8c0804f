"""One training step for real: forward with labels, backward, on the CPU with random weights."""

from __future__ import annotations

import re
import traceback
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.coverage.tiny import VOCAB, tiny_config

FIRST_PLAIN_TOKEN = 32  # special tokens of the tiny configs lie below


@dataclass(frozen=True, slots=True)
class RealRun:
    """Outcome of `real_step`: `dtype` is "f32", "bf16" or, if it ran in neither, empty; `reason` then says why."""

    dtype: str
    num_parameters: int
    reason: str


def real_step(model_type: str, batch: int = 2, seq: int = 64) -> RealRun:
    """Run a step of the type's tiny config in float32, or in bfloat16 if that fails.

    The config goes through a folder with a config.json, as a user's does. The step counts when the loss is a finite
    scalar and at least one parameter has a finite gradient.
    """
    reason = ""
    with TemporaryDirectory() as folder:
        try:
            write_config(model_type, Path(folder))
            config = AutoConfig.from_pretrained(folder)
        except Exception as error:  # a boundary: configs of 196 types, any of which may refuse in its own way
            return RealRun("", 0, one_line(error))
        for name, dtype in (("f32", torch.float32), ("bf16", torch.bfloat16)):
            try:
                return RealRun(name, _step(config, dtype, batch, seq), "")
            except Exception as error:  # a boundary: the model's own code; the reason goes into the table
                reason = reason or one_line(error)
    return RealRun("", 0, reason)


def write_config(model_type: str, folder: Path) -> None:
    """Write the type's tiny config to `folder`/config.json."""
    tiny_config(model_type).save_pretrained(folder)


def _step(config: object, dtype: torch.dtype, batch: int, seq: int) -> int:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).train()
    ids = torch.randint(FIRST_PLAIN_TOKEN, VOCAB, (batch, seq))
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    if loss.numel() != 1 or not bool(loss.isfinite()):
        raise ArithmeticError(f"the loss is {loss.detach()}")
    if not gradients or not all(bool(g.isfinite().all()) for g in gradients):
        raise ArithmeticError("no gradients" if not gradients else "a gradient is not finite")
    return sum(p.numel() for p in model.parameters())


def one_line(error: BaseException) -> str:
    """`TypeError: text (transformers/models/x/modeling_x.py:12)`: the innermost line of library code, no machine's paths."""
    text = re.sub(r"\s+", " ", str(error)).strip()
    frames = traceback.extract_tb(error.__traceback__)
    place = next(
        (
            f"{name}:{f.lineno}"
            for f in reversed(frames)
            if (name := library_path(f.filename)).startswith("transformers/models")
        ),
        "",
    )
    return f"{type(error).__name__}: {text[:200]}" + (f" ({place})" if place else "")


def library_path(filename: str) -> str:
    """A file's path below site-packages, or its name."""
    return filename.rpartition("site-packages/")[2] if "site-packages/" in filename else Path(filename).name
