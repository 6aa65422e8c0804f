"""What a model's constructor or factory is called with: its defaults, a configuration object, and the `--set` options."""

from __future__ import annotations

import ast
import inspect
import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from memir.errors import UsageError
from memir.frontend.discover import Found, class_node
from memir.frontend.load_import import UserModule
from memir.frontend.load_source import (
    CONFIG_CLASS,
    MISSING,
    Source,
    is_config,
    is_config_class,
    parameters_of,
    source_of_class,
    source_of_value,
)
from memir.frontend.load_tables import fill_default_config
from memir.frontend.load_values import convert, nearest_names, plain_dict

_CONFIG_NAME = re.compile(r"(.*_)?(config|configs|cfg|conf|args|params|hparams|hps|hp|hyperparams|settings|options|opts?|c)")


@dataclass(slots=True)
class Arguments:
    """How the model is made: keyword arguments, the plain values for the report, and what was guessed."""

    kwargs: dict[str, Any] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    configs: list[Any] = field(default_factory=list)
    assumptions: list[str] = field(default_factory=list)


def arguments_for(found: Found, user: UserModule, sets: Mapping[str, str], target: str) -> Arguments:
    """Arguments for calling the class or factory: a `--set` option by name, a configuration object, or the default.

    UsageError: an option that nothing takes (with the nearest names), an argument or field without a value (with what to type).
    """
    result = Arguments()
    left = dict(sets)
    missing: list[str] = []
    known: list[str] = []
    open_ended = False
    for parameter in parameters_of(found.object):
        name, annotation = parameter.name, _annotation(found.object, parameter, user)
        if parameter.kind is parameter.VAR_KEYWORD:
            open_ended = True
            continue
        if parameter.kind is parameter.VAR_POSITIONAL:
            continue
        known.append(name)
        source = None
        if name in left:
            result.kwargs[name] = convert(left.pop(name), _value(parameter.default), f"--set {name}", annotation)
        elif (source := _source(found, parameter, annotation, user, target)) is not None:
            known += [f for f in source.fields if f not in known]
            config = _make(source, name, left, target, result.assumptions, found, user)
            result.kwargs[name] = config
            result.configs.append(config)
        elif parameter.default is MISSING:
            missing.append(name)
        else:
            result.values[name] = parameter.default
    if open_ended:
        result.kwargs |= {name: convert(text, None, f"--set {name}") for name, text in left.items()}
        left = {}
    if left:
        option = next(iter(left))
        close = nearest_names(option.rpartition(".")[2], known)
        hint = (
            f"nearest: {', '.join(close)}" if close else f"options: {', '.join(known[:24])}" if known else "it takes no options"
        )
        raise UsageError(f"--set {option}: {found.name} has no such option", where=_place(found, user), hint=hint)
    if missing:
        _raise_missing(missing, found, user, target)
    result.values = plain_dict(
        result.values | {k: v for k, v in result.kwargs.items() if isinstance(v, (bool, int, float, str))}
    )
    return result


def _value(default: Any) -> Any:
    return None if default is MISSING else default


def _annotation(function: Any, parameter: inspect.Parameter, user: UserModule) -> Any:
    """The parameter's annotation as an object where it can be resolved; a text it stays otherwise; None without one."""
    if parameter.annotation is MISSING:
        return None
    try:
        hints = typing.get_type_hints(function.__init__ if inspect.isclass(function) else function)
        return hints.get(parameter.name, parameter.annotation)
    except (NameError, TypeError, AttributeError, SyntaxError):  # names under TYPE_CHECKING, and whatever else text may hold
        text = parameter.annotation
        return getattr(user.module, text, text) if isinstance(text, str) else text


def _source(found: Found, parameter: inspect.Parameter, annotation: Any, user: UserModule, target: str) -> Source | None:
    """Where a configuration for this parameter comes from; None when it is no configuration."""
    if parameter.default is not MISSING and is_config(parameter.default):
        return source_of_value(parameter.default, type(parameter.default).__name__)
    for kind in typing.get_args(annotation) or (annotation,):
        if is_config_class(kind):
            return source_of_class(kind)
    if not _CONFIG_NAME.fullmatch(parameter.name) or parameter.default not in (MISSING, None):
        return None
    get_default = getattr(found.object, "get_default_config", None)
    if callable(get_default):
        return source_of_value(get_default(), f"{found.name}.get_default_config()")
    return _source_by_use(found, parameter, user, target)


