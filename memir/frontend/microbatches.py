"""Gradient accumulation: of many micro-batches three are traced, the first, one between, and the last.

After the first micro-batch the gradients are there, and each one between ends as it began. That is checked: the same storages
by size are alive after the second as after the first, so the third begins where the second did, and does the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from memir.ir.core import Phase, Program
from memir.ir.domain import Condition, points
from memir.ir.size import Size
from memir.ir.unroll import unroll

TRACED = 3


def collapsed(program: Program, count: int) -> Program | None:
    """The program of TRACED micro-batches as the one of `count`; None where the second ends with other bytes than it began.

    Its phases micro1.forward and micro1.backward stand for all between the first and the last: micro1-62.forward.
    """
    flat = _flat(program)
    first, second = (_alive_after(flat, f"micro{k}.backward") for k in (0, 1))
    if first != second:
        return None
    between = f"micro1-{count - 2}"
    names = {"micro1": between, f"micro{TRACED - 1}": f"micro{count - 1}"}
    return replace(program, phases=tuple(_renamed(phase, names) for phase in program.phases))


def _renamed(phase: Phase, names: Mapping[str, str]) -> Phase:
    head, dot, rest = phase.name.partition(".")
    return replace(phase, name=names.get(head, head) + dot + rest)


def _flat(program: Program) -> Program:
    """The program at its least depth, if it has one: where a layer's storages are alive does not depend on it."""
    depth = [d for d in program.dims if d not in ("B", "S")]
    own = [text for text in program.domain if (c := Condition.read(text)) and c.symbols() <= set(depth)]
    return unroll(program, points(depth, own, limit=1)[0] if depth else {})


def _alive_after(program: Program, last: str) -> Counter[tuple[str, Size]]:
    """Device and size of the storages alive after a phase of a flat program, and how many there are of each."""
    alive = {s.name for s in program.storages if s.live_in}
    done: set[str] = set()
    for phase, op in program.ops():
        if last in done and phase.name != last:
            break
        done.add(phase.name)
        alive |= {r.storage for r in op.results}
        alive -= set(op.frees)
    return Counter((s.device, s.nbytes) for s in program.storages if s.name in alive)
