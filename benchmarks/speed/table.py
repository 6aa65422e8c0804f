"""The results: a table, the aims, and both as files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.speed.cases import AIMS, GIB, Aim, Figures
from benchmarks.speed.measure import Run

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results.json"
PAGE = HERE / "results.md"


def figures_of(runs: Mapping[str, Sequence[Run]]) -> dict[str, Figures]:
    """The medians of each case that was run."""
    return {
        name: Figures(median(run.seconds for run in found), int(median(run.peak for run in found)))
        for name, found in runs.items()
        if found
    }


def measured_aims(figures: Mapping[str, Figures]) -> list[Aim]:
    """The aims whose cases were all run."""
    return [aim for aim in AIMS if all(name in figures for name in aim.needs)]


def table(runs: Mapping[str, Sequence[Run]]) -> list[str]:
    """A line a case: seconds (median, least, most), memory, runs."""
    figures = figures_of(runs)
    width = max(len(name) for name in figures)
    lines = [f"{'':{width}}   seconds (least to most)   memory GiB   runs"]
    for name, found in figures.items():
        seconds = [run.seconds for run in runs[name]]
        spread = f"({min(seconds):.2f} to {max(seconds):.2f})"
        lines.append(f"{name:{width}}   {found.seconds:7.2f} {spread:>17}   {found.peak / GIB:10.2f}   {len(seconds):4}")
    return lines


def aims(figures: Mapping[str, Figures]) -> list[str]:
    """A line an aim: what it is, what was measured, whether it is met."""
    lines = []
    for aim in measured_aims(figures):
        limit = f"at {'least' if aim.at_least else 'most'} {aim.bound:g}"
        verdict = "met" if aim.is_met(figures) else "NOT met"
        lines.append(f"{aim.text:45} {aim.value(figures):8.2f} {aim.unit:5}  {limit:13}  {verdict}")
    return lines


def save(runs: Mapping[str, Sequence[Run]], facts: Mapping[str, Any]) -> None:
    """results.json with every run, results.md with the ratios."""
    figures = figures_of(runs)
    document = {
        **facts,
        "cases": {
            name: {
                "seconds": round(found.seconds, 3),
                "peak_bytes": found.peak,
                "runs": [round(run.seconds, 3) for run in runs[name]],
            }
            for name, found in figures.items()
        },
        "aims": [
            {
                "text": aim.text,
                "value": round(aim.value(figures), 3),
                "unit": aim.unit,
                "bound": aim.bound,
                "at_least": aim.at_least,
                "met": aim.is_met(figures),
            }
            for aim in measured_aims(figures)
        ],
    }
    RESULTS.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    PAGE.write_text(page(document), encoding="utf-8")


def page(document: Mapping[str, Any]) -> str:
    """results.md."""
    lines = ["# Speed", "", f"`{document['command']}` on one machine, whole processes, medians; written by the benchmark.", ""]
    for title in ("machine", "versions"):
        facts = ", ".join(f"{name} {value}" for name, value in document[title].items())
        lines.append(f"{title}: {facts}  ")
    lines += [f"sweep: {document['sample']}", "", "| what | measured | aim | met |", "|---|---|---|---|"]
    for aim in document["aims"]:
        limit = f"{'>=' if aim['at_least'] else '<='} {aim['bound']:g} {aim['unit']}"
        lines.append(f"| {aim['text']} | {aim['value']:.2f} {aim['unit']} | {limit} | {'yes' if aim['met'] else '**no**'} |")
    lines += ["", "| process | seconds | memory, GiB | runs |", "|---|---|---|---|"]
    for name, case in document["cases"].items():
        lines.append(f"| {name} | {case['seconds']:.2f} | {case['peak_bytes'] / GIB:.2f} | {len(case['runs'])} |")
    if document["memtracker"]:
        lines += ["", "MemTracker's steps, seconds within the process (the first makes the optimizer's state):", ""]
        lines += [f"- {name}: {', '.join(map(str, seconds))}" for name, seconds in document["memtracker"].items()]
    return "\n".join(lines) + "\n"
