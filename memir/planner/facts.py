"""What the planner needs of a step beside its operators: bytes of parameters, gradients and states, and what is sent."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from memir.analysis.flops import Work
from memir.errors import InconclusiveError
from memir.ir.core import Kind, Op, Program, Repeat
from memir.ir.declarations import member_count
from memir.ir.dtypes import ITEMSIZE
from memir.ir.layout import product
from memir.ir.size import ONE

_LAYER = re.compile(r"(?:^|\.)(?:\d+|\*)\.")


@dataclass(frozen=True, slots=True)
class Facts:
    """Bytes of a step on one GPU. `layer_...` are of all layers together, `root_...` of what is outside of them.

    `hidden`: bytes of one token's hidden state; `kept`: bytes of one token's keys and values in a layer; `routed`: bytes of one
    token on its way to its experts and back, 0 where there are none.
    """

    layers: int
    layer_parameters: int
    root_parameters: int
    layer_gradients: int
    root_gradients: int
    states: int
    buffers: int
    hidden: int
    kept: int
    routed: int

    @property
    def parameters(self) -> int:
        """All of them."""
        return self.layer_parameters + self.root_parameters

    @property
    def gradients(self) -> int:
        """Of all trained parameters."""
        return self.layer_gradients + self.root_gradients


def facts(program: Program, works: Sequence[Work], env: Mapping[str, int], layers: int) -> Facts:
    """The facts of a step; `env` has a value for each of the program's dims."""
    sums = dict.fromkeys(((kind, inside) for kind in Kind for inside in (True, False)), 0)
    seen: set[str] = set()
    for storage in program.storages:
        if storage.kind == Kind.GRADIENT:
            if storage.of is None or storage.of in seen:
                continue
            seen.add(storage.of)  # with several micro-batches a parameter has several
        elif not (storage.live_in and storage.live_out):
            continue
        if storage.device != "gpu":
            continue
        name = (storage.of or storage.name) if storage.kind == Kind.GRADIENT else storage.name
        nbytes = storage.nbytes.evaluate(env) * member_count(storage.name).evaluate(env)
        sums[storage.kind, bool(_LAYER.search(name))] += nbytes
    hidden, kept, routed = _sent(program, works, env)
    return Facts(
        layers,
        sums[Kind.PARAMETER, True],
        sums[Kind.PARAMETER, False],
        sums[Kind.GRADIENT, True],
        sums[Kind.GRADIENT, False],
        sums[Kind.OPTIMIZER_STATE, True] + sums[Kind.OPTIMIZER_STATE, False],
        sums[Kind.BUFFER, True] + sums[Kind.BUFFER, False],
        hidden,
        kept,
        routed,
    )


def _sent(program: Program, works: Sequence[Work], env: Mapping[str, int]) -> tuple[int, int, int]:
    tokens = env["B"] * env["S"]
    lookup = next((op for op in _ops(program) if op.opcode == "aten.embedding" and op.results), None)
    if lookup is None:
        raise InconclusiveError("the step has no embedding, so how wide a token is is not known", where=f"@{program.name}")
    hidden = lookup.results[0].shape[-1].evaluate(env) * ITEMSIZE[lookup.results[0].dtype]
    kept = routed = 0
    for work in works:
        dims = [d.evaluate(env) for d in work.shape.dims]
        if work.shape.form == "forward" and not kept:
            key, value = _width(work, 1, env), _width(work, 2, env)
            kept = (key + value) * ITEMSIZE[work.dtype]
        if work.shape.form == "groups" and not routed:
            routed = dims[1] * dims[3] * ITEMSIZE[work.dtype] // tokens
    return hidden, kept or 2 * hidden, routed


def _width(work: Work, operand: int, env: Mapping[str, int]) -> int:
    """Elements of one token in keys or values: heads times head size."""
    shape = work.operands[operand].shape if operand < len(work.operands) else (ONE,)
    tokens = work.shape.dims[0] * work.shape.dims[3]
    return product(shape).evaluate(env) // max(1, tokens.evaluate(env))


def _ops(program: Program) -> list[Op]:
    found: list[Op] = []

    def walk(ops: Sequence[Op | Repeat]) -> None:
        for op in ops:
            if isinstance(op, Repeat):
                walk(op.body)
            else:
                found.append(op)

    for phase in program.phases:
        walk(phase.ops)
    return found
