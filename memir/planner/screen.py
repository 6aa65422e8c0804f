"""A plan for people, in at most 30 lines of 100 columns, and as JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass

from memir.analysis.words import Unit, exactly
from memir.planner.answer import Answer, in_words
from memir.planner.emit import Setting
from memir.planner.search import Evaluated

WIDTH = 100
_FAILED = 5  # kinds that are told why they are not described
HEAD = "  method                     GPUs micro accum  ckpt       peak {}  fits  tokens/s  limited by"


@dataclass(frozen=True, slots=True)
class Page:
    """An answer and what was asked."""

    answer: Answer
    setting: Setting
    recipe: str  # in a line
    gpu: str
    capacity: int  # bytes that a rank's tensors may take, the margin taken off
    margin: float  # percent
    objective: str
    cluster: str  # in words
    notes: tuple[str, ...] = ()
    exact: int | str | None = None  # the winner's peak by PyTorch's own code; why not; None: not asked


def to_text(page: Page) -> str:
    """The answer first, then why, then the table."""
    found, setting = page.answer, page.setting
    lines = []
    asked = f"S={setting.seq:,}, global batch {setting.global_batch:,}, {page.cluster}"
    lines.append(f"{setting.target}   {page.recipe}   {asked}")
    lines.append("")
    unit = Unit.of(max((row.peak for row in found.rows), default=page.capacity))
    capacity = in_words(page.capacity)
    room = f"of {capacity.removesuffix(f' {unit.name}')}, {page.margin:g} % kept free"
    if not found.rows:
        lines.append("no answer: no method's program can be made")
    elif found.winner is not None:
        one = found.winner
        lines.append(f"best: {_described(one)}")
        tokens = f"{one.tokens:,.0f} tokens/s predicted"
        held = f", {in_words(one.host)} on the host" if one.host else ""
        lines.append(f"  {tokens}, {one.tokens / one.num_gpus:,.0f} a GPU   {in_words(one.peak)} a rank {room}{held}")
        lines += _wrapped(f"because: {found.reason}", "  ")
    else:
        lines.append(f"nothing fits {room}")
        lines += [f"  {change}" for change in found.changes]
    lines.append("")
    if found.rows:
        lines.append(HEAD.format(unit.name))
    lines += [_line(row, unit) for row in found.rows]
    failed = _failed(found)
    lines += [_cut(f"  {kind:<26} not described: {reason}") for kind, reason in failed[:_FAILED]]
    if len(failed) > _FAILED:
        lines.append(f"  and {len(failed) - _FAILED} kinds more that are not described (--format json)")
    lines.append("")
    counted = f"{found.evaluated:,} of {found.candidates:,} candidates evaluated, the others pruned by bounds; {found.variants}"
    checked = "; the peaks of the rows were recomputed at every operator" if found.rows else ""
    lines += _wrapped(f"{counted} programs{checked}", "  ")
    lines += [line for note in page.notes[:2] for line in _wrapped(f"assumed: {note}", "  ")[:2]]
    if page.exact is not None and found.winner is not None:
        exact = page.exact
        said = f"not possible: {exact}" if isinstance(exact, str) else exactly(exact, found.winner.peak)
        lines += _wrapped(f"exact: {said}", "  ")
    if found.winner is not None:
        lines += _wrapped(f"again: {setting.command(found.winner)}", "  ")
    return "\n".join(lines) + "\n"


def _described(one: Evaluated) -> str:
    candidate = one.candidate
    checkpoint = {"none": "no checkpointing", "full": "full checkpointing", "selective": "selective checkpointing"}
    accumulate = f", accumulation {candidate.accumulate}" if candidate.accumulate > 1 else ""
    ranks = f", {one.num_gpus} ranks" if one.num_gpus > 1 else ""
    return f"{candidate.layout.name}{ranks}, micro-batch {candidate.batch}{accumulate}, {checkpoint[candidate.checkpoint]}"


def _line(row: Evaluated, unit: Unit) -> str:
    candidate = row.candidate
    peak = (">" if row.bound else "") + f"{row.peak / unit.nbytes:,.1f}"
    tokens = f"{row.tokens:,.0f}" if row.time is not None else "-"
    limit = row.time.limit if row.time is not None else ""
    return (
        f"  {candidate.layout.name:<26} {row.num_gpus:>4} {candidate.batch:>5} {candidate.accumulate:>5}  "
        f"{candidate.checkpoint:<9} {peak:>9}  {'yes' if row.fits else 'no':<4} {tokens:>9}  {limit}"
    ).rstrip()


def _failed(found: Answer) -> list[tuple[str, str]]:
    """One line for each kind of which no program could be made."""
    shown = {row.candidate.layout.kind for row in found.rows}
    reasons: dict[str, str] = {}
    for failure in found.failures:
        if failure.kind not in shown:
            reasons.setdefault(failure.kind, failure.reason)
    return list(reasons.items())


def _cut(line: str) -> str:
    return line if len(line) <= WIDTH else line[: WIDTH - 3].rstrip() + "..."


def _wrapped(text: str, indent: str) -> list[str]:
    lines, line = [], indent
    for word in text.split():
        if len(line) + len(word) + 1 > WIDTH and line.strip():
            lines.append(line.rstrip())
            line = indent + "  "
        line += word + " "
    return [*lines, line.rstrip()]


def to_json(page: Page) -> str:
    """Everything; bytes and seconds."""
    found = page.answer
    return (
        json.dumps(
            {
                "format": "memir plan",
                "version": 1,
                "target": page.setting.target,
                "recipe": page.recipe,
                "seq": page.setting.seq,
                "global_batch": page.setting.global_batch,
                "gpu": page.gpu,
                "cluster": page.cluster,
                "capacity": page.capacity,
                "margin_percent": page.margin,
                "objective": page.objective,
                "winner": None if found.winner is None else _row(found.winner),
                "exact_peak": page.exact if isinstance(page.exact, int) else None,
                "exact_reason": page.exact if isinstance(page.exact, str) else "",
                "reason": found.reason,
                "changes": list(found.changes),
                "rows": [_row(row) for row in found.rows],
                "not_described": [{"kind": f.kind, "passes": f.text, "reason": f.reason} for f in found.failures],
                "candidates": found.candidates,
                "evaluated": found.evaluated,
                "programs": found.variants,
                "assumptions": list(page.notes),
            },
            indent=2,
        )
        + "\n"
    )


def _row(row: Evaluated) -> dict[str, object]:
    candidate, time = row.candidate, row.time
    degrees = candidate.layout.degrees
    return {
        "method": candidate.layout.name,
        "kind": candidate.layout.kind,
        "passes": candidate.text,
        "gpus": row.num_gpus,
        "degrees": {name: getattr(degrees, name) for name in ("copies", "tensor", "context", "expert", "pipeline")},
        "micro_batch": candidate.batch,
        "accumulate": candidate.accumulate,
        "checkpoint": candidate.checkpoint,
        "fits": row.fits,
        "peak": row.peak,
        "peak_is_a_bound": row.bound,
        "peak_phase": row.place,
        "host_bytes": row.host,
        "tokens_per_second": round(row.tokens, 1) if time is not None else None,
        "limited_by": time.limit if time is not None else None,
        "seconds": None
        if time is None
        else {
            "step": round(time.seconds, 6),
            "computing": round(time.computing, 6),
            "communicating": round(time.communicating, 6),
            "exposed": round(time.exposed, 6),
            "bubble": round(time.bubble, 6),
            "optimizer": round(time.optimizer, 6),
            "host": round(time.host, 6),
        },
    }
