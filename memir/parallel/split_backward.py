"""A stage's backward in two parts, as zero-bubble schedules run it: first the gradient of its input, later those of parameters.

torch/distributed/pipelining/_backward.py, `stage_backward_input` and `stage_backward_weight` (arXiv 2401.10241, section 2). The
first part keeps the graph, and with hooks the gradient that arrives at every node that a parameter flows into; what lies above
the highest of these nodes is let go as the output is detached. The second part takes these nodes in the order of parameters,
runs them for the parameters alone, and lets go of a node when none above it is left.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace

from memir.errors import InconclusiveError
from memir.ir.core import Kind, Op, Storage, Value
from memir.parallel.stages import Stage, Stages
from memir.rewrite.flow import Flow, in_place

Placed = tuple[Op, int]  # an operator and the position of its origin


@dataclass(frozen=True, slots=True)
class Group:
    """Parameters whose gradients one call makes. `before` dies as it begins, `after` when it has run."""

    ops: tuple[Placed, ...]
    gradients: tuple[str, ...]  # storages
    before: tuple[str, ...]
    after: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SplitBackward:
    """The two parts for one micro-batch. `storages` are new; `end` dies when the second part returns."""

    inputs: tuple[Placed, ...]
    groups: tuple[Group, ...]
    storages: tuple[Storage, ...]
    end: tuple[str, ...]
    returned: str  # the storage of the gradient that goes back


def split_backward(stages: Stages, part: Stage) -> SplitBackward:
    """The backward of a stage that has one before it. InconclusiveError where layers are computed again within it."""
    if any(stages.flow.repeated[origin] for origin in part.origins[1]):
        message = "pipeline-parallel: a zero-bubble schedule splits the backward, and that of checkpoints is not followed"
        raise InconclusiveError(message, hint="trace it without checkpointing, or  schedule=interleaved-1f1b")
    return _Splitting(stages, part).run()


@dataclass
class _Splitting:
    stages: Stages
    part: Stage
    captured: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))  # storage -> the groups that keep it
    storages: list[Storage] = field(default_factory=list)

    def run(self) -> SplitBackward:
        self.flow: Flow = self.stages.flow
        self.forward = {op.results[0].name: op for op in self.part.forward if op.results}
        self.backward = list(zip(self.part.backward, self.part.origins[1], strict=True))
        self.gradients = {s.name: s.of for s in self.flow.program.storages if s.kind == Kind.GRADIENT}
        self.storage_of: dict[str, str] = {}  # of the values of the first part
        self.received = {v.storage for v in self.part.gradient}
        self._follow_parameters()
        self._follow_consumers()
        needed = self._needed()
        inputs = self._inputs(needed)
        groups, end = self._weights(needed)
        return SplitBackward(tuple(inputs), tuple(groups), tuple(self.storages), end, self.returned)

    # -- the forward's graph

    def _follow_parameters(self) -> None:
        """Groups of parameters by the nodes that they flow into, in the order of parameters (`get_param_groups`)."""
        inside = {v.name for v in self.part.enters}
        flows: dict[str, set[str]] = {}  # a value that depends on parameters alone -> their storages
        into: dict[str, set[str]] = defaultdict(set)  # parameter -> nodes
        self.of_parameters: dict[str, set[str]] = {}  # node above parameters alone -> the parameters
        for name, op in self.forward.items():
            own: set[str] = set()
            for operand in op.operands:
                storage = self.flow.storage[operand]
                own |= flows.get(operand, {storage} if storage in self.part.parameters else set())
            if any(operand in inside for operand in op.operands):
                inside |= {r.name for r in op.results}
                for parameter in own:
                    into[parameter].add(name)
            elif own:
                flows |= {r.name: own for r in op.results}
                self.of_parameters[name] = own
        self.group_of: dict[str, int] = {}  # parameter or node -> group
        order = [s.name for s in self.flow.program.storages if s.name in into]
        self.members: list[set[str]] = []
        for parameter in order:
            shared = next((self.group_of[n] for n in sorted(into[parameter]) if n in self.group_of), None)
            number = len(self.members) if shared is None else shared
            if shared is None:
                self.members.append(set())
            self.members[number].add(parameter)
            self.group_of |= dict.fromkeys((parameter, *into[parameter]), number)
        self.inside = inside

    def _follow_consumers(self) -> None:
        """For each node, the nodes above it that hold it."""
        self.consumers: dict[str, set[str]] = defaultdict(set)
        maker = {r.name: name for name, op in self.forward.items() for r in op.results}
        for name, op in self.forward.items():
            for operand in op.operands:
                if operand in maker and operand in self.inside:
                    self.consumers[maker[operand]].add(name)

    def _alive(self, held: set[str]) -> set[str]:
        """The nodes that these hold, and these."""
        alive = set(held)
        for name in reversed(list(self.forward)):
            if self.consumers[name] & alive:
                alive.add(name)
        return alive

    def _saved(self, nodes: set[str], but: set[str]) -> set[str]:
        """What the nodes keep, those in `but` having run."""
        return {s for name in nodes - but for s in self.forward[name].saves}

    # -- the gradient of the input

    def _needed(self) -> set[str]:
        """The values of backward that the gradient of the input is made of."""
        needed = {v.name for v in self.part.returned}
        for op, _ in reversed(self.backward):
            if any(r.name in needed for r in op.results):
                needed |= set(op.operands)
        return needed

    def _inputs(self, needed: set[str]) -> list[Placed]:
        now: dict[str, str] = {}  # storage -> the one that stands for it since a sum was a new tensor
        seen: set[str] = set()
        ops: list[Placed] = []
        place: dict[int, int] = {}  # in the whole backward -> in this part
        for number, (op, origin) in enumerate(self.backward):
            results = tuple(r for r in op.results if r.name in needed)
            if not results:
                continue
            node = None if self.flow.gathers[origin] else op.forward_of
            if node in self.group_of and node not in seen:
                seen.add(node)
                self._capture(node, now)
            if in_place(op.opcode):
                op = self._sum(op, results, now)
            place[number] = len(ops)
            moved = tuple(replace(r, storage=now.get(r.storage, r.storage)) for r in results)
            ops.append((replace(op, results=moved, frees=(), drops=()), origin))
            for value in moved:
                self.storage_of[value.name] = value.storage
        self.returned = self.storage_of[self.part.returned[0].name]
        made_here = {now.get(r.storage, r.storage) for op, _ in ops for r in op.results} - self._forwards()
        seeds = self._seeds()
        frees: dict[int, list[str]] = defaultdict(list)
        for number, (op, origin) in enumerate(self.backward):
            for name in op.frees:
                if now.get(name, name) in made_here - seeds and now.get(name, name) not in {*self.captured, self.returned}:
                    last = self._end(number, name, origin, place)
                    if last is not None:
                        frees[last].append(now.get(name, name))
        done = [(replace(op, frees=tuple(frees.get(k, ()))), origin) for k, (op, origin) in enumerate(ops)]
        above = self._forwards() - self._saved(self._alive(self._intermediates()), set())
        ends = [n for op, _ in self.backward for n in op.frees if n in above]
        own = [n for op, _ in self.backward for n in op.frees if n in seeds]
        if ends or own:
            done.append((Op("memir.free", frees=tuple(dict.fromkeys([*ends, *own])), source="detach_"), done[-1][1]))
        return done

    def _seeds(self) -> set[str]:
        return {r.storage for op, _ in self.backward for r in op.results if op.opcode.startswith("aten.ones_like")}

    def _forwards(self) -> set[str]:
        """Storages that the stage's forward makes."""
        return {r.storage for op in self.part.forward for r in op.results}

    def _intermediates(self) -> set[str]:
        return {name for name in self.group_of if name in self.forward}

    def _capture(self, node: str, now: dict[str, str]) -> None:
        """A hook keeps the gradient that arrives at the node."""
        own = [op for op, origin in self.backward if op.forward_of == node and not self.flow.gathers[origin]]
        made = {r.name for op in own for r in op.results}
        for operand in {o for op in own for o in op.operands} - made:
            maker = self.flow.made.get(operand)
            if maker is None or not self.flow.phase[maker].endswith("backward"):
                continue
            storage = self.storage_of.get(operand, self.flow.storage[operand])
            if storage not in self.received:
                self.captured[storage].add(self.group_of[node])

    def _sum(self, op: Op, results: tuple[Value, ...], now: dict[str, str]) -> Op:
        """Two gradients are added in place only where no hook keeps the first, and no buffer."""
        first = self.storage_of.get(op.operands[0], self.flow.storage[op.operands[0]])
        name = results[0].storage
        if first in self.captured or first in self.received:
            template = next(s for s in (*self.part.storages, *self.flow.program.storages) if s.name == name)
            new = replace(template, name=_numbered(name, len(self.storages) + 1))
            self.storages.append(new)
            now[name] = new.name
            return replace(op, opcode=op.opcode.replace("add_.", "add."))
        return op

    def _end(self, number: int, name: str, origin: int, place: dict[int, int]) -> int | None:
        """The operator of this part after which a gradient dies: the last one of the node that let it go, or that reads it."""
        node = self.backward[number][0].forward_of
        for k in range(number, -1, -1):
            op, other = self.backward[k]
            reads = name in {self.flow.storage[o] for o in op.operands} or name in {r.storage for r in op.results}
            if k in place and (reads or (node is not None and op.forward_of == node and not self.flow.gathers[other])):
                return place[k]
        return None

    # -- the gradients of parameters

    def _weights(self, needed: set[str]) -> tuple[list[Group], tuple[str, ...]]:
        forwards, earlier = self._forwards(), set(self.storage_of.values())
        mine: dict[int, list[Placed]] = defaultdict(list)
        for op, origin in self.backward:
            node = op.forward_of or ""
            number = self.group_of.get(node)
            if number is None and node in self.of_parameters:
                number = next((self.group_of[p] for p in self.of_parameters[node] if p in self.group_of), None)
            results = tuple(r for r in op.results if r.name not in needed)
            if number is not None and results and not self.flow.gathers[origin]:
                own = {r.storage for r in results} | self._made(mine[number])
                frees = tuple(n for n in op.frees if n in own - forwards - earlier)
                mine[number].append((replace(op, results=results, frees=frees, drops=()), origin))
        groups: list[Group] = []
        waiting = self._intermediates()
        done: set[str] = set()
        kept = self._saved(self._alive(waiting), done)
        before: set[str] = set()
        for number in range(len(self.members)):
            nodes = {n for n in self.forward if self.group_of.get(n) == number}
            alive = self._alive(waiting)
            left = self._saved(alive, done)
            dead = (kept - left) & forwards
            kept = left
            done |= nodes
            after = self._saved(alive, done)
            names = tuple(g for g, of in self.gradients.items() if of in self.members[number])
            groups.append(
                Group(tuple(mine[number]), names, tuple(sorted(dead | before)), tuple(sorted((kept - after) & forwards)))
            )
            kept = after
            before = self._let_go(number)
            waiting = waiting - nodes
        return groups, tuple(sorted((kept & forwards) | before))

    def _let_go(self, number: int) -> set[str]:
        """The gradients that only this group's hooks still keep."""
        gone = set()
        for storage, groups in self.captured.items():
            if number in groups:
                groups.discard(number)
                if not groups:
                    gone.add(storage)
        return gone

    @staticmethod
    def _made(ops: list[Placed]) -> set[str]:
        return {r.storage for op, _ in ops for r in op.results}


def _numbered(name: str, number: int) -> str:
    base, bracket, index = name.partition("[")
    return f"{base}.sum{number}{bracket}{index}"
