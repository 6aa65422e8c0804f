"""Floating-point operations and bytes moved of a step, counted operator by operator from shapes.

A multiplication and an addition are two operations. Matrix products and attention are counted; elementwise work is not, it is
in the bytes that an operator reads and writes. Attention is counted in full, without halving it for a causal mask, as
Megatron-LM counts it (Narayanan et al. 2021, arXiv 2104.04473, appendix); its backward is five products to the forward's two
(FlashAttention-2, arXiv 2307.08691, section 2.3).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from memir.analysis.traffic import written
from memir.ir.core import Op, Program, Repeat, Value
from memir.ir.dtypes import ITEMSIZE
from memir.ir.layout import product
from memir.ir.names import index_text, is_range, join, split
from memir.ir.opset import numel
from memir.ir.size import ONE, ZERO, Size


@dataclass(frozen=True, slots=True)
class Shape:
    """What is multiplied. `form` and `dims`:

    product: (batch, m, n, k), so many products [m, k] x [k, n]. groups: (groups, rows, n, k), all rows together split among the
    groups; weights: (groups, m, n, rows), the same for a weight's gradient, rows summed. forward and backward, of attention:
    (batch, heads, queries, keys, head size, head size of values). "" is none of these.
    """

    form: str
    dims: tuple[Size, ...]
    flops: Size


NOTHING = Shape("", (), ZERO)
Rule = Callable[[Sequence[Value], Sequence[Value]], Shape]


@dataclass(frozen=True, slots=True)
class Work:
    """What one operator does, `times` times: `flops` and `nbytes` (read and written) each time."""

    phase: str
    op: Op
    times: Size
    flops: Size
    nbytes: Size
    dtype: str  # of the matrix product's first operand, or of the first result
    shape: Shape = NOTHING
    operands: tuple[Value, ...] = ()

    def bound(self, env: Mapping[str, int]) -> Work:
        """With numbers for these symbols; its operands stay as they are."""
        dims = tuple(d.substitute(env) for d in self.shape.dims)
        return replace(
            self,
            times=self.times.substitute(env),
            flops=self.flops.substitute(env),
            nbytes=self.nbytes.substitute(env),
            shape=Shape(self.shape.form, dims, self.shape.flops.substitute(env)),
        )


def _matrix(operands: Sequence[Value], results: Sequence[Value]) -> Shape:
    """mm, bmm: [.., m, k] x [.., k, n]; dot: [k] x [k]."""
    out, inner = results[0].shape, operands[-2].shape[-1]
    rows, columns = (out[-2], out[-1]) if len(out) > 1 else (ONE, product(out))
    return Shape("product", (product(out[:-2]), rows, columns, inner), 2 * numel(results[0]) * inner)


def _grouped(operands: Sequence[Value], results: Sequence[Value]) -> Shape:
    """_grouped_mm: [T, k] x [E, k, n], or for a weight's gradient [k, T] x [T, n], each token in one of E groups."""
    out, left, right = results[0].shape, operands[0].shape, operands[1].shape
    if len(out) == 3 and len(left) == 2:
        return Shape("weights", (out[0], out[1], out[2], left[-1]), 2 * out[-2] * out[-1] * left[-1])
    flops = 2 * numel(results[0]) * left[-1]
    return Shape("groups", (right[0] if len(right) == 3 else ONE, product(left[:-1]), out[-1], left[-1]), flops)


def _attention(form: str, query: Value, key: Value, value: Value, products: tuple[int, int], heads_last: bool) -> Shape:
    """Products with the head size of queries and keys, and with that of values. Tensors are [B, H, S, D], or [B, S, H, D]."""
    head, length = (2, 1) if heads_last else (1, 2)
    batch, heads, rows, columns = query.shape[0], query.shape[head], query.shape[length], key.shape[length]
    sizes = query.shape[3], value.shape[3]
    flops = 2 * batch * heads * rows * columns * (products[0] * sizes[0] + products[1] * sizes[1])
    return Shape(form, (batch, heads, rows, columns, *sizes), flops)


def _attention_forward(operands: Sequence[Value], results: Sequence[Value]) -> Shape:
    return _attention("forward", operands[0], operands[1], operands[2], (1, 1), False)


def _attention_backward(operands: Sequence[Value], results: Sequence[Value]) -> Shape:
    """Scores again, and the gradients of probabilities, values, queries and keys."""
    return _attention("backward", operands[1], operands[2], operands[3], (3, 2), False)


