"""From what the user typed to a module on the meta device: the one entry to loading."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from torch import nn

from memir.errors import UsageError
from memir.frontend.load_layers import SEQ_NAMES
from memir.frontend.load_values import near_files
from memir.frontend.loaded import LoadedModel
from memir.recipe import Recipe

_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def load_target(
    target: str | nn.Module,
    *,
    recipe: Recipe,
    sets: Mapping[str, str] | None = None,
    inputs: str | None = None,
    trust_remote_code: bool = False,
    seq: int | None = None,
) -> LoadedModel:
    """Load TARGET: on the meta device, in the recipe's dtype, in training mode; no weights, no network.

    `target` is one of, tried in this order: `path/model.py`, `path/model.py:Name`, a folder or file with a Hugging Face
    config.json, `package.module:Name`, a preset's name, a Hugging Face id in the local cache. `Name` is an nn.Module class,
    an instance, or a factory. In Python it may also be an nn.Module, which stays as it is.
    `sets` are `--set` options as typed; `inputs` is the text of `--inputs` (its grammar: memir.frontend.entry); `seq` is the
    sequence length asked for, checked against the model's limit.
    UsageError: whatever is wrong with the target, its file or its options, each with what to type instead.
    """
    if isinstance(target, nn.Module):
        from memir.frontend.load_file import load_instance

        if sets:
            raise UsageError("a module that is built already has no options to set", hint="give the class's file instead")
        loaded = load_instance(target, recipe=recipe, inputs=inputs)
    else:
        loaded = _dispatch(target, recipe, dict(sets or {}), inputs, trust_remote_code)
    if recipe.lora is None and recipe.mode == "train" and not any(p.requires_grad for p in loaded.module.parameters()):
        count = sum(1 for _ in loaded.module.parameters())
        what = f"none of its {count} parameters requires a gradient" if count else "it has no parameters"
        raise UsageError(
            f"{loaded.name} has nothing to train: {what}", where=loaded.source, hint="a forward pass:  --mode forward"
        )
    if seq is not None:
        check_seq(loaded, seq)
    return loaded


def check_seq(loaded: LoadedModel, seq: int) -> None:
    """UsageError when `seq` tokens are more than the model accepts (`max_seq`; nothing is checked when that is unknown)."""
    limit = loaded.max_seq
    if limit is None or seq <= limit:
        return
    field = next((name for name, value in sorted(loaded.config.items()) if value == limit and name in SEQ_NAMES), None)
    hint = f"Try  -s {limit}" + (f"  or  --set {field}={seq}" if field else "")
    raise UsageError(
        f"{loaded.name} accepts sequences of at most {limit} tokens", where=f"{loaded.source}\nS was {seq}", hint=hint
    )


def _dispatch(target: str, recipe: Recipe, sets: dict[str, str], inputs: str | None, trust: bool) -> LoadedModel:
    if not target.strip():
        raise UsageError("no target is given", hint="memir analyze model.py")
    path_text, name = _split(target)
    path = Path(path_text).expanduser()
    if path.is_dir() or path.suffix == ".json":
        return _from_config_path(target, path, recipe, sets, inputs, trust)
    if path.suffix == ".py" or path.is_file():
        from memir.frontend.load_file import load_file

        return load_file(path, name, target=target, recipe=recipe, sets=sets, inputs=inputs)
    if name and _DOTTED.fullmatch(path_text):
        from memir.frontend.load_file import load_module

        return load_module(path_text, name, target=target, recipe=recipe, sets=sets, inputs=inputs)
    return _from_name(target, recipe, sets, inputs, trust)


def _split(target: str) -> tuple[str, str]:
    """`model.py:GPT` to ("model.py", "GPT"); a path that exists is never split."""
    head, colon, tail = target.rpartition(":")
    if colon and not Path(target).exists() and (not tail or _DOTTED.fullmatch(tail)):
        return head, tail
    return target, ""


def _from_config_path(
    target: str, path: Path, recipe: Recipe, sets: dict[str, str], inputs: str | None, trust: bool
) -> LoadedModel:
    from memir.frontend.load_hf import load_hf
    from memir.frontend.load_hf_config import read_config

    _no_inputs(inputs)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        if not path.is_dir():
            raise UsageError(f"{target}: no such file", hint=near_files(path))
        models = sorted(p.name for p in path.glob("*.py"))[:8]
        hint = f"a file in it:  memir analyze {path / models[0]}   ({', '.join(models)})" if models else ""
        raise UsageError(f"{target}: the folder has no config.json", hint=hint)
    return load_hf(
        read_config(file),
        recipe=recipe,
        sets=sets,
        target=target,
        trust_remote_code=trust,
        repository=str(file.parent),
    )


def _from_name(target: str, recipe: Recipe, sets: dict[str, str], inputs: str | None, trust: bool) -> LoadedModel:
    from memir.frontend import presets
    from memir.frontend.load_hf import load_hf
    from memir.frontend.load_hf_config import cached_config, offline, read_config

    _no_inputs(inputs)
    preset = presets.get(target)
    if preset is not None:
        return load_hf(preset.config, recipe=recipe, sets=sets, target=target, name=target)
    with offline():
        cached = cached_config(target)
    if cached is not None:
        return load_hf(
            read_config(cached), recipe=recipe, sets=sets, target=target, trust_remote_code=trust, repository=str(cached.parent)
        )
    if os.sep in target and not re.fullmatch(r"[\w.-]+/[\w.-]+", target):
        raise UsageError(f"{target}: no such file or folder", hint=near_files(Path(target)))
    close = presets.nearest(target)
    hint = (f"nearest presets: {', '.join(close[:5])}\n" if close else "") + "memir presets  lists them all"
    if "/" in target:
        hint += f"\nmemir never downloads; to have it in the cache:  hf download {target} config.json"
    raise UsageError(f"{target}: no file, no preset and no model in the local Hugging Face cache has this name", hint=hint)


def _no_inputs(inputs: str | None) -> None:
    if inputs is not None:
        raise UsageError("--inputs is for a model.py; Hugging Face models are called with input_ids and labels")
