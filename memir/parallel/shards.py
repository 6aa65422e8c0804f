"""Parameters that a rank holds a part of, carried through optimizer states, clipping and the optimizer step.

An optimizer that works element by element does on a shard what it does on the whole: every tensor that had the parameter's
shape has the shard's. Norms give one number whatever the shape. What looks at a matrix as one (Adafactor's rows and columns,
Muon's products) is another computation on a shard, and ends as inconclusive.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from memir.errors import InconclusiveError, UsageError
from memir.ir.core import Kind, Op, Storage, Value
from memir.ir.dtypes import ITEMSIZE
from memir.ir.layout import contiguous, product
from memir.ir.size import ONE, ZERO, Size, ceil_div
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
class Chunk:
    """A rank's part of a tensor cut along dimension 0: its `shape`, and the elements of the padded part (`padded`)."""

    shape: tuple[Size, ...]
    padded: Size


def chunk_of(shape: Sequence[Size], degree: Size, rank: int, where: str = "") -> Chunk:
    """The part of `rank` among `degree`: as torch.chunk cuts, every part padded to the first one's rows.

    (torch/distributed/fsdp/_fully_shard/_fsdp_param.py, `_init_sharded_param`.) The last parts may be short, or empty.
    UsageError for a tensor without dimensions, InconclusiveError for one whose rows are a symbol where that matters.
    """
    if not shape:
        raise UsageError("a parameter of one number has no dimension to be cut along", where=where)
    rows = ceil_div(shape[0], degree)
    own = rows
    if rank:
        if not (rows.is_constant and shape[0].is_constant):
            raise InconclusiveError("the part of a rank after the first needs numbers for rows and degree", where=where)
        own = Size.of(min(rows.constant, max(0, shape[0].constant - rank * rows.constant)))
    rest = product(shape[1:])
    return Chunk((own, *shape[1:]), rows * rest)


@dataclass(frozen=True, slots=True)
class Shard:
    """A rank's part of a parameter: its `shape`, in the elements of `dtype`, and the value that is its gradient in the step.

    The parameter's storage may be larger than the part (`padded`, elements); its states and gradient are not.
    """

    parameter: str  # its storage
    shape: tuple[Size, ...]
    dtype: str
    gradient: Value | None = None  # None: the gradient that the step makes, with the shard's shape
    padded: Size | None = None  # None: no padding
    device: str = "gpu"  # "host": the parameter, its states and the optimizer's phase are there

    @property
    def numel(self) -> Size:
        """Elements."""
        return product(self.shape)

    @property
    def nbytes(self) -> Size:
        """Bytes of the parameter's storage."""
        return (self.numel if self.padded is None else self.padded) * ITEMSIZE[self.dtype]


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
        self.first = {v.storage: v for v in reversed(self.flow.program.values)}
        self.now: dict[str, Value] = {}  # the old name of a value -> what stands for it
        owned = [(s.name, self.shards.get(s.of or "")) for s in self.storages.values()]
        self.owner = {name: shard for name, shard in owned if shard is not None}

    def run(self) -> None:
        own: dict[str, Value] = {}
        for value in self.flow.program.values:
            if self.edit.values.get(value.name, value) is None:
                continue
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
            self.edit.storages[name] = replace(self.edit.storage(name), nbytes=shard.nbytes, device=shard.device)
        for position, op in enumerate(self.flow.ops):
            now = self.edit.ops.get(position, op)  # an edit before may have taken it out, or members of its lists
            if now is not None and in_optimizer(self.flow.phase[position]):
                self._step(position, now, own)

    def _state(self, value: Value) -> None:
        """A state with the parameter's shape gets the shard's; one number stays."""
        storage = self.storages[value.storage]
        shard = self.owner[value.storage]
        if storage.kind != Kind.OPTIMIZER_STATE or product(value.shape) is ONE:
            return
        if value.shape != self._whole(shard).shape:
            message = "an optimizer state has neither its parameter's shape nor one element: it cannot be sharded"
            raise InconclusiveError(message, where=storage.name)
        dtype = shard.dtype if value.dtype == self._whole(shard).dtype else value.dtype
        new = self._like(value, shard, dtype)
        self.now[value.name] = new
        self.edit.values[value.name] = new
        self._settle(storage.name, new)

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
        changed = [(self.before[o], self.now[o]) for o in op.operands if o in self.now]
        changed = [(old, new) for old, new in changed if _kind(old) != _kind(new)]
        if not changed:
            return
        base = _base(op.opcode)
        to_one = base in _TO_ONE_NUMBER and all(r.shape == () for r in op.results)
        if to_one or all(old.shape == new.shape for old, new in changed):
            self._retype(position, op, {old.dtype: new.dtype for old, new in changed})
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
            dtype = new.dtype if result.dtype == old.dtype else result.dtype
            made = replace(result, dtype=dtype, shape=new.shape, strides=contiguous(new.shape), offset=ZERO)
            if result.storage == old.storage:
                made = replace(made, storage=new.storage, strides=new.strides, offset=new.offset)
            elif result.storage in self.flow.born:
                self._settle(result.storage, made)
            self.now[result.name] = made
            return made
        return result

    def _retype(self, position: int, op: Op, dtypes: Mapping[str, str]) -> None:
        """Shapes stay: what is written in place lies where its operand does now, what is made gets the type of the operands."""
        for number, result in enumerate(op.results):
            made = self._result(op, number, result)
            if made is result and dtypes.get(result.dtype, result.dtype) != result.dtype:
                made = self.now[result.name] = replace(result, dtype=dtypes[result.dtype])
                if result.storage in self.flow.born:
                    self._settle(result.storage, made)
            self.edit.retype(position, {result.name: made})

    def _settle(self, storage: str, value: Value) -> None:
        """The storage is as large as the tensor in it, and on the host where the optimizer runs there."""
        old = self.edit.storage(storage)
        device = "host" if any(s.device == "host" for s in self.shards.values()) else old.device
        self.edit.storages[storage] = replace(old, nbytes=product(value.shape) * ITEMSIZE[value.dtype], device=device)

    def _is_gradient(self, value: Value) -> bool:
        return value.storage in self.owner and self.storages[value.storage].kind == Kind.GRADIENT

    def _whole(self, shard: Shard) -> Value:
        return self.first[shard.parameter]

    @staticmethod
    def _like(value: Value, shard: Shard, dtype: str) -> Value:
        return replace(value, dtype=dtype, shape=shard.shape, strides=contiguous(shard.shape), offset=ZERO)


def gradients_of(flow: Flow) -> dict[str, Storage]:
    """Parameter's storage -> its gradient's; parameters that are not trained have none."""
    return {s.of: s for s in flow.program.storages if s.kind == Kind.GRADIENT and s.of is not None}


def _kind(value: Value) -> tuple[object, ...]:
    return value.shape, value.dtype, value.storage


def _base(opcode: str) -> str:
    parts = opcode.split(".")
    return (parts[1] if len(parts) > 1 else opcode).removeprefix("_foreach_").removesuffix("_")
