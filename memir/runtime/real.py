"""One training step for real: the user's model with random weights, the same loop that is traced, on a device of this machine.

`measure_in_child` runs it in a process of its own, so that the allocator's accounting begins with the model and nothing that
this process has imported or allocated matters.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from memir.errors import InconclusiveError, MemirError, UsageError
from memir.frontend.device import on_real_device
from memir.frontend.load import load_target
from memir.frontend.load_import import adopt_scope
from memir.frontend.loaded import LoadedModel
from memir.frontend.loop import Step, batch_spec
from memir.frontend.optimizers import make_optimizer
from memir.frontend.prepare import prepare
from memir.frontend.quiet import quiet
from memir.recipe import Recipe
from memir.runtime.measure import BuildStep, Measured, measure_cpu, measure_cuda

IGNORED = -100  # the target that cross entropy leaves out; padding has it
_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}  # a recipe's attention -> what only may run


@dataclass(frozen=True, slots=True)
class RealStep:
    """What is run: a target and recipe as `memir verify` has them, on `recipe.target`'s device."""

    target: str
    recipe: Recipe
    batch: int
    seq: int
    sets: dict[str, str] = field(default_factory=dict)
    inputs: str | None = None
    trust_remote_code: bool = False

    @property
    def device(self) -> str:
        """The device it runs on: "cpu" or "cuda"."""
        return self.recipe.target


def builder(
    real: RealStep, adjust: Callable[[nn.Module], None] = lambda _: None, on_phase: Callable[[str], None] = lambda _: None
) -> BuildStep:
    """What `measure_cpu` and `measure_cuda` call: it makes model, optimizer and batch, and returns the step.

    `adjust` may change the module that is trained before the optimizer is made; `on_phase` is told the phases of each step.
    """

    def build() -> Callable[[], object]:
        loaded, module = load_real(real)
        adjust(module)
        optimizer = make_optimizer(module, real.recipe)
        batch = real_batch(loaded, real)
        step = Step(module, loaded.call, real.recipe, optimizer, on_phase)

        def run() -> None:
            with kernel_of(real):
                step(batch)

        return run

    return build


def load_real(real: RealStep) -> tuple[LoadedModel, nn.Module]:
    """The model with random weights on `real.device`, the same ones each time, and the module that is trained."""
    torch.manual_seed(0)
    with on_real_device(real.device):
        loaded = load_target(
            real.target,
            recipe=real.recipe,
            sets=real.sets,
            inputs=real.inputs,
            trust_remote_code=real.trust_remote_code,
            seq=real.seq,
        )
    adopt_scope(loaded.module)
    return loaded, prepare(loaded, real.recipe)


def kernel_of(real: RealStep) -> AbstractContextManager[object]:
    """Within, only the recipe's attention kernel may run."""
    backend = _BACKENDS.get(real.recipe.attention)
    return nullcontext() if backend is None else sdpa_kernel(backend)


def real_batch(loaded: LoadedModel, real: RealStep) -> dict[str, torch.Tensor]:
    """Random ids and targets, int64 [B, S], each its own storage; in a padded batch the first row's second half is padding."""
    shape = (real.batch, real.seq)
    vocab = vocabulary(loaded)
    names = dict.fromkeys(batch_spec(loaded.call))
    tensors = {name: torch.randint(0, vocab, shape, device=real.device) for name in names if name != loaded.call.mask}
    if loaded.call.mask is not None:
        mask = torch.ones(shape, dtype=torch.long, device=real.device)
        if real.recipe.batch_kind == "padded":
            mask[0, real.seq // 2 :] = 0
            targets = loaded.call.targets or "targets"
            if targets in tensors:
                tensors[targets][0, real.seq // 2 :] = IGNORED
        tensors[loaded.call.mask] = mask
    return tensors


def vocabulary(loaded: LoadedModel) -> int:
    """How many token ids every embedding and the head accept: the config's vocab_size, else the smallest embedding's rows."""
    stated = loaded.config.get("vocab_size")
    if isinstance(stated, int) and stated > 0:
        return stated
    return min((m.num_embeddings for m in loaded.module.modules() if isinstance(m, nn.Embedding)), default=2)


def import_libraries(recipe: Recipe) -> None:
    """Imports what makes tensors of its own when it is first imported: they are no step's."""
    if recipe.lora is not None:
        importlib.import_module("peft.tuners.lora.bnb" if importlib.util.find_spec("bitsandbytes") else "peft")


def measure(real: RealStep, adjust: Callable[[nn.Module], None] = lambda _: None) -> Measured:
    """Runs the step in this process. For figures that count from the model on, nothing may have been profiled here before."""
    torch.set_num_threads(1)  # kernels' scratch grows with the threads (docs/memory-model.md)
    with quiet():
        import_libraries(real.recipe)
        return measure_cuda(builder(real, adjust)) if real.device == "cuda" else measure_cpu(builder(real, adjust))


def measure_in_child(real: RealStep) -> Measured:
    """Runs the step in a fresh Python process with one thread and returns what it measured.

    Raises what the step raised where that is a message for the user (UsageError, InconclusiveError), InconclusiveError with
    the end of the process's stderr where it died.
    """
    with tempfile.TemporaryDirectory(prefix="memir-verify-") as folder:
        answer = Path(folder) / "measured"
        request = pickle.dumps((real, str(answer)))
        child = subprocess.run(
            [sys.executable, "-m", "memir.runtime.child"],
            input=request,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
            check=False,
        )
        if not answer.exists():
            tail = child.stderr.decode(errors="replace").strip().splitlines()[-6:]
            raise InconclusiveError(
                f"the real step ended without a result (exit code {child.returncode})",
                where="\n".join(tail),
                hint="out of memory?  a smaller -b or -s, or fewer layers with  --set" if child.returncode < 0 else "",
            )
        outcome = pickle.loads(answer.read_bytes())
    if isinstance(outcome, Measured):
        return outcome
    kind, message, where, hint = outcome
    raise {"UsageError": UsageError, "InconclusiveError": InconclusiveError}.get(kind, MemirError)(
        message, where=where, hint=hint
    )


def answer_request(request: bytes) -> None:
    """The child's side: a pickled (RealStep, path) in; a Measured or an error's parts into that file."""
    real, answer = pickle.loads(request)
    outcome: Measured | tuple[str, str, str, str]
    try:
        outcome = measure(real)
    except MemirError as error:
        kind = "UsageError" if isinstance(error, UsageError) else type(error).__name__
        outcome = (kind, error.message, error.where, error.hint)
    Path(answer).write_bytes(pickle.dumps(outcome))
