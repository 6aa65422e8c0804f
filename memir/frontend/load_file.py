"""A plain model.py, or a name in an importable module, to a LoadedModel: import, find, build on meta, see how it is called."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from memir.errors import UsageError
from memir.frontend.device import build_device
from memir.frontend.discover import Found, builds_on_import, find_model
from memir.frontend.entry import find_entry
from memir.frontend.load_build import build_on_meta, meta_copy, move_to_meta, to_dtype
from memir.frontend.load_eager import unwrap_compiled, unwrap_no_grad
from memir.frontend.load_hf import DTYPE, call_of, max_seq_of
from memir.frontend.load_import import Scope, UserModule, describe, import_file, import_module, remember_scope, user_line
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


def load_instance(module: nn.Module, *, recipe: Recipe, inputs: str | None) -> LoadedModel:
    """Describe a module that the caller has; it stays as it is: a copy without data is analyzed. Raises as the parts say."""
    cls = type(module)
    try:
        folder = Path(inspect.getfile(cls)).resolve().parent
    except (OSError, TypeError):  # a class typed into a prompt
        folder = Path.cwd()
    copied = meta_copy(module)
    if copied is None:
        hint = "give memir the file instead:  path/model.py:Name"
        raise UsageError(f"{cls.__name__} keeps a function that holds its own submodules, so it cannot be copied", hint=hint)
    scope = Scope(folder, cls.__name__)
    source = _source(module, "", None)
    with scope.active():
        return _describe(
            copied, scope, plain_dict(_config_of(copied)), cls.__name__, source, (str(folder),), recipe, inputs, []
        )


def _load(user: UserModule, name: str, target: str, recipe: Recipe, sets: Mapping[str, str], inputs: str | None) -> LoadedModel:
    found = find_model(user, name, target)
    assumptions: list[str] = []
    roots = _roots(user)
    with user.scope.active():
        module, values = _make(found, user, sets, target, roots, assumptions)
        source = _source(module, user.shown, found.line)
        return _describe(module, user.scope, values, target, source, roots, recipe, inputs, assumptions)


def _describe(
    module: nn.Module,
    scope: Scope,
    values: dict[str, Any],
    target: str,
    source: str,
    roots: tuple[str, ...],
    recipe: Recipe,
    inputs: str | None,
    assumptions: list[str],
) -> LoadedModel:
    """Put a fresh module into the recipe's dtype on the meta device, in place, and see how it is called."""
    module = unwrap_compiled(module, assumptions)
    move_to_meta(module)
    to_dtype(module, DTYPE[recipe.dtype], assumptions)
    module.train()
    module.zero_grad(set_to_none=True)
    roots = _with_folder_of(module, roots)
    layers, is_hf = decoder_layers(module), _is_hf(module)
    if is_hf:
        call, max_seq = call_of(module, recipe, assumptions), max_seq_of(module)
    else:
        unwrap_no_grad(module, assumptions)
        limits = [limit for limit in (position_limit(module), stated_limit(values)) if limit is not None]
        max_seq = min(limits, default=None)
        entry = find_entry(module, inputs, padded=recipe.masked, where=source)
        seqs = _probe_lengths(max_seq)
        call = find_call(module, entry, layers=layers, seqs=seqs, roots=roots, assumptions=assumptions)
    remember_scope(module, scope)
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
        assumptions=assumptions + scope.notes,
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
        on_meta = build_device() == "meta"
        module = (meta_copy(found.object) if on_meta else None) or found.object  # an instance imported before stays as it is
        return module, plain_dict(_config_of(module))
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


def _source(module: nn.Module, file: str, line: int | None) -> str:
    """`model.py:118`: the class of the module that was built, or else the name that built it."""
    try:
        path, start = inspect.getsourcefile(type(module)), inspect.getsourcelines(type(module))[1]
        return f"{shown_path(str(Path(path or '').resolve()))}:{start}"
    except (OSError, TypeError):  # a class without a source file
        return f"{file}:{line}" if line else file


def _roots(user: UserModule) -> tuple[str, ...]:
    """The folder of the file; its package's top folder when it lies in one."""
    top = user.module.__name__.partition(".")[0] if "." in user.module.__name__ else ""
    return (str(next((parent for parent in user.path.parents if top and parent.name == top), user.path.parent)),)


def _with_folder_of(module: nn.Module, roots: tuple[str, ...]) -> tuple[str, ...]:
    """`roots`, and the folder of the class of a module that a factory took from elsewhere (torch's own classes aside)."""
    try:
        folder = str(Path(inspect.getfile(type(module))).resolve().parent)
    except (OSError, TypeError):  # a class without a file
        return roots
    inside = any(folder == root or folder.startswith(root + os.sep) for root in roots)
    return roots if inside or type(module).__module__.partition(".")[0] == "torch" else (*roots, folder)
