"""One preset's formula beside fresh concrete analyses, and beside real steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import memir
from benchmarks.formulas.cases import Point
from memir.api import program_of, wide_step
from memir.derivation.derive import Derivation
from memir.derivation.step import Shown, WideStep, shown
from memir.frontend.load import load_target
from memir.frontend.widths.fields import Widths, find_widths, fresh

Progress = Callable[[str], None]
TARGETS = {"cuda": memir.Recipe(), "cpu": memir.Recipe(target="cpu", dtype="f32", optimizer="sgd")}


@dataclass(frozen=True, slots=True)
class Row:
    """One quantity at one point, in bytes: by the formula, and by a fresh trace at that point (or a real run)."""

    preset: str
    where: str
    quantity: str
    formula: int
    fresh: int
    how: str  # "analysis" or "real step"

    @property
    def is_equal(self) -> bool:
        """To the byte; a real step to what Python numbers take that autograd keeps as tensors of 8 bytes."""
        return self.formula == self.fresh if self.how == "analysis" else abs(self.formula - self.fresh) <= 1024


class Verified:
    """The formula of a preset: the peak, exact at all widths of its domain."""

    def __init__(self, preset: str, recipe: memir.Recipe) -> None:
        self.preset, self.recipe = preset, recipe
        self.step: WideStep = wide_step(preset, recipe)
        self.shown: Shown = shown(self.step, self.step.available())  # head sizes apart from h/a where the code allows it
        derivation = Derivation(self.shown, everywhere=True)
        self.quantities = {name: derivation.quantity(name).every for name in ("peak", "steady")}
        self._widths = find_widths(load_target(preset, recipe=recipe).config, recipe)

    def env(self, point: Point) -> tuple[dict[str, int], dict[str, object]]:
        """The value of every symbol at a point, and the options that give the model those widths."""
        sets: dict[str, object] = {}
        values = dict(self.shown.env)
        if point.seed is not None:
            widths = self._symbolic_widths()
            atoms = self._inside(widths, point)
            values |= {name: value for name, value in widths.sizes(atoms).items() if name in values}
            sets |= widths.sets(atoms)
        fields = {symbol: name for name, symbol in self.step.fields}
        if "L" in values:
            values["L"] = point.layers
            sets[fields["L"]] = point.layers
        return {**values, "B": point.batch, "S": point.seq}, sets

    def _symbolic_widths(self) -> Widths:
        symbols = set(self.step.program.dims)
        return self._widths.without(frozenset(a.name for a in self._widths.atoms if not ({a.name} & symbols or a.name == "P")))

    def _inside(self, widths: Widths, point: Point) -> dict[str, int]:
        return fresh(widths, 1000 * (point.seed or 0) + 7)

    def rows(self, points: Sequence[Point]) -> Iterator[Row]:
        """The formula's values at points of one set of widths, beside those of a new trace made at the first of them."""
        env, sets = self.env(points[0])
        traced = program_of(self.preset, self.recipe, batch=env["B"], seq=env["S"], sets=sets, cache=False)
        numbers = memir.peak(traced.program)
        for point in points:
            env = {**env, "B": point.batch, "S": point.seq, "L": point.layers}
            at = {name: env[name] for name in traced.program.dims}
            found = {"peak": numbers.evaluate(at)[0], "steady": numbers.resident.evaluate(at)}
            where = ", ".join(f"{name}={value}" for name, value in env.items())
            for name, sizes in self.quantities.items():
                yield Row(self.preset, where, name, max(size.evaluate(env) for size in sizes), found[name], "analysis")


def real_rows(preset: str, seeds: tuple[int, ...] = (1, 2)) -> Iterator[Row]:
    """The formula for the CPU beside steps that really run there, with random weights, at small widths."""
    from memir.runtime.real import RealStep, measure_in_child

    recipe = TARGETS["cpu"]
    verified = Verified(preset, recipe)
    for seed in seeds:
        point = Point(batch=2 + seed, seq=48 + seed, layers=4 + seed, seed=seed)
        env, sets = verified.env(point)
        small, sets = _small(verified, env, sets, seed)
        texts = {name: str(value) for name, value in sets.items()}
        measured = measure_in_child(RealStep(preset, recipe, point.batch, point.seq, texts))
        where = ", ".join(f"{name}={value}" for name, value in small.items())
        for name, figure in (("peak", measured.peak), ("steady", measured.at_start)):
            value = max(size.evaluate(small) for size in verified.quantities[name])
            yield Row(preset, where, name, value, figure, "real step")


def _small(
    verified: Verified, env: dict[str, int], sets: dict[str, object], seed: int
) -> tuple[dict[str, int], dict[str, object]]:
    """The same with a small vocabulary: a CPU has to run it. The tokens that configurations name are left out."""
    fields = {symbol: name for name, symbol in verified.step.fields}
    vocabulary = 1000 + 17 * seed
    tokens = {"bos_token_id": 1, "eos_token_id": 2} if verified.preset != "gpt2" else {"bos_token_id": 1, "eos_token_id": 1}
    return {**env, "V": vocabulary}, {**sets, fields["V"]: vocabulary, **tokens}