def _package_forward(operands: Sequence[Value], results: Sequence[Value]) -> Shape:
    """flash-attn 2, the package: [B, S, H, D]."""
    return _attention("forward", operands[0], operands[1], operands[2], (1, 1), True)


def _package_backward(operands: Sequence[Value], results: Sequence[Value]) -> Shape:
    return _attention("backward", operands[1], operands[2], operands[3], (3, 2), True)


def _convolution(operands: Sequence[Value], results: Sequence[Value]) -> Shape:
    inner = product(operands[1].shape[1:])
    out = results[0].shape
    return Shape("product", (ONE, product(out[:1] + out[2:]), out[1], inner), 2 * numel(results[0]) * inner)


_KERNELS = ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
_RULES: dict[str, Rule] = {
    "aten.mm": _matrix,
    "aten.bmm": _matrix,
    "aten.addmm": _matrix,
    "aten.baddbmm": _matrix,
    "aten.dot": _matrix,
    "aten._grouped_mm": _grouped,
    "aten.convolution": _convolution,
    "flash_attn._flash_attn_forward": _package_forward,
    "flash_attn._flash_attn_backward": _package_backward,
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
        self.places: dict[str, dict[tuple[str, Size | None], None]] = defaultdict(dict)  # of a family, see `_keep`
        self.sizes: dict[tuple[str, tuple[Size, ...]], Size] = {}  # bytes by type and shape
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
            if op.opcode.startswith("memir.") or self._is_view(op):
                continue
            rule = _RULES.get(op.opcode)
            shape = rule(operands, op.results) if rule is not None else NOTHING
            dtype = operands[0].dtype if rule is not None else (op.results or operands)[0].dtype
            yield Work(phase, op, times, shape.flops, self._moved(op, operands), dtype, shape, tuple(operands))

    def _moved(self, op: Op, operands: Sequence[Value]) -> Size:
        read = self._bytes(zip(op.operands, operands, strict=True))
        made = self._bytes((result.name, result) for result in op.results)
        if op.opcode == "aten.cat":  # it reads what it writes; pieces over a symbol of ranks are one operand
            return made + made
        if op.results:
            return read + made
        again = written(op.opcode, len(operands))
        return read + self._bytes((op.operands[i], operands[i]) for i in again)

    def _bytes(self, named: Iterable[tuple[str, Value]]) -> Size:
        total = ZERO
        for name, value in named:
            key = value.dtype, value.shape
            if key not in self.sizes:
                self.sizes[key] = numel(value) * ITEMSIZE[value.dtype]
            total = total + (self._members(name) * self.sizes[key] if is_range(name) else self.sizes[key])
        return total

    def _members(self, name: str) -> Size:
        """How many tensors a range stands for."""
        total = ONE
        for index in split(name)[1]:
            if index.ranged and index.size is not None:
                total = total * (index.size - index.start)
        return total

    def _keep(self, value: Value) -> None:
        """Members of a family are alike, and the storages of a few families lie as far from their values' indices as one's."""
        self.values[value.name] = value
        (base, own), (place, at) = split(value.name), split(value.storage)
        self.values[base] = value
        if len(own) == len(at) == 1 and own[0].size is not None and at[0].size is not None:
            self.places[base][place, at[0].size - own[0].size] = None
        else:
            self.places[base][value.storage, None] = None

    def _find(self, name: str) -> Value:
        return self.values.get(name) or self.values[split(name)[0]]

    def _is_view(self, op: Op) -> bool:
        """Whether it only makes handles: all results lie in operands' storages, and nothing is written in place."""
        parts = op.opcode.split(".")
        if not op.results or (len(parts) > 1 and parts[1].endswith("_")):
            return False
        storages = {storage for name in op.operands for storage in self._storages(name)}
        return all(r.storage in storages for r in op.results)

    def _storages(self, name: str) -> list[str]:
        """A value's storage; of a family's member that is not known itself, those that lie where the known ones' do."""
        if name in self.values:
            return [self.values[name].storage]
        base, own = split(name)
        found = []
        for place, distance in self.places[base]:
            if distance is None or len(own) != 1 or own[0].size is None:
                found.append(place)
            else:
                found.append(join(place, (index_text(own[0].size + distance),)))
        return found


def total_flops(works: Sequence[Work], env: Mapping[str, int], phases: tuple[str, ...] = ()) -> int:
    """The operations of a step at `env`; only of phases whose name ends in one of `phases`, if given."""
    return sum(
        w.times.evaluate(env) * w.flops.evaluate(env)
        for w in works
        if w.flops.terms and (not phases or w.phase.endswith(phases))
    )
