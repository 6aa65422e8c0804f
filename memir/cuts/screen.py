"""The cuts of a step as text, CSV and JSON. Bytes are requested bytes."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields

from memir.analysis.peak import Piece
from memir.analysis.words import Unit, count
from memir.cuts.answers import NEGLIGIBLE, Answers
from memir.cuts.cache import CONDITIONS, CachePlan
from memir.cuts.pareto import Choice, fastest
from memir.cuts.plan import Plan, Range
from memir.cuts.reading import Cut
from memir.cuts.schedule import Run
from memir.ir.symbolic import formula_text

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class Page:
    """All that is said of one model's cuts."""

    name: str
    recipe: str
    plan: Plan
    answers: Answers
    objective: str
    budget: int | None = None
    budget_name: str = ""
    machine: str = ""
    cache: CachePlan | None = None
    run: Run | None = None
    gpus: int = 1
    notes: tuple[str, ...] = ()
    pareto: tuple[Choice, ...] = ()


def to_text(page: Page) -> str:
    """The screen."""
    plan, unit = page.plan, Unit.of(page.plan.cuts[0].peak)
    env = dict(plan.env)
    layers = f"{plan.depth} layer{'s' * (plan.depth > 1)} in {plan.list_path}"
    lines = [f"{page.name}   B={env['B']} S={env['S']}   {layers}   {page.recipe}", ""]
    lines += [*_table(page, unit), ""]
    lines += _answers(page, unit)
    if plan.tied:
        lines.append(f"tied: {', '.join(plan.tied)} is the head's too, and stays trained; only its lookup's gradient goes")
    if page.cache is not None:
        lines += ["", *_cache(page.cache, unit)]
    if page.run is not None:
        lines += ["", *_run(page.run, unit, page.gpus, page.objective)]
    if page.pareto:
        lines += ["", *_pareto(page, unit)]
    lines += ["", "peak as a formula (k: layers frozen; requested bytes):"]
    for one in plan.ranges:
        if len(one.cuts) > 1:
            at = f"k = {one.cuts[0]} to {one.cuts[-1]}"
            lines += [
                f"  {at}, {piece.place.phase} {piece.place.opcode}: {formula_text(piece.size)}" for piece in _pieces(one, env)
            ]
    lines += [f"note: {note}" for note in page.notes]
    return "\n".join(lines) + "\n"


def _pieces(one: Range, env: dict[str, int]) -> list[Piece]:
    """The pieces that are the maximum at one of the cuts, at the asked B and S."""
    found: list[Piece] = []
    for cut in one.cuts:
        piece = one.piece({**env, "k": cut})
        if piece not in found:
            found.append(piece)
    return found


def _table(page: Page, unit: Unit) -> list[str]:
    timed = page.plan.cuts[0].seconds is not None
    head = ["cut", "trained", f"peak {unit.name}", "weights", "gradients", "states", "rest", "TFLOP", "speed-up", "cached"]
    if page.answers.largest_batch is not None:
        head += ["max B", "max S"]
    rows = [[*head, "peak is in"]]
    first = page.plan.cuts[0]
    for number, cut in enumerate(page.plan.cuts):
        row = [str(cut.cut), count(cut.num_trainable), unit.number(cut.peak)]
        row += [unit.number(n) for n in (cut.parameters, cut.gradients, cut.states, cut.activations)]
        row += [f"{cut.flops / 1e12:,.2f}", *(_ratio(first, cut, timed))]
        if page.answers.largest_batch is not None and page.answers.largest_seq is not None:
            row += [f"{page.answers.largest_batch[number]:,}", f"{page.answers.largest_seq[number]:,}"]
        rows.append([*row, f"{cut.phase} {cut.op.removeprefix('aten.')}" + (f" @{cut.path}" if cut.path else "")])
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row[:-1], widths, strict=False)]
        lines.append("  ".join([*cells, row[-1]]).rstrip())
    return lines


def _ratio(first: Cut, cut: Cut, timed: bool) -> tuple[str, str]:
    if timed and first.seconds and cut.seconds and cut.cached_seconds:
        return f"{first.seconds / cut.seconds:.2f}x", f"{first.seconds / cut.cached_seconds:.2f}x"
    return f"{first.flops / cut.flops:.2f}x", f"{first.flops / cut.cached_flops:.2f}x"


