"""A step over widths as plain data, and which of its symbols are shown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from memir.derivation.bounds import CUT, DEPTH, TRAINED, Cuts
from memir.errors import UsageError
from memir.ir.core import Op, Program, Repeat
from memir.ir.size import Size
from memir.ir.substitute import substituted

ORDER = ("B", "S", "L", CUT, "h", "f", "V", "a", "k", "d", "P", "m", "E", "K", "r", "t")
MEANINGS = {
    "B": "sequences in a batch",
    "S": "tokens in a sequence",
    "L": "decoder layers",
    CUT: "frozen leading layers",
    "h": "hidden size",
    "f": "feed-forward width",
    "V": "vocabulary",
    "a": "attention heads",
    "k": "key-value heads",
    "d": "head size",
    "P": "positions in tables",
    "m": "width of an expert",
    "E": "experts",
    "K": "experts a token",
    "r": "LoRA rank",
    "t": "tensor-parallel degree",
}
POINT = ("B", "S", CUT)  # what a peak's pieces are over: the other symbols have the target's values there
GROUP = "g"  # a/k: among the program's symbols before it is shown


@dataclass(frozen=True, slots=True)
class WideStep:
    """A traced step over B, S, L and its widths. The program is over atoms: independent widths, whose products symbols are."""

    program: Program
    symbols: tuple[tuple[str, Size], ...]  # symbol -> size over atoms: h -> a*d where the code ties them
    fields: tuple[tuple[str, str], ...]  # field of the configuration -> symbol; the recipe's LoRA rank has none
    env: dict[str, int]  # the target's value of each of the program's dims
    name: str  # as the user typed it, or the class
    source: str
    num_parameters: int
    recipe: tuple[tuple[str, object], ...]
    versions: tuple[tuple[str, str], ...]
    numbers: tuple[str, ...]  # widths that stayed numbers, each with the reason
    assumptions: tuple[str, ...]
    traced_at: tuple[dict[str, int], ...]
    verified_at: tuple[dict[str, int], ...]
    degrees: tuple[tuple[str, str, int], ...] = ()  # of parallelism, that are symbols: name, meaning, the number taken
    cuts: Cuts | None = None  # those that the program is for, where the cut is a symbol

    def widths(self) -> dict[str, int]:
        """The target's value of each width's symbol."""
        return {symbol: size.evaluate(self.env) for symbol, size in self.symbols}

    def available(self) -> tuple[str, ...]:
        """The symbols that can be shown, in the order of ORDER."""
        known = {"B", "S", *(symbol for symbol, size in self.symbols if not size.is_constant)} | set(self.program.dims)
        return tuple(symbol for symbol in self.order() if symbol in known)

    def order(self) -> tuple[str, ...]:
        """ORDER, and the degrees that have another name."""
        return tuple(dict.fromkeys((*ORDER, *(symbol for symbol, _, _ in self.degrees))))


@dataclass(frozen=True, slots=True)
class Shown:
    """The program over the symbols that are shown; `env` has the target's value of each, `fixed` of the others."""

    step: WideStep
    program: Program
    env: dict[str, int]
    fixed: dict[str, int]
    ties: tuple[tuple[str, str], ...]  # what was written for a symbol that is not shown: ("d", "h/a")

    @property
    def meanings(self) -> dict[str, str]:
        """What each symbol stands for."""
        return MEANINGS | {symbol: meaning for symbol, meaning, _ in self.step.degrees}

    @property
    def header(self) -> Program:
        """The program with the conditions of its cuts: what its ranges and its domain are read from."""
        return self.program if self.step.cuts is None else self.step.cuts.within(self.program)

    @property
    def hidden(self) -> dict[str, int]:
        """The depth where it is not shown: it stays a symbol of the program, whose layers repeat."""
        return {name: value for name, value in self.fixed.items() if name in self.program.dims}

    @property
    def point(self) -> dict[str, int]:
        """The target's value of everything that a term may have as a symbol."""
        env = self.env | self.hidden
        return {**env, TRAINED: env[DEPTH] - env[CUT]} if CUT in env and DEPTH in env else env

    @property
    def widths(self) -> dict[str, int]:
        """The values of all symbols of the program but those of POINT."""
        return {name: value for name, value in (self.env | self.hidden).items() if name not in POINT}


