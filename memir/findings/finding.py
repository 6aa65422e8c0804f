"""One thing to say about a line of code, and the rules that it may follow. docs/lint.md and docs/check.md describe each."""

from __future__ import annotations

from dataclasses import dataclass

LEVELS = ("error", "warning", "note")


@dataclass(frozen=True, slots=True)
class Rule:
    """A kind of finding. `code` and `name` are stable: people write them into their code and configuration."""

    code: str  # "MEM101"
    name: str  # "logits-in-fp32"
    text: str  # one sentence
    page: str  # the documentation's file and anchor


@dataclass(frozen=True, slots=True)
class Finding:
    """A rule at a place. `file` is relative to the working directory, "" where there is none; lines count from 1."""

    rule: Rule
    level: str
    message: str
    file: str = ""
    line: int = 0
    nbytes: int = 0  # at the peak
    formula: str = ""
    module: str = ""

    @property
    def key(self) -> tuple[int, int, str, int, str, str]:
        """The order in which findings are told: the gravest first, the largest first, then by place."""
        return (LEVELS.index(self.level), -self.nbytes, self.file, self.line, self.rule.code, self.message)


def _checks(code: str, name: str, text: str) -> Rule:
    return Rule(code, name, text, f"docs/check.md#{name}")


BUDGET = _checks("MEM001", "budget-exceeded", "A step takes more than its budget.")
REGRESSION = _checks("MEM002", "peak-regression", "A step takes more than the baseline says.")
ORDER = _checks("MEM003", "order-increase", "The peak grows faster with batch or sequence length than before, or than allowed.")
INCONCLUSIVE = _checks("MEM006", "inconclusive", "memir cannot prove the number.")
SKIPPED = _checks("MEM007", "scenario-skipped", "A scenario was not checked.")
IMPROVED = _checks("MEM008", "peak-lower", "A step takes less than before.")
CHECK_RULES = (BUDGET, REGRESSION, ORDER, INCONCLUSIVE, SKIPPED, IMPROVED)
