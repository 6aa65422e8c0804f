"""Experts divided over ranks: each rank's tokens go to the experts' ranks and come back, as transformers' AllToAllEP does it.

transformers/distributed/expert_parallel.py (5.24), `AllToAllEP._dispatch_tokens` and `_combine_tokens` around
`grouped_mm_experts_forward`, which runs with one expert a row and masks rows that are no expert's. The rank's experts, and what
they compute, stay the operators that they are in the step; what is added is written down with the moment at which it dies.
"""

from __future__ import annotations

from memir.errors import UsageError
from memir.ir.core import Program
from memir.parallel.edit import Edit
from memir.parallel.exchange_backward import ExchangeBackward
from memir.parallel.exchange_forward import ExchangeForward
from memir.parallel.experts import calls_of
from memir.parallel.shards import Shard, shard_states
from memir.rewrite.flow import Flow


def divided_experts(program: Program, degree: int, load: int) -> tuple[Program, list[int]]:
    """The flat program with 1/degree of each layer's experts; the origin of each operator.

    `load`: rows that the rank receives over those that it sends; 1 is balanced. UsageError, InconclusiveError: as `calls_of`,
    and experts that do not divide.
    """
    flow = Flow(program)
    calls = calls_of(flow)
    edit = Edit(flow)
    values = {v.name: v for v in program.values} | {r.name: r for op in flow.ops for r in op.results}
    experts = {flow.storage[flow.ops[p].operands[1]] for call in calls for p in (call.up, call.down)}
    whole = [v for v in program.values if v.storage in experts]
    for value in whole:
        count = value.shape[0]
        if not count.is_constant or count.constant % degree:
            raise UsageError(f"expert-parallel: {count} experts do not divide by {degree}", where=value.name)
    shards = [Shard(v.storage, (v.shape[0].exact_div(degree), *v.shape[1:]), v.dtype) for v in whole]
    shard_states(edit, shards)
    for call in calls:
        forward = flow.made.get(flow.ops[call.up].forward_of or "", call.up)
        _Call(edit, values, call, next(c for c in calls if c.up == forward), degree, load).run()
    return edit.applied()


class _Call(ExchangeForward, ExchangeBackward):
    """A call of the experts, forward and backward."""

    __slots__ = ()

    def run(self) -> None:
        """Puts the edits in."""
        self._forward()
        if self.call.saves:
            self._backward()