def _source_by_use(found: Found, parameter: inspect.Parameter, user: UserModule, target: str) -> Source | None:
    """The configuration in the file that has every field which the constructor reads from this parameter."""
    needed = _fields_read(found, parameter.name, user)
    sources: dict[str, Source] = {}
    own: set[str] = set()
    for name, value in vars(user.module).items():
        if name.startswith("_"):
            continue
        source = None
        if is_config_class(value):
            source = source_of_class(value)
            own |= {name} if value.__module__ == user.module.__name__ else set()
        elif is_config(value) or (type(value) is dict and value and all(isinstance(k, str) for k in value)):
            source = source_of_value(value, name)
            own.add(name)
        if source is not None and needed <= set(source.fields) | _attributes(value):
            sources[name] = source
    names = [name for name in sources if name in own] or list(sources)
    if len(names) > 1:
        stem = CONFIG_CLASS.sub("", found.name).lower()
        names = [name for name in names if CONFIG_CLASS.sub("", name).lower().strip("_") == stem] or names
    if len(names) > 1:
        raise UsageError(
            f"{user.shown}: several configurations could be meant for {found.name}({parameter.name}): {', '.join(names)}",
            where=_place(found, user),
            hint=_factory_hint(found, target, f"{found.name}({names[0]}())"),
        )
    return sources[names[0]] if names else None


def _attributes(value: Any) -> set[str]:
    """Methods and properties of a configuration, which a constructor may read too."""
    return {name for name in dir(value if inspect.isclass(value) else type(value)) if not name.startswith("_")}


def _fields_read(found: Found, name: str, user: UserModule) -> set[str]:
    """Fields that the constructor (or factory) reads: `config.n_layer`, `config["n_layer"]`."""
    node = class_node(user, found.object.__name__) if inspect.isclass(found.object) else None
    body: list[ast.AST] = [n for n in (node.body if node else []) if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
    read = set()
    for part in (inner for outer in body for inner in ast.walk(outer)):
        if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name) and part.value.id == name:
            read.add(part.attr)
        elif isinstance(part, ast.Subscript) and isinstance(part.value, ast.Name) and part.value.id == name:
            read |= {part.slice.value} if isinstance(part.slice, ast.Constant) and isinstance(part.slice.value, str) else set()
    return read


def _make(
    source: Source, parameter: str, left: dict[str, str], target: str, assumptions: list[str], found: Found, user: UserModule
) -> Any:
    """Make the configuration, taking its options out of `left` (also as `config.n_layer`, and dotted ones for its sections)."""
    given: dict[str, Any] = {}
    for option in list(left):
        *outer, leaf = option.split(".")
        if outer[:1] == [parameter] and parameter not in source.fields:
            outer = outer[1:]
        if outer and outer[0] in source.fields:
            given[outer[0]] = _with_section(
                given.get(outer[0], source.fields[outer[0]][0]), outer[1:], leaf, left, option, source
            )
        elif not outer and leaf in source.fields:
            default, annotation = source.fields[leaf]
            given[leaf] = convert(left.pop(option), _value(default), f"--set {option}", annotation)
    missing = [name for name, (default, _) in source.fields.items() if default is MISSING and name not in given]
    if missing:
        where = f"{source.label} has no default for {', '.join(missing)}"
        hint = "give them:  " + " ".join(f"--set {name}=..." for name in missing[:6]) + f"\n{_factory_hint(found, target)}"
        raise UsageError(
            f"{found.name} needs a configuration, and {len(missing)} of its values are unknown", where=where, hint=hint
        )
    if source.label.endswith("get_default_config()"):
        given = fill_default_config(
            found.name, class_node(user, found.name), {n: v for n, (v, _) in source.fields.items()}, given, assumptions
        )
    try:
        return source.make(given)
    except Exception as error:  # a boundary: the user's configuration class may check and raise anything
        raise UsageError(
            f"{source.label} refuses its values",
            where=f"{type(error).__name__}: {error}",
            hint=f"given: {given}" if given else "",
        ) from None


def _with_section(value: Any, outer: list[str], leaf: str, left: dict[str, str], option: str, source: Source) -> Any:
    section = source_of_value(value, source.label) if value is not MISSING and value is not None else None
    name = outer[0] if outer else leaf
    if section is None or name not in section.fields:
        known = list(section.fields) if section else []
        close = nearest_names(name, known) or known[:16]
        raise UsageError(
            f"--set {option}: {source.label} has no such field", hint=f"fields there: {', '.join(close)}" if close else ""
        )
    default, annotation = section.fields[name]
    if outer:
        return section.make({name: _with_section(default, outer[1:], leaf, left, option, section)})
    return section.make({name: convert(left.pop(option), default, f"--set {option}", annotation)})


def _raise_missing(missing: list[str], found: Found, user: UserModule, target: str) -> None:
    count = "an argument" if len(missing) == 1 else f"{len(missing)} arguments"
    hint = "give them:  " + " ".join(f"--set {name}=..." for name in missing[:6])
    raise UsageError(
        f"{found.name} needs {count} without a default: {', '.join(missing)}",
        where=_place(found, user),
        hint=f"{hint}\n{_factory_hint(found, target)}",
    )


def _factory_hint(found: Found, target: str, call: str = "") -> str:
    file = target.rpartition(":")[0] if target.endswith(f":{found.name}") else target
    function = f"def model(): return {call or found.name + '(...)'}"
    return f"or write a function in the file,  {function}\nand name it:  memir analyze {file}:model"


def _place(found: Found, user: UserModule) -> str:
    return f"{user.shown}:{found.line}" if found.line else user.shown