def shown(step: WideStep, wanted: Sequence[str] | None = None) -> Shown:
    """The step over the `wanted` symbols, the others being the target's numbers; None: all that the sizes have.

    The head size is written h/a where the model has as much hidden size as heads have together, unless d is asked for.
    UsageError: a symbol that the step does not have, or a size that would not be whole.
    """
    available = step.available()
    if wanted is not None and step.cuts is not None:
        wanted = (*wanted, CUT)
    if wanted is not None:
        wanted = (*wanted, *(symbol for symbol, _, _ in step.degrees))
    for symbol in wanted or ():
        if symbol not in available:
            reason = next((text for text in step.numbers if text.startswith(f"{symbol} = ")), "")
            what = f"{symbol} stayed a number: {reason}" if reason else f"the step has no symbol {symbol}"
            raise UsageError(f"--symbols: {what}", hint=f"it has: {','.join(available)}")
    values = {**step.env, **step.widths()}
    replaced: dict[str, Size | int] = {}
    ties: list[tuple[str, str]] = []
    extra: list[str] = []
    atoms = set(step.program.dims)
    if GROUP in atoms:
        replaced[GROUP] = Size.of("a") * Size.of("k") ** -1
        extra.append("k divides a")
    tied = {"h", "a", "d"} <= values.keys() and values["h"] == values["a"] * values["d"]
    if tied and "d" in atoms and "a" not in available:  # the heads are a number, by which no symbol can be divided
        if wanted is not None and "h" in wanted and "h" not in atoms:
            message = "--symbols: the hidden size is heads times head size here, and the heads are a number"
            raise UsageError(message, hint="ask for  a  as well, or for  d  in its place")
        tied = False
    forced = tied and "d" in atoms and "h" not in atoms
    if "d" in atoms and tied and (("d" not in wanted) if wanted is not None and not forced else forced_shows_h(wanted)):
        replaced["d"] = Size.of("h") * Size.of("a") ** -1
        ties.append(("d", "h/a"))
        extra.append("a divides h")
    dims = tuple(s for s in step.order() if s in available and s not in replaced and (s in atoms or _made(s, replaced)))
    program = substituted(step.program, replaced, dims)
    program = replace(program, domain=tuple(dict.fromkeys((*program.domain, *extra))))
    used = {symbol for storage in program.storages for symbol in storage.nbytes.symbols()} | {"B", "S"}
    used |= {symbol for size in _workspaces(program) for symbol in size.symbols()}
    used |= {"L", CUT, *(symbol for symbol, _, _ in step.degrees)} & set(dims)
    keep = [s for s in dims if (s in wanted if wanted is not None else s in used)]
    fixed = {s: values[s] for s in dims if s not in keep}
    bound = {s: value for s, value in fixed.items() if s != "L"}
    try:
        program = substituted(program, bound, [s for s in dims if s not in bound])
    except UsageError as error:
        divisors = [s for s in ("a", "k") if s in bound]
        raise UsageError(f"--symbols: {error.message}", hint=f"keep {' and '.join(divisors)} too, or leave out h") from None
    return Shown(step, program, {s: values[s] for s in keep}, fixed, tuple(ties))


def forced_shows_h(wanted: Sequence[str] | None) -> bool:
    """Whether h/a is written for d where h is not independent: unless d alone is asked for."""
    return wanted is None or "h" in wanted or "d" not in wanted


def _made(symbol: str, replaced: dict[str, Size | int]) -> bool:
    return any(isinstance(size, Size) and symbol in size.symbols() for size in replaced.values())


def _workspaces(program: Program) -> Iterator[Size]:
    for phase in program.phases:
        for op in phase.ops:
            for inner in op.body if isinstance(op, Repeat) else (op,):
                if isinstance(inner, Op):
                    yield inner.scratch
