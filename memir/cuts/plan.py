"""All cuts of a step, and the programs they are read from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from memir.analysis.cost import Machine
from memir.analysis.peak import Piece
from memir.cuts.programs import programs
from memir.cuts.reading import Base, Cut, Reading
from memir.errors import InconclusiveError, UsageError
from memir.garbage import uncollected
from memir.ir.core import Program, Repeat
from memir.ir.domain import Condition
from memir.ir.names import full_name
from memir.ir.unroll import unroll
from memir.rewrite.cut import EMBEDDING, Prefix
from memir.rewrite.depths import CUT, depth_symbol
from memir.rewrite.flow import Flow

Env = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Range:
    """A program and the cuts it is for."""

    cuts: tuple[int, ...]
    program: Program
    reading: Reading

    def piece(self, env: Env) -> Piece:
        """The formula that is the peak at `env`, and its place."""
        return self.reading.front.evaluate({d: env[d] for d in self.program.dims})[1]


@dataclass(frozen=True, slots=True)
class Plan:
    """The cuts of one step from 0 on, at `env`, and the programs they are read from."""

    cuts: tuple[Cut, ...]
    env: tuple[tuple[str, int], ...]
    list_path: str  # of the layers
    depth: int
    tied: tuple[str, ...]  # parameters of the embedding that the head uses too: they stay trained
    ranges: tuple[Range, ...]

    def bytes_at(self, cut: int, env: Env) -> int:
        """The peak of a cut at other values of B and S. UsageError outside of the program's domain."""
        for one in self.ranges:
            if cut in one.cuts:
                known = {**dict(self.env), **env, CUT: cut}
                return one.reading.front.evaluate({d: known[d] for d in one.program.dims})[0]
        raise InconclusiveError(f"cut {cut} is not known")

    def at(self, cut: int, env: Env) -> Cut:
        """One cut at other values of B and S. UsageError outside of the program's domain."""
        for one in self.ranges:
            if cut in one.cuts:
                return one.reading.cut(cut, {**dict(self.env), **env, CUT: cut})
        raise InconclusiveError(f"cut {cut} is not known")

    def largest(self, cut: int, symbol: str, nbytes: int, limit: int = 1 << 24) -> int:
        """The largest B or S at which a cut fits `nbytes`, the other one as asked; 0 where none does. Peaks grow with both."""
        low, high = 0, 1
        while high <= limit and self._fits(cut, symbol, high, nbytes):
            low, high = high, 2 * high
        high = min(high, limit + 1)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._fits(cut, symbol, middle, nbytes) else (low, middle)
        return low

    def _fits(self, cut: int, symbol: str, value: int, nbytes: int) -> bool:
        try:
            return self.bytes_at(cut, {symbol: value}) <= nbytes
        except UsageError:  # outside of the domain: a small one is left out, a large one ends the search
            return value < dict(self.env)[symbol]


@uncollected()
def plan(program: Program, env: Env, machine: Machine | None = None, *, embeddings: bool = True, head: bool = False) -> Plan:
    """All cuts of a step. `env` gives a value for each of the program's dims; with a machine, steps are timed.

    UsageError: no list of layers. InconclusiveError: a step that cannot be rewritten.
    """
    folded = any(isinstance(op, Repeat) and not op.count.is_constant for phase in program.phases for op in phase.ops)
    if not folded:
        program = unroll(program)
    prefix = Prefix(Flow(flat_sample(program) if folded else program))
    layers = prefix.layers
    depth = env[depth_symbol(program)] if folded else layers.depth
    last = depth if leaves_something(prefix, embeddings, head) else depth - 1
    base = Base(program, layers.path, depth, machine)
    cuts: dict[int, Cut] = {}
    ranges = []
    for numbers, one in programs(program, env, range(last + 1), depth=depth, embeddings=embeddings, head=head):
        reading = Reading(one, base)
        cuts |= {cut: reading.cut(cut, {**env, CUT: cut}) for cut in numbers}
        ranges.append(Range(tuple(numbers), one.program, reading))
    tied = sorted(full_name(name) for name, used in prefix.users.items() if {EMBEDDING, layers.depth} <= used)
    return Plan(tuple(cuts[k] for k in sorted(cuts)), tuple(env.items()), layers.path, depth, tuple(tied), tuple(ranges))


def flat_sample(program: Program) -> Program:
    """The step with all layers written out, or with a few of them where their number is a symbol."""
    folded = any(isinstance(op, Repeat) and not op.count.is_constant for phase in program.phases for op in phase.ops)
    return unroll(program, _few(program) if folded else {})


def _few(program: Program) -> dict[str, int]:
    """A small number of layers that the program is valid for."""
    depth = depth_symbol(program)
    conditions = [c for text in program.domain if (c := Condition.read(text)) is not None and c.symbols() == {depth}]
    return {depth: next(n for n in range(4, 4096) if all(c.holds({depth: n}) for c in conditions))}


def leaves_something(prefix: Prefix, embeddings: bool, head: bool) -> bool:
    """Whether a parameter is left to train when all layers are frozen."""
    try:
        prefix.frozen(prefix.layers.depth, embeddings=embeddings, head=head)
    except UsageError:
        return False
    return True
