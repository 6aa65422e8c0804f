"""Layers computed again in backward by a function of its own, as torch.utils.checkpoint (use_reentrant=True) does it.

torch/utils/checkpoint.py, `CheckpointFunction`:
- forward runs the layer under no_grad: nothing of it is saved, and attention without gradients makes no log-sum-exp;
- the tensors that it is called with are saved like those of any function; what it is called with by keyword lies in the
  function itself (`ctx.run_function`) until the loss is let go;
- backward gets the gradient of the layer's output, runs the whole layer again on detached inputs, and calls autograd for it. So
  saved tensors of the second run die as those of a layer without checkpoint do, and the gradient, the second output and the
  inputs live until the inputs' gradients are complete.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from memir.errors import InconclusiveError, UsageError
from memir.ir.core import Kind, Op, Program, Storage
from memir.ir.size import ZERO
from memir.rewrite.flow import Flow
from memir.rewrite.frames import Frame, Stretch, arguments, check_passed, python_end
from memir.rewrite.recompute import Checkpointing

# without a gradient no log-sum-exp, their second result (compute_log_sumexp, aten/src/ATen/native/transformers/attention.cpp)
_LOG_SUM_EXP = ("aten._scaled_dot_product_efficient_attention", "aten._scaled_dot_product_cudnn_attention")


def recomputed_reentrantly(
    flow: Flow,
    stretches: Sequence[Stretch],
    *,
    passed: Collection[str] = (),
    keywords: Collection[str] = (),
    generator: bool = False,
) -> tuple[Program, list[int]]:
    """The flat program in which the stretches are checkpointed, and for each of its operators the position where it runs.

    `passed`: storages that every stretch is called with although it does not read them; `keywords`: those it gets by keyword.
    `generator`: the state of the CPU's random generator counts.
    UsageError where a stretch's inputs need no gradient: then PyTorch computes none for its parameters, and only warns.
    """
    trained = {s.of for s in flow.program.storages if s.kind is Kind.GRADIENT and s.of is not None}
    requiring = flow.requiring(sorted(trained), ())
    work = _Reentrant(flow, generator, keywords=frozenset(keywords))
    for stretch in stretches:
        check_passed(flow, stretch, (*passed, *keywords))
        held = arguments(flow, stretch) | frozenset(passed)
        if not any(flow.born.get(name) in requiring for name in held):
            raise UsageError(
                "no input of the layer needs a gradient: a reentrant checkpoint computes none for its parameters then",
                where=f"@{stretch.path}",
                hint="leave out  reentrant  (or call model.enable_input_require_grads() before the trace)",
            )
        work.add(stretch, _frame(flow, stretch, held - frozenset(keywords)))
    return work.run()


def _frame(flow: Flow, stretch: Stretch, held: frozenset[str]) -> Frame | None:
    """The stretch's function, from the first operator that differentiates it to the sum of its inputs' gradients."""
    inside = set(stretch.positions)
    made = {r.name for p in stretch.positions for r in flow.ops[p].results}
    backward = [p for p in range(len(flow.ops)) if flow.gradient[p] and _differentiates(flow, p, inside, made)]
    if not backward:
        return None
    end = backward[-1]
    own = set(backward)
    while end + 1 < len(flow.ops) and flow.gathers[end + 1] and flow.made.get(flow.ops[end + 1].operands[1]) in own:
        end += 1
        own.add(end)
    savers = tuple(p for p in stretch.positions if flow.ops[p].saves)
    again = frozenset(p for p in stretch.positions if not flow.ops[p].opcode.startswith("memir."))
    return Frame(stretch, held, savers, {}, again, frozenset(stretch.positions), backward[0], end)


def _differentiates(flow: Flow, position: int, inside: set[int], made: set[str]) -> bool:
    node = flow.node[position]
    if node is not None:
        return flow.made[node] in inside
    return not made.isdisjoint(flow.ops[position].operands)


@dataclass(slots=True)
class _Reentrant(Checkpointing):
    keywords: frozenset[str] = frozenset()
    apart: dict[int, str] = field(default_factory=dict)  # an addition to a gradient that is held -> the storage of its sum
    empty: set[str] = field(default_factory=set)  # storages without a byte in the first run
    sums: list[Storage] = field(default_factory=list)
    held: list[tuple[int, str]] = field(
        default_factory=list
    )  # the end of a function, and a gradient's storage that dies with it
    last: dict[str, int] = field(default_factory=dict)  # and the operator that made it
    now: dict[str, str] = field(
        default_factory=dict
    )  # a gradient's storage -> that of its last sum, while operators are written

    def run(self) -> tuple[Program, list[int]]:
        """The new program, and its operators' origins."""
        ends = self._ends()
        for name in self.keywords:  # ctx.run_function
            if ends.get(name) is not None:
                ends[name] = max(*(self._loss_end(frame) for frame in self.frames), ends[name] or 0)
        for frame in self.frames:
            self._again(frame, ends)
        self._keep_apart(ends)
        for name, end in ends.items():
            if end is not None:
                self.frees[end].append(name)
                self._drop(name, end)
        return self._rebuild(ends)

    def add(self, stretch: Stretch, frame: Frame | None) -> None:
        """One checkpoint more, in the order of the forward; its copy of the generator's state is the function's own."""
        if self.generator:
            state = self.states[stretch.positions[0]] = self._state(stretch)
            self.frees[stretch.positions[-1] if frame is None else self._loss_end(frame)].append(state.storage)
        if frame is not None:
            self.frames.append(frame)
            self.frame_of.update(dict.fromkeys(stretch.positions, frame))

    def _keep_apart(self, ends: dict[str, int | None]) -> None:
        """The function holds its output's gradient: it lives to the function's end, and the first sum with it lies elsewhere.

        torch/csrc/autograd/input_buffer.cpp, `can_accumulate_inplace`.
        """
        flow = self.flow
        moved: dict[str, str] = {}
        for frame in sorted(self.frames, key=lambda frame: frame.at):
            for name in self._given(frame):
                first = next((p for p in range(frame.at, frame.end + 1) if self._adds_into(p, name)), None)
                if first is None:
                    end = ends.get(name, flow.freed.get(name))
                    if end is not None and end < frame.end:
                        ends[name] = frame.end
                    continue
                self.held.append((frame.end, moved.get(name, name)))
                later = flow.storage[flow.ops[first].operands[1]]  # of the layer, and so named with its number
                moved[name] = self.apart[first] = self._fresh(later, "$", ".sum")
                self.sums.append(replace(self.declared[name], name=moved[name]))

    def _given(self, frame: Frame) -> list[str]:
        """The gradients' storages that come from outside of the function."""
        flow = self.flow
        read = [name for p in range(frame.at, frame.end + 1) for name in sorted(flow.reads(p))]
        born = {name: flow.born.get(name) for name in dict.fromkeys(read)}
        outside = [n for n, b in born.items() if b is not None and b < frame.at and flow.phase[b].endswith("backward")]
        return [name for name in outside if self.declared[name].kind is not Kind.GRADIENT]  # of parameters: accumulated

    def _adds_into(self, position: int, storage: str) -> bool:
        op = self.flow.ops[position]
        return self.flow.gathers[position] and op.opcode == "aten.add_.Tensor" and self.flow.storage[op.operands[0]] == storage

    def _rebuild(self, ends: dict[str, int | None]) -> tuple[Program, list[int]]:
        program, origins = Checkpointing._rebuild(self, ends)
        storages = (replace(s, nbytes=ZERO) if s.name in self.empty else s for s in program.storages)
        return replace(program, storages=(*storages, *self.sums)), origins

    def _changed(self, position: int, ends: dict[str, int | None]) -> Op:
        op = Checkpointing._changed(self, position, ends)
        op = replace(op, operands=tuple(self._latest(o) for o in op.operands))
        if position in self.apart:
            name = self.flow.storage[op.operands[0]]
            self.now[name], self.last[name] = self.apart[position], position
            op = replace(op, opcode="aten.add.Tensor")
        if op.opcode in _LOG_SUM_EXP and position in self.frame_of:
            output, sums, *others = op.results
            self.empty.add(sums.storage)
            op = replace(op, results=(output, replace(sums, shape=(*sums.shape[:-1], ZERO)), *others))
        results = tuple(replace(r, storage=self.now.get(r.storage, r.storage)) for r in op.results)
        held = [storage for end, storage in self.held if end == position]
        frees = (*(self.now.get(n, n) for n in op.frees), *held)
        return replace(op, results=results, frees=frees, drops=tuple(self.now.get(n, n) for n in op.drops))

    def _latest(self, value: str) -> str:
        """The last sum, in place of a value that lay in its storage before: folded programs name the first one throughout."""
        flow = self.flow
        last, made = self.last.get(flow.storage.get(value, "")), flow.made.get(value)
        if last is None or made is None or made >= last:
            return value
        first, latest = next(r for r in flow.ops[made].results if r.name == value), flow.ops[last].results[0]
        if replace(first, name="", storage="") != replace(latest, name="", storage=""):
            raise InconclusiveError("another view of a gradient is read after a sum with it", where=f"%{value}")
        return latest.name

    def _loss_end(self, frame: Frame) -> int:
        """Where the loss of a checkpoint's backward is let go, and the graph's functions with it."""
        flow, phase = self.flow, self.flow.phase[frame.at]
        seed = next(op for p, op in enumerate(flow.ops) if flow.phase[p] == phase and op.opcode.startswith("aten.ones_like"))
        return flow.freed.get(flow.storage[seed.operands[0]], len(flow.ops) - 1)

    def _again(self, frame: Frame, ends: dict[str, int | None]) -> None:
        """The whole stretch once more, with the lives of what it makes and of the gradient that it is for."""
        flow, positions = self.flow, frame.stretch.positions
        ops: list[Op] = []
        place: dict[int, int] = {}
        dying: dict[int, list[str]] = defaultdict(list)
        for position in positions:
            if position in frame.again:
                op = self._copy(position, frame)
                saves = tuple(self._place(name, frame) for name in flow.ops[position].saves)
                ops.append(replace(op, saves=saves))
            place[position] = max(len(ops) - 1, 0)
        outputs = self._outputs(frame)
        for name in dict.fromkeys(r.storage for p in positions for r in flow.ops[p].results if flow.born.get(r.storage) == p):
            freed = flow.freed.get(name, len(flow.ops))
            if name in outputs:
                self.frees[frame.end].append(self._place(name, frame))
            elif not flow.phase[min(freed, len(flow.ops) - 1)].endswith("backward"):
                dying[place.get(freed, len(ops) - 1)].append(self._place(name, frame))  # with autocast's cache at the latest
            else:
                self.frees[freed].append(self._place(name, frame))
                if ends.get(name) == freed and name not in flow.savers:  # a function kept it without saying so
                    ends[name] = python_end(flow, name)
        start: list[Op] = []
        if self.generator:
            state = self._state(frame.stretch, again=True)  # torch/random.py, fork_rng
            dying[len(ops) - 1].append(state.storage)
            start = [Op("memir.alloc", results=(state,))]
        ops = [replace(op, frees=tuple(dying[k])) if k in dying else op for k, op in enumerate(ops)]
        self.segments[frame.at] = [*start, *ops]

    def _outputs(self, frame: Frame) -> set[str]:
        """The storages of the stretch that something after it reads."""
        flow, last = self.flow, frame.stretch.positions[-1]
        after = {name for p in range(last + 1, len(flow.ops)) if flow.phase[p].endswith("forward") for name in flow.reads(p)}
        return {r.storage for p in frame.stretch.positions for r in flow.ops[p].results} & after
