"""Parameters that a rank holds a part of, carried through optimizer states, clipping and the optimizer step.

An optimizer that works element by element does on a shard what it does on the whole: every tensor that had the parameter's
shape has the shard's. Norms give one number whatever the shape. What looks at a matrix as one (Adafactor's rows and columns,
Muon's products) is another computation on a shard, and ends as inconclusive.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from memir.errors import InconclusiveError
from memir.ir.core import Kind, Op, Storage, Value
from memir.ir.dtypes import ITEMSIZE
from memir.ir.layout import contiguous
from memir.ir.size import ONE, ZERO, Size
from memir.parallel.edit import Edit
from memir.rewrite.flow import Flow

# torch.optim's steps and torch.nn.utils.clip_grad_norm_; names without overload, _foreach_ and the underscore of in-place
_NAMES = """
add sub mul div neg pow sqrt rsqrt abs sign reciprocal lerp addcmul addcdiv maximum minimum clamp clamp_min clamp_max copy
zero fill where eq ne lt le gt ge clone _to_copy detach zeros_like ones_like empty_like full_like view alias t
_fused_adamw _fused_adam _fused_sgd _fused_adagrad
"""
_ELEMENTWISE = frozenset(_NAMES.split())
_TO_ONE_NUMBER = frozenset(("norm", "linalg_vector_norm", "sum", "mean", "max", "min", "any", "all", "isinf", "isnan"))
_TO_ONE_NUMBER |= {"_amp_foreach_non_finite_check_and_unscale"}


@dataclass(frozen=True, slots=True)
class Shard:
    """A rank's part of a parameter: its `shape`, in the elements of `dtype`, and the value that is its gradient in the step."""

    parameter: str  # its storage
    shape: tuple[Size, ...]
    dtype: str
    gradient: Value | None = None  # None: the gradient that the step makes, with the shard's shape

    @property
    def numel(self) -> Size:
        """Elements."""
        return product(self.shape)

    @property
    def nbytes(self) -> Size:
        """Bytes."""
        return self.numel * ITEMSIZE[self.dtype]


def product(shape: Iterable[Size]) -> Size:
    """The number of elements of a shape."""
    total = ONE
    for extent in shape:
        total = total * extent
    return total


def in_optimizer(phase: str) -> bool:
    """Whether a phase is after the last backward: clipping and the optimizer step."""
    return not phase.endswith(("forward", "backward"))


def shard_states(edit: Edit, shards: Sequence[Shard]) -> None:
    """Parameters, optimizer states and the optimizer's phase become those of the shards.

    `$w` is resized and its value before the first operator gets the shard's shape; what forward and backward make of that value
    is the caller's business. In the optimizer's phase every view of `$w` and of its gradient is replaced by the shard's own.
    InconclusiveError for an operator that does not work element by element.
    """
    _Sharding(edit, {s.parameter: s for s in shards}).run()


class _Sharding:
    def __init__(self, edit: Edit, shards: Mapping[str, Shard]) -> None:
        self.edit, self.flow, self.shards = edit, edit.flow, shards
        self.before = {v.name: v for v in self.flow.program.values}
        self.before |= {r.name: r for op in self.flow.ops for r in op.results}
        self.storages = {s.name: s for s in self.flow.program.storages}
        self.now: dict[str, Value] = {}  # the old name of a value -> what stands for it
        owned = [(s.name, self.shards.get(s.of or "")) for s in self.storages.values()]
        self.owner = {name: shard for name, shard in owned if shard is not None}

    def run(self) -> None:
        own: dict[str, Value] = {}
        for value in self.flow.program.values:
            shard = self.shards.get(value.storage)
            if shard is not None and value.storage not in own:
                own[value.storage] = self._like(value, shard, shard.dtype)
            elif shard is not None:
                raise InconclusiveError("a parameter has two tensors before the step", where=value.name)
            elif value.storage in self.owner:
                self._state(value)
        for name, shard in self.shards.items():
            if name not in own:
                raise InconclusiveError("a parameter has no tensor before the step", where=name)
            self.edit.values[own[name].name] = own[name]
            self.edit.resize(name, shard.nbytes)
        for position, op in enumerate(self.flow.ops):
            if in_optimizer(self.flow.phase[position]):
                self._step(position, op, own)

    def _state(self, value: Value) -> None:
        """A state with the parameter's shape gets the shard's; one number stays."""
        storage = self.storages[value.storage]
        shard = self.owner[value.storage]
        if storage.kind != Kind.OPTIMIZER_STATE or product(value.shape) is ONE:
            return
        if value.shape != self._whole(shard).shape:
            message = "an optimizer state has neither its parameter's shape nor one element: it cannot be sharded"
            raise InconclusiveError(message, where=storage.name)
        new = self._like(value, shard, value.dtype)
        self.now[value.name] = new
        self.edit.values[value.name] = new
        self.edit.resize(storage.name, shard.numel * ITEMSIZE[value.dtype])

    def _step(self, position: int, op: Op, own: Mapping[str, Value]) -> None:
        names: dict[str, str] = {}
        for operand in op.operands:
            value = self.before[operand]
            if value.storage in own:
                self.now[operand] = own[value.storage]
            elif operand not in self.now and self._is_gradient(value):
                shard = self.owner[value.storage]
                self.now[operand] = shard.gradient or self._like(value, shard, value.dtype)
            if operand in self.now:
                names[operand] = self.now[operand].name
        if names:
            self.edit.rename(position, names)
        touched = [o for o in op.operands if o in self.now and self.now[o].shape != self.before[o].shape]
        if not touched:
            return
        base = _base(op.opcode)
        if base in _TO_ONE_NUMBER and all(r.shape == () for r in op.results):
            return
        if base not in _ELEMENTWISE:
            where = " ".join(filter(None, (op.opcode, op.source)))
            raise InconclusiveError("this operator of the optimizer does not work element by element: no shards", where=where)
        self.edit.retype(position, {r.name: self._result(op, k, r) for k, r in enumerate(op.results)})

    def _result(self, op: Op, number: int, result: Value) -> Value:
        """A result has the shape of the operand that had its shape; of a list, of the one in its place."""
        operands = [op.operands[number]] if "_foreach_" in op.opcode else op.operands
        for operand in operands:
            old, new = self.before[operand], self.now.get(operand)
            if new is None or old.shape != result.shape:
                continue
            made = replace(result, shape=new.shape, strides=contiguous(new.shape), offset=ZERO)
            if result.storage == old.storage:
                made = replace(made, storage=new.storage)
            elif result.storage in self.flow.born:
                self.edit.resize(result.storage, product(new.shape) * ITEMSIZE[result.dtype])
            self.now[result.name] = made
            return made
        return result

    def _is_gradient(self, value: Value) -> bool:
        return value.storage in self.owner and self.storages[value.storage].kind == Kind.GRADIENT

    def _whole(self, shard: Shard) -> Value:
        return next(v for v in self.flow.program.values if v.storage == shard.parameter)

    @staticmethod
    def _like(value: Value, shard: Shard, dtype: str) -> Value:
        return replace(value, dtype=dtype, shape=shard.shape, strides=contiguous(shard.shape), offset=ZERO)


def gradients_of(flow: Flow) -> dict[str, Storage]:
    """Parameter's storage -> its gradient's; parameters that are not trained have none."""
    return {s.of: s for s in flow.program.storages if s.kind == Kind.GRADIENT and s.of is not None}


def _base(opcode: str) -> str:
    parts = opcode.split(".")
    return (parts[1] if len(parts) > 1 else opcode).removeprefix("_foreach_").removesuffix("_")
