"""The experts of a mixture as transformers 5 runs them, found in a step: `grouped_mm_experts_forward`, operator by operator.

transformers/integrations/moe.py: tokens are sorted by their expert, gathered, multiplied by all experts' stacked weights at
once (`aten._grouped_mm`), weighted, put back in order and summed over each token's experts.
"""

from __future__ import annotations

from dataclasses import dataclass

from memir.errors import InconclusiveError, UsageError
from memir.ir.core import Op
from memir.rewrite.flow import Flow

GROUPED = "aten._grouped_mm"
_VIEWS = (
    "aten.view",
    "aten._unsafe_view",
    "aten.transpose",
    "aten.unsqueeze",
    "aten.squeeze",
    "aten.expand",
    "aten.split",
    "aten.t",
)
_BEFORE = ("aten.sort", "aten.floor_divide", "aten.index", "aten.index", "aten._to_copy", "aten.histc", "aten.cumsum")
_BEHIND = ("aten.mul", "aten.empty_like", "aten.arange", "aten.index_put_", "aten.index", "aten.sum")


@dataclass(frozen=True, slots=True)
class Forward:
    """Positions of one call of the experts; those of the backward of each, by the same names, are in `flow.group`."""

    first: int  # the first operator of the call, a view or the sort
    sort: int  # values and order
    token: int  # order // k
    gather: int  # the tokens, sorted
    weigh: int  # the routing weights, sorted
    count: int  # tokens of each expert: histc
    ends: int  # their running sum, the groups' ends
    up: int  # the first grouped product
    down: int  # the second
    weighted: int  # the second's result times the weights
    inverse: int  # the order's inverse
    back: int | None  # the weighted results in the order of tokens; None where recomputation stops before
    total: int | None  # summed over the experts of a token
    narrow: int | None  # cast to the tokens' type, where the routing weights have a wider one
    saves: bool


def calls_of(flow: Flow) -> list[Forward]:
    """The calls in the order in which they run, recomputed ones too.

    UsageError where no grouped product is in the step. InconclusiveError for experts that are written in another way.
    """
    found: list[Forward] = []
    products = [p for p, op in enumerate(flow.ops) if op.opcode == GROUPED and flow.is_forward(p)]
    if not products:
        raise UsageError(
            "expert-parallel: no expert's weights are stacked in this step", hint="transformers' grouped experts have it"
        )
    for up, down in zip(products[::2], products[1::2], strict=True):
        path = flow.ops[up].path
        within = [p for p in _run(flow, up, path) if not flow.ops[p].opcode.startswith(_VIEWS)]
        before = [p for p in within if p < up]
        behind = [p for p in within if p > down]
        cast = behind.pop() if behind and flow.ops[behind[-1]].opcode == "aten._to_copy" else None
        stops = _are(flow, behind, _BEHIND[:4]) and flow.repeated[up]  # all that is saved is back: checkpoint's early stop
        behind_is = stops or _are(flow, behind, _BEHIND)
        if not (_are(flow, before, _BEFORE) and behind_is and flow.ops[down].path == path):
            where = " ".join(filter(None, (f"@{path}", flow.ops[up].source)))
            raise InconclusiveError(
                "expert-parallel: the experts are not called as transformers' grouped ones are", where=where
            )
        sort, token, gather, weigh, _, count, ends = before
        weighted, _, _, inverse, back, total = (*behind, None, None) if stops else behind
        first = min(p for p in _run(flow, up, path))
        saves = bool(flow.ops[gather].saves)  # products save their weights under checkpoints, too
        assert weighted is not None
        assert inverse is not None
        found.append(
            Forward(first, sort, token, gather, weigh, count, ends, up, down, weighted, inverse, back, total, cast, saves)
        )
    return found


def _run(flow: Flow, middle: int, path: str) -> list[int]:
    """The operators of the module around a position, without one of another module between."""

    def belongs(position: int) -> bool:
        op: Op = flow.ops[position]
        if not (op.path == path or op.path.startswith(f"{path}.")):
            return False
        again = op.forward_of is not None and flow.ops[flow.made[op.forward_of]].opcode == op.opcode
        return flow.is_forward(position) or (flow.repeated[middle] and position > middle and again)

    first = last = middle
    while first > 0 and belongs(first - 1):
        first -= 1
    while last + 1 < len(flow.ops) and belongs(last + 1):
        last += 1
    return list(range(first, last + 1))


def _are(flow: Flow, positions: list[int], opcodes: tuple[str, ...]) -> bool:
    names = [flow.ops[p].opcode for p in positions]
    return len(names) == len(opcodes) and all(n == o or n.startswith(f"{o}.") for n, o in zip(names, opcodes, strict=True))
