"""The options of distributed methods: `--parallel` and its shorthands, put into the request as the text of passes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import click

from memir.cli.options import Request

_DEGREES = (
    ("tp", "Tensor parallel over N ranks."),
    ("cp", "Context parallel: the sequence over N ranks."),
    ("ep", "Expert parallel over N ranks: not described yet, an error."),
    ("pp", "Pipeline parallel: N stages, all of which are shown."),
    ("fsdp", "FSDP2, fully_shard around every layer, over N ranks."),
    ("ddp", "DistributedDataParallel over N ranks; with --zero, DeepSpeed over them."),
)
_SHORT = (*(name for name, _ in _DEGREES), "zero")  # the fields of memir.parallel.shorthand.Shorthand
NAMES = ("parallel", *_SHORT)


def parallel_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """`--parallel`, `--tp` and so on, below `step_options`: the request's `parallel`."""

    @functools.wraps(command)
    def wrapper(*, request: Request, parallel: str, **others: Any) -> Any:
        given = {name: others.pop(name) for name in _SHORT}
        if parallel or any(degree is not None for degree in given.values()):
            from memir.parallel.shorthand import Shorthand

            request = replace(request, parallel=Shorthand(**given).passes(parallel))
        return command(request=request, **others)

    text = "DeepSpeed's ZeRO, stage 1, 2 or 3, over the ranks of --ddp."
    wrapper = click.option("--zero", type=int, metavar="STAGE", help=text)(wrapper)
    for name, text in reversed(_DEGREES):
        wrapper = click.option(f"--{name}", type=click.IntRange(min=1), metavar="N", help=text)(wrapper)
    text = "One rank's step under distributed methods, B its own batch: 'tensor-parallel{degree=2},fsdp{degree=8}'."
    return click.option("--parallel", metavar="PASSES", default="", help=text)(wrapper)
