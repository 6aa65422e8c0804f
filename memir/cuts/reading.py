"""What a program says of each of its cuts: bytes, operations, time."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from memir.analysis.cost import Machine, seconds
from memir.analysis.flops import total_flops, work_of
from memir.analysis.frames import Frame, frames_of, frames_through
from memir.analysis.inventory import alive_at
from memir.analysis.peak import START, Front
from memir.ir.core import Kind, Program, Value
from memir.ir.names import rename_path, split
from memir.ir.size import Size
from memir.rewrite.lift import Lifted

Env = Mapping[str, int]
Alive = list[dict[str, Counter[Size]]]  # in each frame: of each kind, how many storages of which size


@dataclass(frozen=True, slots=True)
class Cut:
    """One cut: bytes are requested bytes. `cached` is the step that reads the frozen part's output instead of computing it."""

    cut: int
    num_trainable: int  # parameters
    peak: int
    phase: str
    op: str
    path: str
    source: str
    parameters: int
    gradients: int  # at the peak
    states: int
    activations: int  # the rest at the peak: activations, temporaries, buffers, inputs, workspace
    gradient_bytes: int  # of all trained parameters: what data parallelism reduces every step
    flops: int
    cached_flops: int
    seconds: float | None
    cached_seconds: float | None


class Base:
    """What the step without freezing computes in a layer's forward: what a cache of activations saves."""

    def __init__(self, program: Program, path: str, depth: int, machine: Machine | None) -> None:
        self.machine = machine
        self.depth = depth
        prefix = f"{path}."
        self.inside = [w for w in work_of(program) if w.phase.endswith("forward") and w.op.path.startswith(prefix)]
        self.dims = program.dims
        self._known: dict[tuple[int, ...], tuple[int, float]] = {}  # by the dims' values

    def saved(self, cut: int, env: Env) -> tuple[int, float]:
        """Operations and seconds of the forward of so many layers at `env`; the layers are taken to be alike."""
        known = {d: env[d] for d in self.dims}
        key = tuple(known.values())
        if key not in self._known:
            time = seconds(self.inside, known, self.machine) if self.machine is not None else 0.0
            self._known[key] = total_flops(self.inside, known), time
        flops, time = self._known[key]
        return flops * cut // self.depth, time * cut / self.depth


class Reading:
    """One program, read at any of its cuts."""

    def __init__(self, lifted: Lifted, base: Base) -> None:
        program = lifted.program
        self.program, self.base = program, base
        through = frames_through(program, lifted.samples, lifted.axes) if lifted.samples else frames_of(program)
        self.frames, self.line = through
        self.front = Front(program, self.line)
        self.works = work_of(program)
        self._alive: dict[int, Alive] = {}  # by the place of the peak

    def cut(self, number: int, env: Env) -> Cut:
        """The numbers of one cut at `env`, which has a value for every dim."""
        known = {d: env[d] for d in self.program.dims}
        nbytes, piece = self.front.evaluate(known)
        kinds = self._by_kind(piece.place.index, known)
        gradient_bytes, num_trainable = self._trained(known)
        machine = self.base.machine
        flops = total_flops(self.works, known)
        saved_flops, saved_seconds = self.base.saved(number, env)
        time = seconds(self.works, known, machine) if machine is not None else None
        named = (Kind.PARAMETER, Kind.GRADIENT, Kind.OPTIMIZER_STATE)
        parameters, gradients, states = (kinds.get(str(kind), 0) for kind in named)
        return Cut(
            cut=number,
            num_trainable=num_trainable,
            peak=nbytes,
            phase=piece.place.phase,
            op=piece.place.opcode,
            path=rename_path(piece.place.path, known),
            source=piece.place.source,
            parameters=parameters,
            gradients=gradients,
            states=states,
            activations=nbytes - parameters - gradients - states,
            gradient_bytes=gradient_bytes,
            flops=flops,
            cached_flops=flops - saved_flops,
            seconds=time,
            cached_seconds=None if time is None else time - saved_seconds,
        )

    def _by_kind(self, index: int, env: Env) -> dict[str, int]:
        """Bytes alive at a place by kind, from those in each frame."""
        if index not in self._alive:
            self._alive[index] = [self._sizes(frame, index) for frame in self.frames.frames]
        point = {d: v for d, v in env.items() if d not in {symbol for symbol, _, _ in self.frames.axes}}
        columns = [
            {kind: (sum(count * size.evaluate(point) for size, count in sizes.items()),) for kind, sizes in column.items()}
            for column in self._alive[index]
        ]
        return {kind: numbers[0] for kind, numbers in self.frames.extend_all(columns, env).items()}

    def _sizes(self, frame: Frame, index: int) -> dict[str, Counter[Size]]:
        """What is alive at a place in a frame: of each kind, how many storages of which size."""
        storages = {s.name: s for s in frame.program.storages}
        found: dict[str, Counter[Size]] = defaultdict(Counter)
        for name in alive_at(frame.program, frame.line, START if index == START else frame.positions[index]):
            found[str(storages[name].kind)][storages[name].nbytes] += 1
        return found

    def _trained(self, env: Env) -> tuple[int, int]:
        """Bytes of the gradients of all trained parameters, and how many parameters these are."""
        values = {split(v.storage)[0]: v for v in self.program.values}
        gradients = number = 0
        seen: set[str] = set()
        for storage in self.program.storages:
            if storage.kind != Kind.GRADIENT or storage.of is None or storage.of in seen:
                continue
            seen.add(storage.of)  # with several micro-batches a parameter may have several
            count = _members(storage.name, env)
            gradients += count * storage.nbytes.evaluate(env)
            number += count * _elements(values[split(storage.of)[0]], env)
        return gradients, number


def _members(name: str, env: Env) -> int:
    total = 1
    for index in split(name)[1]:
        if index.is_extent and index.size is not None:
            total *= index.size.evaluate(env) - index.start.evaluate(env)
    return total


def _elements(value: Value, env: Env) -> int:
    total = 1
    for extent in value.shape:
        total *= extent.evaluate(env)
    return total
