"""`memir graph TARGET`: the traced step as the torch.fx graph that it was lowered from."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from memir.cli.options import Request, gpu_option, output_option, progress, step_options, write

LONGEST = 12  # items of a list that are printed in full


@click.command("graph")
@step_options
@gpu_option
@output_option
def command(request: Request, output: Path | None) -> None:
    """Print the operators of a training step as PyTorch ran them.

    One line an operator of ATen: result, operator, arguments, then as a comment the results' types over B and S, the module
    and the line of model code. `memir ir` prints what memir made of it.
    """
    from memir.api import trace

    with progress() as stage:
        traced = trace(request.model, request.recipe, **request.keywords(), progress=stage)
    write("\n".join(lines(traced.fx_graph, traced.symbols)), output)


def lines(graph: Any, symbols: Mapping[str, str]) -> Iterator[str]:
    """The text of a torch.fx.Graph whose nodes carry phase, path, source and types in `meta`; sizes are over B and S."""
    phase = None
    for node in graph.nodes:
        if node.op == "placeholder":
            yield f"%{node.name} = placeholder"
            continue
        if "phase" in node.meta and node.meta["phase"] != phase:
            phase = node.meta["phase"]
            yield f"# {phase}"
        types = _abbreviated(list(node.meta.get("val", ())))
        comment = "  ".join(filter(None, (*types, node.meta.get("path"), node.meta.get("source"))))
        arguments = [_text(argument, symbols) for argument in node.args]
        arguments += [f"{name}={_text(argument, symbols)}" for name, argument in node.kwargs.items()]
        target = node.target.__name__ if node.target is operator.getitem else str(node.target)
        yield f"%{node.name} = {target}({', '.join(arguments)})" + (f"  # {comment}" if comment else "")


def _text(argument: Any, symbols: Mapping[str, str]) -> str:
    """An argument of a node: other nodes as %name, lists and numbers as Python has them, sizes over B and S."""
    kind = type(argument).__name__
    if kind == "Node":
        return f"%{argument.name}"
    if isinstance(argument, list | tuple):
        return "[" + ", ".join(_abbreviated([_text(item, symbols) for item in argument])) + "]"
    if kind == "SymInt":
        return re.sub(r"\bs\d+\b", lambda found: symbols.get(found[0], found[0]), str(argument))
    return str(argument)


def _abbreviated(items: list[str]) -> list[str]:
    """Long lists, such as those of foreach operators, by their first items and their length."""
    return items if len(items) <= LONGEST else [*items[:3], f"... {len(items)} in all"]
