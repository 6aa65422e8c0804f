"""Floating-point operations and bytes moved of a step, counted operator by operator from shapes.

A multiplication and an addition are two operations. Matrix products and attention are counted; elementwise work is not, it is
in the bytes that an operator reads and writes. Attention is counted in full, without halving it for a causal mask, as
Megatron-LM counts it (Narayanan et al. 2021, arXiv 2104.04473, appendix); its backward is five products to the forward's two
(FlashAttention-2, arXiv 2307.08691, section 2.3).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from memir.ir.core import Op, Program, Repeat, Value
from memir.ir.dtypes import ITEMSIZE
from memir.ir.names import is_range, split
from memir.ir.size import ONE, ZERO, Size

Rule = Callable[[Sequence[Value], Sequence[Value]], Size]


@dataclass(frozen=True, slots=True)
class Work:
    """What one operator does, `times` times: `flops` and `nbytes` (read and written) each time."""

    phase: str
    op: Op
    times: Size
    flops: Size
    nbytes: Size
    dtype: str  # of the matrix product's first operand, or of the first result


def numel(value: Value) -> Size:
    """Number of elements."""
    total = ONE
    for extent in value.shape:
        total = total * extent
    return total


def _matrix(operands: Sequence[Value], results: Sequence[Value]) -> Size:
    """mm, bmm: [.., m, k] x [.., k, n]."""
    return 2 * numel(results[0]) * operands[-2].shape[-1]


def _grouped(operands: Sequence[Value], results: Sequence[Value]) -> Size:
    """_grouped_mm: [T, k] x [E, k, n], or for a weight's gradient [k, T] x [T, n], each token in one of E groups."""
    if len(results[0].shape) == 3 and len(operands[0].shape) == 2:
        return 2 * results[0].shape[-2] * results[0].shape[-1] * operands[0].shape[-1]
    return 2 * numel(results[0]) * operands[0].shape[-1]


def _attention(query: Value, key: Value, value: Value, products: tuple[int, int]) -> Size:
    """Products with the head size of queries and keys, and with that of values."""
    pairs = numel(query) * key.shape[2]  # B * H * S * D * T
    with_values = query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2] * value.shape[3]
    return 2 * (products[0] * pairs + products[1] * with_values)


def _attention_forward(operands: Sequence[Value], results: Sequence[Value]) -> Size:
    return _attention(operands[0], operands[1], operands[2], (1, 1))


def _attention_backward(operands: Sequence[Value], results: Sequence[Value]) -> Size:
    """Scores again, and the gradients of probabilities, values, queries and keys."""
    return _attention(operands[1], operands[2], operands[3], (3, 2))


def _convolution(operands: Sequence[Value], results: Sequence[Value]) -> Size:
    total = 2 * numel(results[0])
    for extent in operands[1].shape[1:]:
        total = total * extent
    return total


_KERNELS = ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
_RULES: dict[str, Rule] = {
    "aten.mm": _matrix,
    "aten.bmm": _matrix,
    "aten.addmm": _matrix,
    "aten.baddbmm": _matrix,
    "aten.dot": _matrix,
    "aten._grouped_mm": _grouped,
    "aten.convolution": _convolution,
    **{f"aten._scaled_dot_product_{kernel}": _attention_forward for kernel in _KERNELS},
    **{f"aten._scaled_dot_product_{kernel}_backward": _attention_backward for kernel in _KERNELS},
}


def work_of(program: Program) -> list[Work]:
    """Every operator that reads or writes memory, in textual order; a Repeat's once, with its count."""
    return list(_Reading(program).read())


class _Reading:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.values: dict[str, Value] = {}
        for value in program.values:
            self._keep(value)

    def read(self) -> Iterator[Work]:
        for phase in self.program.phases:
            yield from self._body(phase.name, phase.ops, Size.of(phase.times))

    def _body(self, phase: str, ops: Sequence[Op | Repeat], times: Size) -> Iterator[Work]:
        for op in ops:
            if isinstance(op, Repeat):
                yield from self._body(phase, op.body, times * op.count)
                continue
            operands = [self._find(name) for name in op.operands]
            for value in op.results:
                self._keep(value)
            if op.opcode.startswith("memir.") or _is_view(op, operands):
                continue
            rule = _RULES.get(op.opcode)
            flops = rule(operands, op.results) if rule is not None else ZERO
            dtype = operands[0].dtype if rule is not None else (op.results or operands)[0].dtype
            yield Work(phase, op, times, flops, self._moved(op, operands), dtype)

    def _moved(self, op: Op, operands: Sequence[Value]) -> Size:
        total = ZERO
        for name, value in [*zip(op.operands, operands, strict=True), *((r.name, r) for r in op.results)]:
            total = total + self._members(name) * numel(value) * ITEMSIZE[value.dtype]
        return total

    def _members(self, name: str) -> Size:
        """How many tensors a name stands for: a range's length."""
        if not is_range(name):
            return ONE
        total = ONE
        for index in split(name)[1]:
            if index.ranged and index.size is not None:
                total = total * (index.size - index.start)
        return total

    def _keep(self, value: Value) -> None:
        self.values[value.name] = value
        self.values[split(value.name)[0]] = value  # members of a family are alike

    def _find(self, name: str) -> Value:
        return self.values.get(name) or self.values[split(name)[0]]


def _is_view(op: Op, operands: Sequence[Value]) -> bool:
    """Whether it only makes handles: all results lie in operands' storages, and nothing is written in place."""
    parts = op.opcode.split(".")
    if len(parts) > 1 and parts[1].endswith("_"):
        return False
    storages = {v.storage for v in operands}
    return bool(op.results) and all(r.storage in storages for r in op.results)


def total_flops(works: Sequence[Work], env: Mapping[str, int], phases: tuple[str, ...] = ()) -> int:
    """The operations of a step at `env`; only of phases whose name ends in one of `phases`, if given."""
    return sum(
        w.times.evaluate(env) * w.flops.evaluate(env)
        for w in works
        if w.flops.terms and (not phases or w.phase.endswith(phases))
    )
