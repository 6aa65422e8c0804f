"""Layers computed again in backward, as torch.utils.checkpoint (use_reentrant=False) around each of them does it.

`frames.py` says what runs again and when; here it is written into the program. When the recomputation has come to its end, its
Python frames are gone, and of what it made only that is left which was saved. With selective checkpointing
(`_CachingTorchDispatchMode` in torch/utils/checkpoint.py) the results of some operators are kept and not computed again: each
until the recomputation has come to it, or as long as the frame where it stops before.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from memir.errors import InconclusiveError
from memir.ir.core import Kind, Op, Phase, Program, Storage, Value
from memir.ir.size import ONE, ZERO, Size
from memir.rewrite.flow import Flow
from memir.rewrite.frames import Frame, Stretch, check_passed, frame_of, node_of, python_end, returned

# Bytes of the CPU generator's state: at::CPUGeneratorImpl::get_state, aten/src/ATen/CPUGeneratorImpl.cpp.
_GENERATOR = Size.of(5056)


def recomputed(
    flow: Flow,
    stretches: Sequence[Stretch],
    *,
    passed: Collection[str] = (),
    early_stop: bool = True,
    generator: bool = False,
) -> tuple[Program, list[int]]:
    """The flat program in which the stretches are checkpointed, and for each of its operators the position where it runs.

    `passed`: storages that every stretch is called with although it does not read them.
    `generator`: the state of the CPU's random generator counts; each checkpoint keeps one, and has another while it recomputes.
    UsageError where PyTorch refuses; InconclusiveError where backward reads what is not computed again.
    """
    work = Checkpointing(flow, generator)
    for stretch in stretches:
        check_passed(flow, stretch, passed)
        work.add(stretch, frame_of(flow, stretch, frozenset(passed), early_stop=early_stop))
    return work.run()


@dataclass(slots=True)
class Checkpointing:
    """The checkpoints of a flat program, added one by one, and the program with them."""

    flow: Flow
    generator: bool
    frames: list[Frame] = field(default_factory=list)
    frame_of: dict[int, Frame] = field(default_factory=dict)  # forward operator -> its checkpoint
    value: dict[str, str] = field(default_factory=dict)  # a value of the first run -> that of the second
    storage: dict[str, str] = field(default_factory=dict)
    clones: dict[str, Storage] = field(default_factory=dict)  # a storage of the first run -> that of the second
    names: set[str] = field(default_factory=set)  # of values, and "$" in front of those of storages
    segments: dict[int, list[Op]] = field(default_factory=dict)  # backward operator -> what runs in front of it
    frees: dict[int, list[str]] = field(default_factory=lambda: defaultdict(list))  # operator -> what dies after it
    kept_until: dict[str, int] = field(
        default_factory=dict
    )  # a kept result -> the backward operator whose recomputation takes it
    drops: dict[int, list[str]] = field(default_factory=lambda: defaultdict(list))
    states: dict[int, Value] = field(default_factory=dict)  # forward operator -> the generator's state taken in front of it
    generator_states: list[Storage] = field(default_factory=list)
    declared: dict[str, Storage] = field(init=False)

    def __post_init__(self) -> None:
        self.declared = {s.name: s for s in self.flow.program.storages}
        self.names = set(self.flow.storage) | {f"${name}" for name in self.declared}

    def add(self, stretch: Stretch, frame: Frame | None) -> None:
        """One checkpoint more, in the order of the forward."""
        if self.generator:
            state = self.states[stretch.positions[0]] = self._state(stretch)
            self.frees[stretch.positions[-1] if frame is None else frame.end].append(state.storage)
        if frame is not None:
            self.frames.append(frame)
            self.frame_of.update(dict.fromkeys(stretch.positions, frame))

    def run(self) -> tuple[Program, list[int]]:
        """The new program, and its operators' origins."""
        ends = self._ends()
        for frame in self.frames:
            self._again(frame, ends)
        for name, end in ends.items():
            if end is not None:
                self.frees[end].append(name)
                self._drop(name, end)
        return self._rebuild(ends)

    # -- what is computed again

    def _again(self, frame: Frame, ends: dict[str, int | None]) -> None:
        """The second run of a checkpoint's operators, with the lives of what they make and of what was kept."""
        flow = self.flow
        ops: list[Op] = []
        place: dict[int, int] = {}  # operator of the first run -> the last one that has run again by then
        for position in frame.stretch.positions:
            if position in frame.again:
                ops.append(self._copy(position, frame))
            place[position] = max(len(ops) - 1, 0)
        ops = ops or [Op("memir.free")]  # all results were kept, or the first operator is the only one that saves
        taken: dict[str, list[int]] = defaultdict(list)  # storage -> the operators whose nodes keep it
        for saver in frame.savers:
            for name in flow.ops[saver].saves:
                taken[name].append(saver)
            if frame.again:  # one that recomputation stops at has saved its inputs: that is why those before it ran
                k = place[saver] if saver in frame.reached else len(ops) - 1
                names = [self._place(name, frame) for name in flow.ops[saver].saves]
                ops[k] = replace(ops[k], saves=tuple(dict.fromkeys((*ops[k].saves, *names))))
        made = [r.storage for p in sorted(frame.again) for r in flow.ops[p].results if flow.born.get(r.storage) == p]
        dying: dict[int, list[str]] = defaultdict(list)
        for name in dict.fromkeys((*made, *self._cached(frame, frame.reached))):
            returns = [returned(flow, p, frame) for p in taken[name]]
            returns += [frame.unnamed[name]] if name in frame.unnamed else []
            later = ends.get(name) if name not in self.storage else None  # what keeps the first run's storage besides
            if later is not None and later >= frame.at:
                returns.append(later)
            if name not in self.storage:
                if name not in ends or ends[name] is None:
                    continue  # it outlives the step
                ends.pop(name)
                self.kept_until[name] = frame.at
                self._drop(name, frame.at)
            if returns:
                self.frees[max(returns)].append(self._place(name, frame))
            else:
                end = python_end(flow, name)
                dying[place[end] if end in frame.reached else len(ops) - 1].append(self._place(name, frame))
        if self.generator:
            state = self._state(frame.stretch, again=True)  # torch/random.py, fork_rng
            dying[len(ops) - 1].append(state.storage)
        ops = [replace(op, frees=tuple(dying[k])) if k in dying else op for k, op in enumerate(ops)]
        self.segments[frame.at] = [Op("memir.alloc", results=(state,)), *ops] if self.generator else ops

    def _copy(self, position: int, frame: Frame) -> Op:
        """The operator's second run: new values, and new storages for those that it allocates."""
        op = self.flow.ops[position]
        operands = tuple(self._now(o, frame) for o in op.operands)
        results = []
        for value in op.results:
            name = value.storage
            if self.flow.born.get(name) == position and name not in self.storage:
                kept = name in frame.unnamed or any(p in self.frame_of for p in self.flow.savers.get(name, ()))
                kind = Kind.ACTIVATION if kept else Kind.TEMPORARY
                self.storage[name] = self._fresh(name, "$")
                self.clones[name] = replace(self.declared[name], name=self.storage[name], kind=kind)
            self.value[value.name] = self._fresh(value.name)
            results.append(replace(value, name=self.value[value.name], storage=self._place(name, frame)))
        forward = op.results[0].name if op.results else None
        return replace(op, operands=operands, results=tuple(results), frees=(), drops=(), saves=(), forward_of=forward)

    def _now(self, value: str, frame: Frame) -> str:
        """The value of the second run, of one that the checkpoint's own operators make."""
        made = self.flow.made.get(value)
        return self.value.get(value, value) if made is not None and self.frame_of.get(made) is frame else value

    def _place(self, storage: str, frame: Frame) -> str:
        """The storage of the second run, of one that the checkpoint's own operators allocate."""
        born = self.flow.born.get(storage)
        return self.storage.get(storage, storage) if born is not None and self.frame_of.get(born) is frame else storage

    def _fresh(self, name: str, mark: str = "", suffix: str = ".again") -> str:
        """A new name that keeps the index: `h[3]` becomes `h.again[3]`."""
        at = name.index("[") if name.endswith("]") else len(name)
        base = name[:at] + suffix
        while f"{mark}{base}{name[at:]}" in self.names:
            base += "+"
        self.names.add(f"{mark}{base}{name[at:]}")
        return base + name[at:]

    def _state(self, stretch: Stretch, *, again: bool = False) -> Value:
        """A copy of the generator's state, named after the first tensor of the stretch."""
        first = next(r.storage for p in stretch.positions for r in self.flow.ops[p].results)
        name = self._fresh(first, "$", ".generator.again" if again else ".generator")
        self.generator_states.append(Storage(name, _GENERATOR, Kind.TEMPORARY if again else Kind.ACTIVATION))
        return Value(
            self._fresh(first, "", ".generator.again" if again else ".generator"), "u8", (_GENERATOR,), (ONE,), ZERO, name
        )

    # -- when storages die

    def _cached(self, frame: Frame, among: Collection[int]) -> list[str]:
        """What the results lie in that are kept instead of computed again."""
        kept = (p for p in frame.stretch.positions if p in frame.stretch.kept and p in among)
        return [r.storage for p in kept for r in self.flow.ops[p].results]

    def _ends(self) -> dict[str, int | None]:
        """Storage -> the operator after which it dies, None for one that lives on. `_again` decides on kept results."""
        flow = self.flow
        holders: dict[str, list[int]] = defaultdict(list)
        for frame in self.frames:
            stopped = set(frame.stretch.positions) - frame.reached
            for name in (*frame.held, *self._cached(frame, stopped)):
                holders[name].append(frame.end)
            for name in (*self._cached(frame, frame.reached), *frame.unnamed):
                holders[name] += []  # known here, and held by nothing
        ends: dict[str, int | None] = {}
        for storage in flow.program.storages:
            name = storage.name
            savers = flow.savers.get(name, [])
            ends[name] = end = flow.freed.get(name)
            if end is None or not (name in holders or any(p in self.frame_of for p in savers)):
                continue
            outside = [max(node_of(flow, p), default=end) for p in savers if p not in self.frame_of]
            ends[name] = max([python_end(flow, name), *holders.get(name, ()), *outside])
        return ends

    def _drop(self, name: str, end: int) -> None:
        """The last Python reference goes before its end, where it was that end in the program without checkpoints."""
        before = python_end(self.flow, name)
        if end > before and name not in self.flow.dropped:
            self.drops[before].append(name)

    # -- the program again

    def _rebuild(self, ends: dict[str, int | None]) -> tuple[Program, list[int]]:
        flow = self.flow
        phases: list[tuple[str, list[Op]]] = [(phase.name, []) for phase in flow.program.phases]
        names = iter(phases)
        current = next(names, None)
        origins: list[int] = []
        for position, op in enumerate(flow.ops):
            while current is not None and current[0] != flow.phase[position]:
                current = next(names)
            assert current is not None
            state = self.states.get(position)
            before = [Op("memir.alloc", results=(state,), path=op.path, source=op.source)] if state is not None else []
            new = [*before, *self.segments.get(position, ()), self._changed(position, ends)]
            new = [o for o in new if o.opcode not in ("memir.free", "memir.alloc") or o.results or o.frees or o.drops]
            current[1].extend(new)
            origins += [position] * len(new)
        storages: list[Storage] = []
        for storage in flow.program.storages:
            storages.append(self._reclassified(storage, ends))
            if storage.name in self.clones:
                storages.append(self.clones[storage.name])
        return replace(
            flow.program,
            storages=(*storages, *self.generator_states),
            phases=tuple(Phase(name, tuple(ops)) for name, ops in phases),
        ), origins

    def _changed(self, position: int, ends: dict[str, int | None]) -> Op:
        """An operator of the program as it is with checkpoints."""
        op = self.flow.ops[position]
        frees = self.frees.get(position, [])
        order = {name: k for k, name in enumerate(op.frees)}
        frees = sorted(frees, key=lambda n: order.get(n, len(order)))
        drops = tuple(n for n in (*op.drops, *self.drops.get(position, ())) if n not in frees)
        frame = self.frame_of.get(position)
        if frame is None:
            frame = self._differentiated(position)
            if frame is None:
                return replace(op, frees=tuple(frees), drops=drops)
            operands = tuple(self._read(o, frame, op) for o in op.operands)
            results = tuple(replace(r, storage=self._place(r.storage, frame)) for r in op.results)
            return replace(op, operands=operands, results=results, frees=tuple(frees), drops=drops)
        saves: list[str] = []
        if position == frame.stretch.positions[0]:
            saves += [name for name in self.declared if name in frame.held]
            saves += [self.states[position].storage] if position in self.states else []
        if position in frame.stretch.kept:
            saves += [r.storage for r in op.results]
        return replace(op, saves=tuple(saves), frees=tuple(frees), drops=drops)

    def _differentiated(self, position: int) -> Frame | None:
        """The checkpoint whose operators a backward operator differentiates; a function's own backward names none."""
        flow = self.flow
        if not flow.gradient[position]:
            return None
        node = flow.node[position]
        if node is not None:
            return self.frame_of.get(flow.made[node])
        reading = [self.frame_of.get(flow.made.get(o, -1)) for o in flow.ops[position].operands]
        return next((frame for frame in reading if frame is not None and frame.at <= position), None)

    def _read(self, value: str, frame: Frame, op: Op) -> str:
        """What backward reads in place of a value of the first run."""
        made = self.flow.made.get(value)
        if made is None or self.frame_of.get(made) is not frame or made in frame.stretch.kept or value in self.value:
            return self._now(value, frame)
        if self.flow.born.get(self.flow.storage[value]) in frame.stretch.positions:
            where = " ".join(filter(None, (op.opcode, op.path and f"@{op.path}", op.source)))
            raise InconclusiveError("backward reads what checkpointing would not compute again", where=where)
        return value

    def _reclassified(self, storage: Storage, ends: dict[str, int | None]) -> Storage:
        """What is not kept for backward any more is a temporary, and what a checkpoint holds for it is none."""
        born, end = self.flow.born.get(storage.name), ends.get(storage.name, self.kept_until.get(storage.name))
        if born is None or end is None or not self.flow.phase[born].endswith("forward"):
            return storage
        if storage.kind in (Kind.ACTIVATION, Kind.TEMPORARY) and end != self.flow.freed.get(storage.name):
            within = self.flow.phase[born] == self.flow.phase[end]
            return replace(storage, kind=Kind.TEMPORARY if within else Kind.ACTIVATION)
        return storage