def _answers(page: Page, unit: Unit) -> list[str]:
    found, cuts = page.answers, page.plan.cuts
    lines = []
    if page.budget is not None:
        name = f"{page.budget_name} ({unit.text(page.budget)} for tensors)"
        if found.fits is None:
            least = min(c.peak for c in cuts)
            lines.append(f"fits: no cut fits {name}: the least is {unit.text(least)}")
        else:
            lines.append(f"fits: the smallest cut that fits {name} is {found.fits}, with {unit.text(cuts[found.fits].peak)}")
    last = cuts[found.enough]
    lines.append(
        f"enough: beyond cut {found.enough} all further freezing buys less than {NEGLIGIBLE:.0%} of the peak; "
        f"it is in {last.phase}, {last.op}" + (f" ({last.source})" if last.source else "")
    )
    lines += [
        f"peak: cuts {s.first} to {s.last} in {s.phase}, {s.op}" + (f" @{s.path}" if s.path else "") for s in found.places
    ]
    if found.best is not None:
        what = {"memory": "least memory", "time": "fastest step", "cost": "fewest GPU-hours"}[page.objective]
        lines.append(f"best for {page.objective}: cut {found.best} ({what}{' of those that fit' if page.budget else ''})")
        if page.objective == "cost":
            few = found.kept[found.best]
            lines[-1] += (
                f": {few.gpus} of {page.gpus} GPUs with B={few.batch} and {unit.text(few.peak)} each "
                f"keep a step no slower than cut 0's; GPU-hours {few.hours:.3f} of cut 0"
            )
    by = f"time on {page.machine} (roofline)" if page.machine else "operations (matrix products and attention)"
    lines.append(f"speed-ups are by {by}; which cut keeps the accuracy, no static analysis can say")
    return lines


def _cache(cache: CachePlan, unit: Unit) -> list[str]:
    lines = [f"cache on {cache.where}: {unit.text(cache.step_bytes)} a batch, read at {cache.bandwidth / 1e9:g} GB/s"]
    if cache.dataset_bytes is not None:
        lines.append(f"  the data set: {Unit.of(cache.dataset_bytes).text(cache.dataset_bytes)}")
    even = (
        f"pays from cut {cache.break_even} on"
        if cache.break_even is not None
        else "no break-even cut is known (name a --gpu card)"
    )
    return [*lines, f"  {even}", *(f"  valid only if {text}" for text in CONDITIONS)]


def _run(run: Run, unit: Unit, gpus: int, objective: str) -> list[str]:
    lines = ["schedule:"]
    lines += [
        f"  from {p.start:.0%}: cut {p.cut}, step {p.step:.3f} of cut 0, peak {unit.text(p.peak)}"
        + (f"; cost mode: {p.gpus} of {gpus} GPUs, B={p.batch} each" if gpus > 1 else "")
        for p in run.phases
    ]
    lines.append(f"  whole run: time {run.time:.3f} of full fine-tuning, largest peak {unit.text(run.peak)}")
    if gpus > 1:
        lines.append(f"  cost mode: GPU-hours {run.cost:.3f}, time {run.cost_time:.3f} of full fine-tuning on {gpus} GPUs")
    if objective == "cost":
        counts = ", ".join(str(p.gpus) for p in run.phases)
        lines.append(f"  chosen for cost: GPUs by phase {counts}; {run.cost:.3f} of the GPU-hours of full fine-tuning")
    return lines


def _pareto(page: Page, unit: Unit) -> list[str]:
    """The fastest at each cut; all of them are in the JSON."""
    shown = fastest(page.pareto)
    lines = [f"{len(page.pareto)} choices of cut, batch, checkpointing and cache that none beats; the fastest of each cut:"]
    first = shown[0].sample
    for c in shown:
        ways = ", ".join(word for word, on in (("checkpointed", c.checkpointed), ("cached", c.cached)) if on) or "as it is"
        lines.append(
            f"  cut {c.cut}, B={c.batch:,}, {ways}: {unit.text(c.peak)}, a sample in {c.sample / first:.3f} of the first"
        )
    return lines


def to_csv(page: Page) -> str:
    """One row a cut; every number."""
    out = io.StringIO()
    names = [f.name for f in fields(Cut)]
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*names, "largest_B", "largest_S"])
    for number, cut in enumerate(page.plan.cuts):
        largest: Sequence[object] = ("", "")
        if page.answers.largest_batch is not None and page.answers.largest_seq is not None:
            largest = (page.answers.largest_batch[number], page.answers.largest_seq[number])
        writer.writerow(["" if getattr(cut, n) is None else getattr(cut, n) for n in names] + list(largest))
    return out.getvalue()


def to_json(page: Page) -> str:
    """Everything, with the formulas."""
    plan, env = page.plan, dict(page.plan.env)
    document = {
        "schema_version": SCHEMA_VERSION,
        "model": page.name,
        "recipe": page.recipe,
        "symbols": env,
        "layers": {"path": plan.list_path, "count": plan.depth},
        "tied": list(plan.tied),
        "budget_bytes": page.budget,
        "objective": page.objective,
        "timed_on": page.machine or None,
        "answers": asdict(page.answers),
        "cuts": [asdict(cut) for cut in plan.cuts],
        "formulas": [
            {
                "cuts": [one.cuts[0], one.cuts[-1]],
                "domain": list(one.program.domain),
                "peak": [formula_text(piece.size) for piece in _pieces(one, env)],
            }
            for one in plan.ranges
        ],
        "cache": None if page.cache is None else {**asdict(page.cache), "valid_if": list(CONDITIONS)},
        "schedule": None
        if page.run is None
        else {
            "gpus": page.gpus,
            "mode": "cost" if page.objective == "cost" else "time",
            **asdict(page.run),
        },
        "pareto": [asdict(choice) for choice in page.pareto],
        "notes": list(page.notes),
    }
    return json.dumps(document, indent=2) + "\n"
