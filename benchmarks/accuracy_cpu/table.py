"""The two tables: measured.csv (the truth, with versions) and results.csv (predicted against measured)."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from benchmarks.accuracy_cpu.cases import Case
from benchmarks.accuracy_cpu.reasons import DATA_DEPENDENT, reason_of
from benchmarks.accuracy_cpu.run import Figures

HERE = Path(__file__).resolve().parent
MEASURED = HERE / "measured.csv"
RESULTS = HERE / "results.csv"
TOLERANCE = 1024  # bytes
VERDICTS = ("exact", "within 1 KiB", "beyond 1 KiB", "no prediction")


@dataclass(frozen=True, slots=True)
class MeasuredRow:
    """A real run: absolute bytes, the operator that the peak is reached in, and the versions it was made with."""

    case: str
    batch: int
    seq: int
    at_start: int
    peak: int
    at_end: int
    peak_op: str
    torch: str
    transformers: str
    peft: str


@dataclass(frozen=True, slots=True)
class Row:
    """A case compared. Differences are predicted minus measured, in bytes; `worst_percent` is of the measured figure."""

    case: str
    batch: int
    seq: int
    start_measured: int
    start_difference: int
    peak_measured: int
    peak_difference: int
    end_measured: int
    end_difference: int
    worst_percent: str
    verdict: str  # one of VERDICTS
    reason: str


def versions() -> dict[str, str]:
    """Versions of the libraries that decide what a step takes."""
    import peft
    import torch
    import transformers

    return {
        "torch": torch.__version__.partition("+")[0],
        "transformers": transformers.__version__,
        "peft": peft.__version__,
    }


def read_measured() -> dict[str, MeasuredRow]:
    """The committed truth by case; empty where there is none yet."""
    if not MEASURED.exists():
        return {}
    with MEASURED.open(newline="", encoding="utf-8") as file:
        rows = [
            MeasuredRow(**{f.name: int(row[f.name]) if f.type == "int" else row[f.name] for f in fields(MeasuredRow)})
            for row in csv.DictReader(file)
        ]
    return {row.case: row for row in rows}


def write(path: Path, rows: Iterable[MeasuredRow] | Iterable[Row]) -> None:
    """Rows sorted by case, with a header."""
    listed = sorted(rows, key=lambda row: row.case)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [f.name for f in fields(listed[0])], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in listed)


def compare(case: Case, truth: MeasuredRow, predicted: Figures) -> Row:
    """One row of results.csv."""
    if predicted.error:
        return Row(
            case.name,
            case.batch,
            case.seq,
            truth.at_start,
            0,
            truth.peak,
            0,
            truth.at_end,
            0,
            "",
            "no prediction",
            predicted.error,
        )
    pairs = ((predicted.at_start, truth.at_start), (predicted.peak, truth.peak), (predicted.at_end, truth.at_end))
    differences = [p - m for p, m in pairs]
    worst = max(abs(d) for d in differences)
    percent = max(100 * abs(p - m) / m for p, m in pairs)
    verdict = "exact" if worst == 0 else "within 1 KiB" if worst <= TOLERANCE else "beyond 1 KiB"
    start, peak, end = differences
    reason = reason_of(case) if worst > TOLERANCE else ""
    return Row(
        case.name,
        case.batch,
        case.seq,
        truth.at_start,
        start,
        truth.peak,
        peak,
        truth.at_end,
        end,
        f"{percent:.4f}",
        verdict,
        reason,
    )


def summary(rows: Mapping[str, Row]) -> str:
    """How many cases are exact, close, beyond; the largest error, of those with a routing of their own apart."""
    count = {verdict: sum(row.verdict == verdict for row in rows.values()) for verdict in VERDICTS}
    close = count["exact"] + count["within 1 KiB"]
    lines = [
        f"{len(rows)} cases: " + ", ".join(f"{number} {verdict}" for verdict, number in count.items() if number),
        f"within 1 KiB: {100 * close / len(rows):.1f} %",
    ]
    for title, routed in (("largest error", False), ("largest error under data-dependent routing", True)):
        found = [row for row in rows.values() if row.worst_percent and (row.reason == DATA_DEPENDENT) is routed]
        if found:
            worst = max(found, key=lambda row: (float(row.worst_percent), row.case))
            lines.append(f"{title}: {worst.worst_percent} % ({worst.case})")
    unnamed = [row.case for row in rows.values() if row.verdict not in VERDICTS[:2] and not row.reason]
    if unnamed:
        lines.append(f"beyond 1 KiB without a named reason: {', '.join(unnamed)}")
    return "\n".join(lines)
