"""Scenarios analyzed in processes side by side, and judged. The result does not depend on which one is done first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from memir.check.baseline import VERSIONED, Baseline, Entry, entry
from memir.check.config import Config
from memir.check.judge import GREW, OVER, SKIP, UNKNOWN, Outcome, failed, judge, skipped
from memir.check.scenario import Scenario
from memir.errors import EXIT_INCONCLUSIVE, EXIT_NO, EXIT_OK, MemirError
from memir.workers import Call, Place, run


@dataclass(frozen=True, slots=True)
class Checked:
    """All outcomes, by the scenarios' names."""

    config: Config
    outcomes: tuple[Outcome, ...]
    baseline: Baseline | None

    @property
    def exit_code(self) -> int:
        """1: over budget or regressed; 3: something could not be proved, or was not checked; else 0."""
        found = {outcome.status for outcome in self.outcomes}
        if found & {OVER, GREW}:
            return EXIT_NO
        return EXIT_INCONCLUSIVE if found & {UNKNOWN, SKIP} or not self.outcomes else EXIT_OK

    @property
    def entries(self) -> dict[str, Entry]:
        """What a new baseline says of the analyzed scenarios."""
        return {o.scenario.name: entry(o.scenario, o.facts) for o in self.outcomes if o.facts is not None}

    @property
    def versions(self) -> dict[str, str]:
        """Of what decides the numbers."""
        found: dict[str, str] = {}
        for outcome in self.outcomes:
            found |= {n: v for n, v in (outcome.facts.versions if outcome.facts else ()) if n in VERSIONED}
        return found


def check(
    config: Config,
    scenarios: Sequence[Scenario],
    baseline: Baseline | None,
    *,
    keywords: Mapping[str, bool],
    jobs: int | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Checked:
    """The scenarios' outcomes. `keywords` are further ones of `program_of` (cache, fold); at most `jobs` processes run."""
    wanted = [scenario for scenario in scenarios if not scenario.skip]
    place = Place(str(config.folder))
    calls = [
        Call(
            "memir.check.facts:facts",
            {
                "target": scenario.target,
                "recipe": scenario.recipe,
                "keywords": {**scenario.keywords(), **keywords},
                "fits": scenario.budgets.fits,
            },
            place,
        )
        for scenario in wanted
    ]
    left = len(wanted)
    progress(f"{left} scenarios to analyze")

    def done(_: int) -> None:
        nonlocal left
        left -= 1
        progress(f"{left} scenarios to analyze")

    answers = dict(zip((s.name for s in wanted), run(calls, done, jobs), strict=True))
    outcomes = []
    for scenario in scenarios:
        answer = answers.get(scenario.name)
        if scenario.skip:
            outcomes.append(skipped(scenario))
        elif isinstance(answer, MemirError):
            if answer.exit_code == MemirError.exit_code:
                raise answer
            outcomes.append(failed(scenario, answer))
        else:
            assert answer is not None
            outcomes.append(judge(scenario, answer, baseline))
    return Checked(config, tuple(outcomes), baseline)
