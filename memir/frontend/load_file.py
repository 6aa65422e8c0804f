"""A plain model.py, or a name in an importable module, to a LoadedModel: import, find, build on meta, see how it is called."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from memir.errors import UsageError
from memir.frontend.discover import Found, builds_on_import, find_model
from memir.frontend.entry import find_entry
from memir.frontend.load_build import build_on_meta, move_to_meta, to_dtype
from memir.frontend.load_eager import unwrap_compiled, unwrap_no_grad
from memir.frontend.load_hf import DTYPE, call_of, max_seq_of
from memir.frontend.load_import import UserModule, describe, import_file, import_module, remember_scope, user_line
from memir.frontend.load_layers import decoder_layers, position_limit, stated_limit
from memir.frontend.load_options import Arguments, arguments_for
from memir.frontend.load_probe import find_call
from memir.frontend.load_source import config_values
from memir.frontend.load_values import plain_dict
from memir.frontend.loaded import LoadedModel
from memir.frontend.origin import shown_path
from memir.recipe import Recipe

_PROBE_SEQ = 8


def load_file(
    path: Path, name: str, *, target: str, recipe: Recipe, sets: Mapping[str, str], inputs: str | None
) -> LoadedModel:
    """Load `path` (`name` empty: the file's one model class). UsageError as the parts say."""
    user = import_file(path, lambda tree: bool(name) and builds_on_import(tree, name))
    return _load(user, name, target, recipe, sets, inputs)


def load_module(
    dotted: str, name: str, *, target: str, recipe: Recipe, sets: Mapping[str, str], inputs: str | None
) -> LoadedModel:
    """Load `name` of the importable module `dotted`. UsageError as the parts say."""
    return _load(import_module(dotted), name, target, recipe, sets, inputs)


def _load(user: UserModule, name: str, target: str, recipe: Recipe, sets: Mapping[str, str], inputs: str | None) -> LoadedModel:
    found = find_model(user, name, target)
    assumptions: list[str] = []
    roots = _roots(user)
    with user.scope.active():
        module, values = _make(found, user, sets, target, roots, assumptions)
        module = unwrap_compiled(module, assumptions)
        move_to_meta(module)
        to_dtype(module, DTYPE[recipe.dtype], assumptions)
        module.train()
        module.zero_grad(set_to_none=True)
        source, layers, is_hf = _source(module, user, found), decoder_layers(module), _is_hf(module)
        if is_hf:
            call, max_seq = call_of(module, recipe, assumptions), max_seq_of(module)
        else:
            unwrap_no_grad(module, assumptions)
            limits = [limit for limit in (position_limit(module), stated_limit(values)) if limit is not None]
            max_seq = min(limits, default=None)
            entry = find_entry(module, inputs, padded=recipe.batch_kind == "padded", where=source)
            seqs = _probe_lengths(max_seq)
            call = find_call(module, entry, layers=layers, seqs=seqs, roots=roots, assumptions=assumptions)
    remember_scope(module, user.scope)
    return LoadedModel(
        module=module,
        call=call,
        name=type(module).__name__,
        target=target,
        source=source,
        config=values,
        max_seq=max_seq,
        layers=layers,
        is_hf=is_hf,
        roots=roots,
        assumptions=assumptions + user.scope.notes,
    )


def _probe_lengths(limit: int | None) -> list[int]:
    """A short sequence, and a long one for models that want a multiple of their window; never beyond the limit."""
    longer = min(limit or 256, 256)
    return [min(_PROBE_SEQ, limit or _PROBE_SEQ)] + ([longer] if longer > _PROBE_SEQ else [])


def _make(
    found: Found, user: UserModule, sets: Mapping[str, str], target: str, roots: tuple[str, ...], assumptions: list[str]
) -> tuple[nn.Module, dict[str, Any]]:
    """The module that the class, instance or factory gives, and its configuration's plain values."""
    if isinstance(found.object, nn.Module):
        if sets:
            hint = "name its class or a factory instead: those can be built anew"
            raise UsageError(f"--set {next(iter(sets))}: {found.name} is an instance that is built already", hint=hint)
        return found.object, plain_dict(_config_of(found.object))
    arguments: Arguments = arguments_for(found, user, sets, target)
    try:
        module = build_on_meta(lambda: found.object(**arguments.kwargs))
    except UsageError:
        raise
    except Exception as error:  # a boundary: the user's constructor or factory may raise anything
        where = "\n".join(filter(None, [user_line(error, roots), describe(error)]))
        shown = f"{found.name}({', '.join(arguments.kwargs)})"
        hint = "" if not arguments.values else "its options can be set:  --set NAME=VALUE"
        raise UsageError(f"{shown} fails", where=where, hint=hint) from None
    if not isinstance(module, nn.Module):
        line = f"{user.shown}:{found.line}" if found.line else user.shown
        raise UsageError(f"{found.name}() returns {type(module).__name__}, not a torch.nn.Module", where=line)
    assumptions += arguments.assumptions
    values = arguments.values | plain_dict(_config_of(module))
    for config in arguments.configs:  # read after the constructor, which may have filled it in
        values |= plain_dict(config_values(config))
    return module, values


def _config_of(module: nn.Module) -> dict[str, Any]:
    """The values of the configuration that a module keeps, under any of the usual names."""
    for name in ("config", "cfg", "args", "params", "model_args", "hparams"):
        config = getattr(module, name, None)
        if config is not None and not callable(config) and (isinstance(config, Mapping) or hasattr(config, "__dict__")):
            return config_values(config)
    return {}


def _is_hf(module: nn.Module) -> bool:
    if "transformers" not in sys.modules:
        return False
    from transformers import PreTrainedModel

    return isinstance(module, PreTrainedModel)


def _source(module: nn.Module, user: UserModule, found: Found) -> str:
    """`model.py:118`: the class of the module that was built, or the name that built it."""
    try:
        file, line = inspect.getsourcefile(type(module)), inspect.getsourcelines(type(module))[1]
        return f"{shown_path(str(Path(file or '').resolve()))}:{line}"
    except (OSError, TypeError):  # a class without a source file
        return f"{user.shown}:{found.line}" if found.line else user.shown


def _roots(user: UserModule) -> tuple[str, ...]:
    """The folder of the file; its package's top folder when it lies in one."""
    top = user.module.__name__.partition(".")[0] if "." in user.module.__name__ else ""
    folder = user.path.parent
    if top:
        folder = next((parent for parent in user.path.parents if parent.name == top), folder)
    return (str(folder),)
