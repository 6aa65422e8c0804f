"""Gradients taken out of a step: what backward, autograd's saved tensors and the optimizer are without some parameters.

What PyTorch does when a parameter has requires_grad=False, or when a stretch of the forward runs under no_grad:
- an operator whose operands require no gradient makes no autograd node and saves nothing; its results die where the last Python
  reference goes (`drops`);
- a node runs only what its remaining edges need (torch/csrc/autograd/generated, `should_compute_output`), so a tensor that was
  saved for the gradient of a frozen weight alone is not saved;
- the optimizer's lists lack the frozen parameters, their gradients and states.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

from memir.errors import InconclusiveError
from memir.ir.core import Kind, Op, Phase, Program, Storage, Value
from memir.ir.size import ONE, ZERO, Size
from memir.rewrite.flow import Flow, in_place

# Attention kernels of CUDA make no logarithms of the sums where nothing requires a gradient: their second result is empty
# (aten/src/ATen/native/transformers/attention.cpp, `compute_logsumexp`).
_LOGSUMEXP = ("aten._scaled_dot_product_efficient_attention", "aten._scaled_dot_product_cudnn_attention")
# Backward operators that leave a gradient out when it is not needed (`output_mask`, derivatives.yaml); others make all of theirs.
_MASKED = ("native_layer_norm_backward", "native_group_norm_backward", "_fused_rms_norm_backward", "convolution_backward")


def without_gradients(
    program: Program, frozen: Collection[str], no_grad: Collection[int] = ()
) -> tuple[Program, list[int]]:
    """The flat program when the parameters in the storages `frozen` are not trained, and its operators' positions before.

    `no_grad`: positions of forward operators (and of their recomputed twins) that run under no_grad whatever they read.
    InconclusiveError where an operator would be left without one of its operands.
    """
    if not frozen and not no_grad:
        return program, list(range(sum(len(phase.ops) for phase in program.phases)))
    return _Pruning(Flow(program), set(frozen), set(no_grad)).run()


@dataclass(slots=True)
class _Pruning:
    flow: Flow
    frozen: set[str]
    no_grad: set[int]
    gone: set[str] = field(default_factory=set)  # values that are not made any more
    alias: dict[str, str] = field(default_factory=dict)  # a value -> the one that stands in its place
    removed: set[int] = field(default_factory=set)
    kept_results: dict[int, tuple[Value, ...]] = field(default_factory=dict)
    empty: set[str] = field(default_factory=set)  # storages without a byte
    values: dict[str, Value] = field(default_factory=dict)
    takes_over: dict[str, str] = field(default_factory=dict)  # storage -> the one that lies in its place

    def run(self) -> tuple[Program, list[int]]:
        flow = self.flow
        trained = {s.name for s in flow.program.storages if s.kind == Kind.PARAMETER} - self.frozen
        requiring = flow.requiring(trained, self.no_grad)
        # Storages of what is not there without training: gradients and states of the frozen parameters.
        owned = {s.name for s in flow.program.storages if s.of in self.frozen}
        self._backward(requiring, owned)
        self._needed(owned)
        saves = self._saves(requiring)
        self._shorten_recomputation(saves)
        self._optimizer(owned)
        self._without_sums(requiring)
        ends = self._ends(saves)
        return self._rebuild(owned, saves, ends)

    # -- what is not computed

    def _backward(self, requiring: set[int], owned: set[str]) -> None:
        """Nodes that are not there, what they would have made, and additions that lose one side."""
        flow = self.flow
        for position, op in enumerate(flow.ops):
            if not flow.phase[position].endswith("backward") or flow.repeated[position]:
                continue
            node = flow.node[position]
            if node is not None and flow.made[node] not in requiring and flow.phase[flow.made[node]].endswith("forward"):
                if flow.gradient[position]:
                    self._remove(position)
                    continue
            lost = [o for o in op.operands if self._now(o) in self.gone]
            if not lost:
                continue
            if flow.gathers[position] and len(lost) == 1:
                kept = next(o for o in op.operands if o not in lost)
                self._replace(position, lost[0], kept)
            elif flow.gathers[position] or flow.gradient[position]:
                self._remove(position)
            else:
                raise _beyond(op)

    def _replace(self, position: int, lost: str, kept: str) -> None:
        """An addition that loses one operand: the other one is its result."""
        op = self.flow.ops[position]
        result = op.results[0]
        self.removed.add(position)
        self.alias[result.name] = self._now(kept)
        if self.flow.storage[kept] != result.storage:
            self.takes_over[result.storage] = self.flow.storage[kept]
            if in_place(op.opcode):
                self.alias[op.operands[0]] = self._now(kept)

    def _now(self, value: str) -> str:
        seen = value
        while seen in self.alias:
            seen = self.alias[seen]
        return seen

    def _remove(self, position: int) -> None:
        self.removed.add(position)
        self.gone |= {r.name for r in self.flow.ops[position].results if r.name not in self.alias}

    def _needed(self, owned: set[str]) -> None:
        """From the end backwards: what no gradient of a trained parameter is made of is not computed."""
        flow = self.flow
        storages = {s.name for s in flow.program.storages if s.live_out and s.name not in owned}
        gradients = {s.name for s in flow.program.storages if s.kind == Kind.GRADIENT and s.name not in owned}
        storages |= gradients | {self.takes_over[g] for g in gradients if g in self.takes_over}
        values: set[str] = set()
        for position in range(len(flow.ops) - 1, -1, -1):
            op = flow.ops[position]
            if position in self.removed:
                continue
            if not (flow.gradient[position] or flow.gathers[position]):
                if flow.is_forward(position):
                    values |= {self._now(o) for o in op.operands}
                continue
            made = [r for r in op.results if flow.born.get(r.storage) == position]
            writes = in_place(op.opcode)
            kept = []
            for value in op.results:
                content = value.storage in storages and (value in made or writes or value.storage in flow.born)
                if (content and flow.phase[flow.born.get(value.storage, position)].endswith("backward")) or value.name in values:
                    kept.append(value)
            if not kept and (op.results or not writes):
                self._remove(position)
                continue
            for value in made:
                storages.discard(value.storage)
            if op.opcode.split(".")[1] in _MASKED:
                self.kept_results[position] = tuple(kept)
                self.gone |= {r.name for r in op.results} - {r.name for r in kept}
            for operand in op.operands:
                now = self._now(operand)
                values.add(now)
                storages.add(flow.storage[now])

    def _saves(self, requiring: set[int]) -> dict[int, tuple[str, ...]]:
        """What the operators still save: their node is there, and its backward still reads it (or never did)."""
        flow = self.flow
        saves: dict[int, tuple[str, ...]] = {}
        for position, op in enumerate(flow.ops):
            if not op.saves or position not in requiring or position in flow.checkpoint:
                continue
            node = flow.node[position]
            group = flow.group.get(node or "", [])
            if group and not any(g not in self.removed for g in group):
                continue
            kept = []
            for name in op.saves:
                reading = [g for g in group if name in flow.reads(g)]
                if not reading or any(g not in self.removed for g in reading):
                    kept.append(name)
            if kept:
                saves[position] = tuple(kept)
        recomputed = {number for number, segment in enumerate(flow.segments) if any(p in saves for p in segment)}
        for position, number in flow.checkpoint.items():  # a checkpoint holds its arguments as long as anything within is saved
            if number in recomputed and flow.ops[position].saves:
                saves[position] = flow.ops[position].saves
        return saves

    def _shorten_recomputation(self, saves: dict[int, tuple[str, ...]]) -> None:
        """torch/utils/checkpoint.py, _recomputation_hook: recomputation ends when the last saved tensor is back."""
        for segment in self.flow.segments:
            last = max((p for p in segment if p in saves), default=-1)
            for position in segment:
                if position > last:
                    self._remove(position)

    def _optimizer(self, owned: set[str]) -> None:
        """Lists without the frozen parameters, their gradients and states; an operator on these alone goes."""
        flow = self.flow
        lost = owned | self.frozen
        dead: set[str] = set()
        for position, op in enumerate(flow.ops):
            if flow.phase[position].endswith(("forward", "backward")) or not op.operands:
                continue
            out = [o in dead or flow.storage[o] in lost for o in op.operands]
            if not any(out):
                continue
            together = op.opcode.startswith(_LISTS) or op.opcode in _STACKS
            if all(out) or not together:
                self.removed.add(position)
                dead |= {r.name for r in op.results}
            elif op.opcode not in _STACKS:
                self.kept_results[position] = tuple(r for k, r in enumerate(op.results) if not out[k])
                dead |= {r.name for k, r in enumerate(op.results) if out[k]}
        self.gone |= dead | {v for v, s in flow.storage.items() if s in owned}

    def _without_sums(self, requiring: set[int]) -> None:
        for position, op in enumerate(self.flow.ops):
            if op.opcode in _LOGSUMEXP and position not in requiring and position not in self.removed:
                first, sums, *rest = op.results
                shape = (*sums.shape[:2], ZERO) if len(sums.shape) == 3 else (*sums.shape[:2], ZERO, *sums.shape[3:])
                empty = replace(sums, shape=shape, strides=contiguous(shape))
                self.kept_results[position] = (first, empty, *rest)
                self.empty.add(sums.storage)

    # -- when storages die

    def _ends(self, saves: dict[int, tuple[str, ...]]) -> dict[str, int | None]:
        """Storage -> the operator after which it dies, None for one that lives on."""
        flow = self.flow
        touched: dict[str, list[int]] = defaultdict(list)
        for position, op in enumerate(flow.ops):
            if position in self.removed:
                continue
            for operand in op.operands:
                touched[flow.storage[self._now(operand)]].append(position)
            for value in self.kept_results.get(position, op.results):
                touched[flow.storage[self._now(value.name)]].append(position)
        heirs: dict[str, str] = {}
        for lost, heir in self.takes_over.items():
            heirs[self._heir(heir)] = lost
        ends: dict[str, int | None] = {}
        for storage in flow.program.storages:
            name = storage.name
            source = name
            while source in heirs:
                source = heirs[source]
            if storage.live_out or source not in flow.freed:
                ends[name] = None if source not in flow.freed else flow.freed[source]
                continue
            ends[name] = self._end(name, flow.freed[source], touched.get(name, []), saves)
        return ends

    def _heir(self, storage: str) -> str:
        while storage in self.takes_over:
            storage = self.takes_over[storage]
        return storage

    def _end(self, name: str, base: int, touched: list[int], saves: dict[int, tuple[str, ...]]) -> int:
        flow = self.flow
        before = flow.savers.get(name, [])
        after = [p for p in before if name in saves.get(p, ()) and p not in self.removed]
        remains = base not in self.removed
        drop = self._python_end(name)
        born = flow.born.get(name)
        if not after and born is not None and flow.phase[born].endswith("forward") and self._is_cast(born):
            return self._cast_end(name, base)
        if len(before) == len(after) and remains:
            return base
        if drop is not None and not after and (not touched or touched[-1] <= drop):
            return drop  # nothing holds it beyond the last Python reference: a saved tensor, or a checkpointed layer's input
        if len(before) == len(after):
            around = [base, *flow.group.get(flow.node[base] or "", [])]
            if not any(name in flow.reads(p) or name in {r.storage for r in flow.ops[p].results} for p in around):
                return base  # something else than this node let it go
            last = next((p for p in reversed(touched) if p <= base), None)
            return base if last is None else self._node_end(last)
        dropped = self._python_end(name)
        if dropped is None:
            return base
        ends = [dropped, *touched[-1:]]
        for position in after:
            ends += self._release(position)
        return max(ends)

    def _release(self, saver: int) -> list[int]:
        """The operator after which what this one saved is let go: of its node, or of all nodes of its checkpoint."""
        flow = self.flow
        nodes = [flow.node[saver]]
        if saver in flow.checkpoint:
            nodes = [flow.ops[p].forward_of for p in flow.segments[flow.checkpoint[saver]]]
        group = [p for node in nodes for p in flow.group.get(node or "", []) if p not in self.removed]
        return [max(group)] if group else []

    def _is_cast(self, position: int) -> bool:
        """Whether it makes another type of a frozen parameter."""
        op = self.flow.ops[position]
        return op.opcode == "aten._to_copy" and self.flow.reads(position) <= self.frozen

    def _cast_end(self, name: str, end: int) -> int:
        """aten/src/ATen/autocast_mode.cpp, cached_cast: only of parameters that require a gradient is the cast kept until the
        end of the forward; another one dies with the operator that was called (a linear layer ends in a view)."""
        flow = self.flow
        born = flow.born[name]
        used = [p for p in range(born, end + 1) if p == born or (flow.is_forward(p) and name in flow.reads(p))]
        last = used[-1]
        while last < end and flow.ops[last + 1].opcode in ("aten.view", "aten._unsafe_view"):
            if not flow.reads(last + 1) <= {r.storage for r in flow.ops[last].results}:
                break
            last += 1
        return last

    def _node_end(self, position: int) -> int:
        """The last operator of the same node: its incoming gradients and what it made for nobody die when it has run."""
        group = self.flow.group.get(self.flow.node[position] or "", []) if self.flow.gradient[position] else []
        return max((p for p in group if p not in self.removed), default=position)

    def _python_end(self, name: str) -> int | None:
        """Where the last Python reference to a saved storage goes; for a recomputed one, where it went the first time."""
        flow = self.flow
        born = flow.born.get(name)
        if name in flow.dropped:
            end = flow.dropped[name]
            return self._cast_end(name, end) if born is not None and self._is_cast(born) else end
        if born is None or not flow.repeated[born]:
            return None
        forward = flow.made[flow.ops[born].forward_of or ""]
        number = next(k for k, r in enumerate(flow.ops[born].results) if r.storage == name)
        twin = flow.ops[forward].results[number].storage
        end = flow.dropped.get(twin, flow.freed.get(twin))
        if end is None or not flow.phase[end].endswith("forward"):
            return None
        last = born
        for position in range(born, len(flow.ops)):
            if flow.repeated[position]:
                if flow.made[flow.ops[position].forward_of or ""] > end:
                    break
                last = position
        return last

    # -- the program again

    def _standing(self, operand: str, views: dict[Value, str]) -> str:
        """The value to read: one view may go by several names, of which the first may stand in an operator that is gone."""
        now = self._now(operand)
        return views.get(replace(self.values[now], name=""), now) if now in self.gone else now

    def _rebuild(self, owned: set[str], saves: dict[int, tuple[str, ...]], ends: dict[str, int | None]) -> tuple[Program, list[int]]:
        flow = self.flow
        values = {v.name: v for v in flow.program.values} | {r.name: r for op in flow.ops for r in op.results}
        new_frees: dict[int, list[str]] = defaultdict(list)
        made: set[str] = {s.name for s in flow.program.storages if s.live_in} - owned
        for position, op in enumerate(flow.ops):
            if position not in self.removed:
                made |= {r.storage for r in self.kept_results.get(position, op.results)}
        made -= owned
        order = {name: k for op in flow.ops for k, name in enumerate(op.frees)}
        for name, end in ends.items():
            if end is not None and name in made:
                new_frees[end].append(name)
        phases: list[tuple[str, list[Op]]] = []
        origins: list[int] = []
        sizes: dict[str, Value] = {}  # of stacks with fewer tensors
        self.values = values
        views: dict[Value, str] = {}  # a view -> the first name that it has in the new program
        for value in flow.program.values:
            views.setdefault(replace(value, name=""), value.name)
        for position, op in enumerate(flow.ops):
            phase = flow.phase[position]
            if not phases or phases[-1][0] != phase:
                phases.append((phase, []))
            frees = tuple(sorted(new_frees.get(position, ()), key=lambda n: order.get(n, 0)))
            if position in self.removed:
                if frees:
                    origins.append(position)
                    phases[-1][1].append(Op("memir.free", frees=frees))
                continue
            results = self.kept_results.get(position, op.results)
            operands = tuple(self._standing(o, views) for o in op.operands)
            for value in results:
                views.setdefault(replace(value, name=""), value.name)
            if any(o in self.gone for o in operands):
                if op.opcode.startswith(_LISTS) or op.opcode in _STACKS:
                    operands = tuple(
                        o for o in operands if o not in self.gone and flow.storage[o] not in self.frozen
                    )
                    results = tuple(_resized(r, op, len(operands)) for r in results)
                    sizes |= {r.storage: r for r in results if op.opcode in _STACKS}
                else:
                    raise _beyond(op)
            drops = tuple(s for s in op.drops if s in made and ends.get(s, -1) not in (position,) and _later(ends.get(s), position))
            if op.opcode in ("memir.free", "memir.alloc") and not (frees or drops or results):
                continue
            origins.append(position)
            phases[-1][1].append(
                replace(
                    op,
                    operands=operands,
                    results=results,
                    frees=frees,
                    drops=drops,
                    saves=saves.get(position, ()),
                    forward_of=op.forward_of,
                )
            )
        kept: list[Storage] = []
        for storage in flow.program.storages:
            if storage.name not in made:
                continue
            end, born = ends.get(storage.name), flow.born.get(storage.name)
            if storage.name in self.empty:
                storage = replace(storage, nbytes=ZERO)
            if storage.name in sizes:
                storage = replace(storage, nbytes=_bytes(sizes[storage.name], storage, values))
            if storage.kind == Kind.ACTIVATION and end is not None and born is not None and flow.phase[born] == flow.phase[end]:
                if not flow.repeated[born] or flow.repeated[end]:
                    storage = replace(storage, kind=Kind.TEMPORARY)
            heir_of = next((lost for lost in self.takes_over if self._heir(lost) == storage.name), None)
            if heir_of is not None:
                lost_storage = next(s for s in flow.program.storages if s.name == heir_of)
                storage = replace(lost_storage, name=storage.name, nbytes=storage.nbytes)
            kept.append(storage)
        inputs = tuple(v for v in flow.program.values if v.storage in made and v.name not in self.gone)
        named = tuple(Phase(name, tuple(ops)) for name, ops in phases)
        return replace(flow.program, storages=tuple(kept), values=inputs, phases=named), origins


_LISTS = ("aten._foreach_", "aten._fused_")
_STACKS = ("aten.stack", "aten.cat")


def _later(end: int | None, position: int) -> bool:
    return end is None or end > position


def _resized(value: Value, op: Op, count: int) -> Value:
    """The result of a stack of fewer tensors."""
    if op.opcode not in _STACKS:
        return value
    return replace(value, shape=(Size.of(count), *value.shape[1:]))


def _bytes(value: Value, storage: Storage, values: dict[str, Value]) -> Size:
    before = values[value.name].shape[0]
    return Size.of(storage.nbytes.constant // before.constant * value.shape[0].constant)


def contiguous(shape: Sequence[Size]) -> tuple[Size, ...]:
    """The strides of a tensor whose elements lie one after the other."""
    strides, step = [], ONE
    for extent in reversed(shape):
        strides.append(step)
        step = step * extent if extent.terms else step
    return tuple(reversed(strides))


def _beyond(op: Op) -> InconclusiveError:
    where = " ".join(filter(None, (op.opcode, op.path and f"@{op.path}", op.source)))
    return InconclusiveError("memir cannot tell what this operator does when some of its operands are frozen", where=where)


__all__ = ["without_gradients"]


def positions(flow: Flow, paths: Iterable[str]) -> set[int]:
    """The forward operators that run in these modules."""
    inside = tuple(paths)
    return {p for p, op in enumerate(flow.ops) if flow.is_forward(p) and op.path.startswith(inside)}
