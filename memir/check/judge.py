"""A scenario's facts beside its budgets and its baseline: passed or not, and why."""

from __future__ import annotations

from dataclasses import dataclass

from memir.analysis.words import Unit
from memir.check.baseline import Baseline, question
from memir.check.facts import Facts
from memir.check.scenario import Increase, Scenario
from memir.cuda.verdict import DOES_NOT, TIGHT
from memir.diff.orders import leading, product_text, within
from memir.errors import MemirError
from memir.findings.finding import BUDGET, INCONCLUSIVE, ORDER, REGRESSION, SKIPPED, Rule
from memir.ir.sizetext import parse_size

OK, OVER, GREW, UNKNOWN, SKIP = "ok", "over budget", "regressed", "inconclusive", "skipped"
STATUSES = (OVER, GREW, UNKNOWN, SKIP, OK)  # the gravest first


@dataclass(frozen=True, slots=True)
class Reason:
    """One thing that is wrong, with its rule."""

    rule: Rule
    status: str
    text: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a check says of one scenario. `before` is the baseline's peak in requested bytes, None where it has none."""

    scenario: Scenario
    facts: Facts | None
    before: int | None
    delta: str  # the formula's difference at this point; "" without a baseline or where it is the same
    reasons: tuple[Reason, ...]
    notes: tuple[str, ...] = ()

    @property
    def status(self) -> str:
        """The gravest of the reasons' words, or ok."""
        return min((reason.status for reason in self.reasons), key=STATUSES.index, default=OK)


def skipped(scenario: Scenario) -> Outcome:
    """A scenario that its configuration leaves out."""
    return Outcome(scenario, None, None, "", (Reason(SKIPPED, SKIP, f"not checked: {scenario.skip}"),))


def failed(scenario: Scenario, error: MemirError) -> Outcome:
    """A scenario that could not be analyzed."""
    text = "; ".join(filter(None, (error.message, " ".join(error.where.split()), error.hint)))
    return Outcome(scenario, None, None, "", (Reason(INCONCLUSIVE, UNKNOWN, text),))


def judge(scenario: Scenario, facts: Facts, baseline: Baseline | None) -> Outcome:
    """The outcome of a scenario that was analyzed."""
    reasons = [Reason(INCONCLUSIVE, UNKNOWN, text) for text in facts.inconclusive]
    reasons += _budgets(scenario, facts)
    notes = []
    before, delta = None, ""
    known = None if baseline is None else baseline.entries.get(scenario.name)
    if baseline is not None and known is None:
        notes.append("new: the baseline has no such scenario (--update-baseline adds it)")
        if scenario.budgets.max_increase is not None:
            notes.append("max_increase says nothing without a baseline")
    elif known is not None and known.question != question(scenario):
        changed = sorted({key for key, _ in set(known.question) ^ set(question(scenario))})
        text = f"its {', '.join(changed)} changed since the baseline was written; --update-baseline accepts what it takes now"
        reasons.append(Reason(INCONCLUSIVE, UNKNOWN, text))
    elif known is not None:
        before = known.nbytes
        difference = parse_size(facts.here) - parse_size(known.here)
        delta = "" if not difference.terms else difference.text(("B", "S", "L"))
        allowed = (scenario.budgets.max_increase or Increase("0")).allowed(before)
        unit = Unit.of(max(before, facts.requested))
        if facts.requested > before + allowed:
            more = f"{unit.text(before)} -> {unit.text(facts.requested)}, {facts.requested - before:+,} bytes"
            limit = scenario.budgets.max_increase
            over = f", more than max_increase = {limit.text}" if limit is not None else ""
            reasons.append(Reason(REGRESSION, GREW, f"the peak grew: {more}{over}"))
        for order in facts.orders:
            if not any(within(order, other) for other in known.orders):
                text = f"the peak gained a {product_text(order)} term: {facts.here}"
                reasons.append(Reason(ORDER, GREW, text))
        if facts.requested < before:
            notes.append(f"{before - facts.requested:,} bytes less than the baseline (--update-baseline keeps that)")
    elif scenario.budgets.max_increase is not None:
        notes.append("max_increase says nothing without a baseline (--update-baseline writes it)")
    return Outcome(scenario, facts, before, delta, tuple(reasons), tuple(notes))


def _budgets(scenario: Scenario, facts: Facts) -> list[Reason]:
    budgets, found = scenario.budgets, []
    if budgets.max is not None and facts.allocated > budgets.max:
        unit = Unit.of(facts.allocated)
        over = f"{facts.allocated - budgets.max:,} bytes over max = {unit.text(budgets.max)}"
        text = f"{unit.text(facts.allocated)} allocated, {over}"
        found.append(Reason(BUDGET, OVER, text))
    if budgets.max_saved_per_layer is not None and facts.saved_per_layer > budgets.max_saved_per_layer:
        unit = Unit.of(facts.saved_per_layer)
        text = (
            f"{facts.saved_in} keeps {unit.text(facts.saved_per_layer)} for backward, "
            f"over max_saved_per_layer = {unit.text(budgets.max_saved_per_layer)}"
        )
        found.append(Reason(BUDGET, OVER, text))
    if budgets.max_order is not None:
        allowed = leading([budgets.max_order])
        for order in facts.orders:
            if not any(within(order, other) for other in allowed):
                text = f"the peak has a {product_text(order)} term, beyond max_order = {budgets.max_order.text(('B', 'S'))}"
                found.append(Reason(ORDER, OVER, text))
    if budgets.fits is not None:
        unit = Unit.of(budgets.fits.nbytes)
        low, high = facts.needed
        takes = unit.text(high) if low == high else f"{unit.number(low)} to {unit.text(high)}"
        if facts.fits == DOES_NOT:
            found.append(Reason(BUDGET, OVER, f"does not fit {budgets.fits.name}: {takes} of {unit.text(budgets.fits.nbytes)}"))
        elif facts.fits == TIGHT:
            text = f"whether it fits {budgets.fits.name} is not certain: {takes} of {unit.text(budgets.fits.nbytes)}"
            found.append(Reason(INCONCLUSIVE, UNKNOWN, text))
    return found
