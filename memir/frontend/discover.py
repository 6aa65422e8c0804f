"""Which name in a model file is the model: the class that no other class contains, or the one the user named."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from memir.errors import UsageError
from memir.frontend.load_import import UserModule
from memir.frontend.load_values import nearest_names

_SURE_IDS_NAMES = ("input_ids", "ids", "idx", "tokens", "token_ids", "input_tokens", "indices", "in_idx", "idxs", "toks")
IDS_NAMES = (*_SURE_IDS_NAMES, "inputs", "input", "x", "xs", "src", "seq", "text", "inp", "context")


@dataclass(frozen=True, slots=True)
class Found:
    """The model's class, instance or factory, with its name and line in the file."""

    object: Any
    name: str
    line: int | None


def find_model(user: UserModule, name: str, target: str) -> Found:
    """What `model.py:Name` names, or without a name the file's one top-level model class.

    UsageError: no such name (lists those there are), no module class, several candidates (with lines and what to type).
    """
    if name:
        return _named(user, name, target)
    classes = _module_classes(user)
    if not classes:
        others = _usable_names(user)
        hint = f"name a class, instance or factory:  memir analyze {target}:{others[0]}" if others else ""
        listing = f"names in it: {', '.join(others[:12])}" if others else ""
        raise UsageError(f"{user.shown}: no torch.nn.Module class is defined in it", where=listing, hint=hint)
    candidates = _top_level(user, classes)
    if len(candidates) > 1:
        lines = [f"{n} (line {_line_of(user, n) or '?'})" for n in candidates]
        listing = f"{', '.join(lines[:-1])} and {lines[-1]}"
        count = {2: "two", 3: "three", 4: "four"}.get(len(lines), str(len(lines)))
        commands = [f"memir analyze {target}:{n}" for n in sorted(candidates, key=lambda n: -_likeness(user, classes[n]))]
        raise UsageError(
            f"{user.shown}: {count} model classes could be meant: {listing}",
            hint="\n".join(["say which:  " + commands[0], *(" " * 12 + command for command in commands[1:8])]),
        )
    chosen = candidates[0]
    return Found(classes[chosen], chosen, _line_of(user, chosen))


def class_node(user: UserModule, name: str) -> ast.ClassDef | None:
    """The class statement of that name at the file's top level (also inside a top-level `if` or `try`)."""
    return next((node for node in ast.walk(user.tree) if isinstance(node, ast.ClassDef) and node.name == name), None)


def builds_on_import(tree: ast.Module, name: str) -> bool:
    """Whether `name` is assigned a call's result at the file's top level: an instance is built while the file is imported."""
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        if any(isinstance(t, ast.Name) and t.id == name for t in targets) and isinstance(
            getattr(node, "value", None), ast.Call
        ):
            return True
    return False


def _named(user: UserModule, name: str, target: str) -> Found:
    found: Any = user.module
    for part in name.split("."):
        if not hasattr(found, part):
            known = _usable_names(user)
            close = nearest_names(part, known)
            hint = f"nearest: {', '.join(close)}" if close else ""
            listing = f"names in it: {', '.join(known[:16])}" if known else ""
            raise UsageError(f"{user.shown} has no {name!r}", where=listing, hint=hint)
        found = getattr(found, part)
    if inspect.isclass(found) and not issubclass(found, nn.Module):
        raise UsageError(f"{target}: {name} is a class, but no torch.nn.Module")
    if not isinstance(found, nn.Module) and not callable(found):
        raise UsageError(
            f"{target}: {name} is {type(found).__name__}, neither an nn.Module nor a function that returns one",
            hint=f"names in it: {', '.join(_usable_names(user)[:12])}",
        )
    return Found(
        found, name, _line_of(user, name.rpartition(".")[2]) if "." not in name else _line_of(user, name.split(".")[0])
    )


def _line_of(user: UserModule, name: str) -> int | None:
    for node in ast.walk(user.tree):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == name:
            return node.lineno
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
            return node.lineno
    return None


def _module_classes(user: UserModule) -> dict[str, type[nn.Module]]:
    """Module classes that the file itself defines and that have a forward of their own, in the file's order."""
    classes: dict[str, type[nn.Module]] = {}
    for name, value in vars(user.module).items():
        if not (inspect.isclass(value) and issubclass(value, nn.Module) and value.__module__ == user.module.__name__):
            continue
        if value.forward is not nn.Module.forward and value not in classes.values():
            classes[name] = value
    return dict(sorted(classes.items(), key=lambda item: _line_of(user, item[1].__name__) or 0))


def _usable_names(user: UserModule) -> list[str]:
    """Public classes, functions and modules that a target may name: those of the file first, then imported module classes."""
    own: list[str] = []
    imported: list[str] = []
    for name, value in vars(user.module).items():
        if name.startswith("_"):
            continue
        if isinstance(value, nn.Module):
            own.append(name)
        elif inspect.isfunction(value) or (inspect.isclass(value) and issubclass(value, nn.Module)):
            (own if value.__module__ == user.module.__name__ else imported).append(name)
    return own + [name for name in imported if inspect.isclass(vars(user.module)[name])]


def _top_level(user: UserModule, classes: dict[str, type[nn.Module]]) -> list[str]:
    """Names of the classes that could be the model: contained in no other and, where that tells them apart, fed with ids."""
    uses = {name: _reachable(user, cls.__name__) for name, cls in classes.items()}
    roots = [
        name for name, cls in classes.items() if not any(cls.__name__ in uses[other] for other in classes if other != name)
    ] or list(classes)
    for least in (2, 1):
        likely = [name for name in roots if _likeness(user, classes[name]) >= least]
        if likely:
            return likely
    return roots


def _likeness(user: UserModule, cls: type[nn.Module]) -> int:
    """2: forward takes token ids by name or there is an embedding and a usual name; 1: either; 0: neither."""
    parameters = [p for p in inspect.signature(cls.forward).parameters if p != "self"]
    embeds = "Embedding" in "".join(_reachable(user, cls.__name__))
    if any(p in _SURE_IDS_NAMES for p in parameters):
        return 2
    return int(embeds) + int(bool(parameters) and parameters[0] in IDS_NAMES and embeds)


def _names_in(nodes: Iterable[ast.AST]) -> set[str]:
    """Names that code mentions, annotations left out: naming a type is not containing it."""
    found: set[str] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        for field_name, value in ast.iter_fields(node):
            if field_name in ("annotation", "returns"):
                continue
            items = value if isinstance(value, list) else [value]
            stack.extend(item for item in items if isinstance(item, ast.AST))
    return found


def _reachable(user: UserModule, name: str) -> frozenset[str]:
    """Every name that a class's code mentions, through the file's other classes and functions too; bases count."""
    definitions = {
        node.name: node for node in user.tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
    }
    seen: set[str] = set()
    todo = [name]
    visited = {name}
    while todo:
        node = definitions.get(todo.pop())
        if node is None:
            continue
        names = _names_in(ast.iter_child_nodes(node))
        seen |= names
        todo += [n for n in names if n in definitions and n not in visited]
        visited |= names
    return frozenset(seen - {name})
