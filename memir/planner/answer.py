"""From what was found to what is said: the rows, recomputed exactly, the winner and why, or what would make it fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from memir.analysis.words import Unit
from memir.errors import MemirError
from memir.hardware import cards
from memir.planner.search import Evaluated, Failure, Found, Problem
from memir.planner.variant import Variants, exact

GIB = 2**30


def in_words(nbytes: int) -> str:
    """`70.9 GiB`; below a tenth of one in MiB."""
    unit = Unit.of(nbytes)
    return f"{nbytes / unit.nbytes:,.1f} {unit.name}"


@dataclass(frozen=True, slots=True)
class Answer:
    """A plan. `winner` None: nothing fits; then `changes` says what would, the smallest first."""

    winner: Evaluated | None
    reason: str
    rows: tuple[Evaluated, ...]
    changes: tuple[str, ...]
    failures: tuple[Failure, ...]
    candidates: int
    evaluated: int
    variants: int


def answer(
    found: Found, problem: Problem, variants: Variants, limit: int, progress: Callable[[str], None] = lambda _: None
) -> Answer:
    """The answer, its first `limit` rows recomputed by the passes with numbers, at every operator.

    MemirError where a formula and that differ: the plan would be wrong.
    """
    rows = found.rows(problem.objective)[:limit]
    for row in rows:
        if not row.bound:
            progress(f"verifying {row.candidate.layout.name}")
            _verify(row, problem, variants)
    winner = found.best(problem.objective)
    return Answer(
        winner,
        _reason(winner, found, rows, problem) if winner is not None else "",
        tuple(rows),
        () if winner is not None else tuple(changes(found, problem, variants)),
        found.failures,
        len(found.evaluated) + len(found.pruned) + found.failed,
        len(found.evaluated),
        found.variants,
    )


def _verify(row: Evaluated, problem: Problem, variants: Variants) -> None:
    candidate = row.candidate
    program, fixed = variants.step(*candidate.step)
    nbytes = exact(candidate.text, program, fixed, candidate.batch, problem.seq)
    if nbytes != row.peak:
        raise MemirError(
            f"{candidate.layout.name}: the formula says {row.peak:,} bytes and its operators {nbytes:,}", where=candidate.text
        )


def _reason(winner: Evaluated, found: Found, rows: Sequence[Evaluated], problem: Problem) -> str:
    """Why the winner, in a sentence: what is next, and what the simpler ways lack."""
    said = []
    simpler = [row for row in rows if not row.fits and _is_simpler(row, winner)]
    for row in simpler[:2]:
        least = "at least " if row.bound else ""
        said.append(f"{row.candidate.layout.name} does not fit (needs {least}{in_words(row.peak)})")
    second = next((row for row in rows if row.fits and row.candidate.layout.kind != winner.candidate.layout.kind), None)
    if second is not None and second.time is not None:
        share = second.time.exposed / second.time.seconds
        lost = f", {share:.0%} of its step in communication" if share >= 0.05 else ""
        slower = winner.tokens / second.tokens - 1
        what = f"{slower:.0%} slower" if slower >= 0.005 else "as fast, and takes more methods"
        said.append(f"{second.candidate.layout.name} is {what}{lost}")
    lighter = [
        one
        for one in (*found.evaluated, *found.pruned)
        if one.candidate.layout == winner.candidate.layout and not one.fits and one.candidate.batch == winner.candidate.batch
        and one.candidate.checkpoint == "none"
    ]  # fmt: skip
    if lighter and winner.candidate.checkpoint != "none":
        least = "at least " if lighter[0].bound else ""
        said.append(f"without checkpointing it needs {least}{in_words(lighter[0].peak)}")
    if not said:
        said.append("nothing else that was looked at is faster" if problem.objective == "time" else "nothing else does better")
    return "; ".join(said)


def _is_simpler(row: Evaluated, winner: Evaluated) -> bool:
    return row.candidate.layout.kind in ("ddp", "one gpu") or (
        len(row.candidate.layout.inner) < len(winner.candidate.layout.inner)
    )


def changes(found: Found, problem: Problem, variants: Variants) -> list[str]:
    """What would make something fit: a shorter sequence, more GPUs, another card."""
    least = min((*found.evaluated, *found.pruned), key=lambda one: (one.bound, one.peak, one.candidate.text), default=None)
    if least is None:
        return []
    at_least = "at least " if least.bound else ""
    name = f"{least.candidate.layout.name}, micro-batch {least.candidate.batch}, checkpointing {least.candidate.checkpoint}"
    said = [f"nearest: {name} needs {at_least}{in_words(least.peak)} of {in_words(problem.capacity)}"]
    if not least.bound:
        shorter = _longest(least, problem, variants)
        if shorter:
            said.append(f"sequences of {shorter:,} tokens in the place of {problem.seq:,}")
    bigger = [card for card in cards() if card.capacity - (card.capacity // 20) > least.peak and card.bf16]
    if bigger:
        card = min(bigger, key=lambda card: (card.capacity, card.key))
        said.append(f"GPUs with {card.nominal // GIB} GB, such as {card.key}")
    said.append("--tune lora or --tune qlora, which keep gradients and optimizer states of adapters only")
    return said


def _longest(one: Evaluated, problem: Problem, variants: Variants) -> int:
    """The longest sequence, a multiple of 128, at which the candidate fits; 0 for none. Peaks grow with S."""
    candidate = one.candidate
    variant = variants.get(candidate.text, *candidate.step)
    low, high = 0, problem.seq // 128
    while high - low > 1:
        middle = (low + high) // 2
        fits = variant.peak(candidate.batch, 128 * middle)[0] <= problem.capacity
        low, high = (middle, high) if fits else (low, middle)
    return 128 * low


def at_margin(capacity: int, margin: float) -> int:
    """The capacity less a part of it that is kept free."""
    return int(capacity * (1 - margin / 100))
