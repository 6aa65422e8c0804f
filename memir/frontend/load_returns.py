"""Where the loss is by the names in forward's own code, for models that cannot be tried out on fake tensors."""

from __future__ import annotations

import ast
import inspect
import textwrap
from typing import Any

_LOGITS = ("logits", "output", "outputs", "out")


def loss_by_names(forward: Any) -> str:
    """The place of the loss (as in Call.loss) that the last return statement names, or a `self.…loss = ...`; '' if none.

    `return logits, loss` is item:1, `return loss` is return, `return Output(loss=loss)` is attr:loss,
    `return {"loss": loss}` is item:loss; without a loss, `return logits` is logits:return.
    """
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward)))
    except (OSError, TypeError, SyntaxError):
        return ""
    nodes = list(_own_nodes(tree.body[0]))
    returned = [node.value for node in nodes if isinstance(node, ast.Return) and node.value is not None]
    for value in reversed(returned):
        if place := _loss_in(value):
            return place
    for node in nodes:
        targets = node.targets if isinstance(node, ast.Assign) else []
        for target in targets:
            if isinstance(target, ast.Attribute) and "loss" in target.attr and ast.unparse(target.value) == "self":
                return f"module:{target.attr}"
    for value in reversed(returned):
        if isinstance(value, ast.Tuple):
            places = [i for i, element in enumerate(value.elts) if _name(element) in _LOGITS]
            if places:
                return f"logits:item:{places[0]}"
    return "logits:return" if returned and not isinstance(returned[-1], ast.Tuple) else ""


def _own_nodes(function: ast.AST) -> list[ast.AST]:
    """Nodes of a function without those of functions inside it, in the order of the text."""
    found: list[ast.AST] = []
    for child in ast.iter_child_nodes(function):
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            found += [child, *_own_nodes(child)]
    return found


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _loss_in(value: ast.expr) -> str:
    if isinstance(value, ast.Tuple):
        return next((f"item:{i}" for i, element in enumerate(value.elts) if "loss" in _name(element).lower()), "")
    if isinstance(value, ast.Dict):
        keys = [key.value for key in value.keys if isinstance(key, ast.Constant) and isinstance(key.value, str)]
        return next((f"item:{key}" for key in keys if "loss" in key), "")
    if isinstance(value, ast.Call):
        plain_dict = _name(value.func) == "dict"
        names = [keyword.arg for keyword in value.keywords if keyword.arg and "loss" in keyword.arg]
        if names:
            return f"{'item' if plain_dict else 'attr'}:{names[0]}"
        return "return" if "loss" in _name(value.func).lower() or _name(value.func) == "cross_entropy" else ""
    return "return" if "loss" in _name(value).lower() else ""
