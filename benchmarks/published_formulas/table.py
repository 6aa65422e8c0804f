"""Results as a page (results.md) and as data (results.csv)."""

from __future__ import annotations

import csv
import importlib.metadata
import io
from collections.abc import Sequence

from benchmarks.published_formulas.cases import LEFT_OUT
from benchmarks.published_formulas.derive import Result
from memir.derivation.step import ORDER
from memir.derivation.write_text import origins
from memir.ir.symbolic import formula_text

COMMAND = "python -m benchmarks.published_formulas"
COLUMNS = ("name", "source", "published", "derived", "difference", "accounted_for", "verified_at")


def csv_text(results: Sequence[Result]) -> str:
    """One line a formula."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for result in results:
        case = result.case
        texts = (formula_text(result.derived, (*ORDER, "t")), formula_text(result.difference, (*ORDER, "t")))
        writer.writerow((case.name, case.source, case.published, *texts, result.is_accounted_for, result.verified_at))
    return out.getvalue()


def markdown(results: Sequence[Result]) -> str:
    """Each formula, what the code gives, the difference and its account, and which tensors make each term."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("memir", "torch", "transformers"))
    lines = ["# Published memory formulas, derived from code", "", f"`{COMMAND}` wrote this page, with {versions}.", ""]
    lines += ["| formula | published | derived - published |", "|---|---|---|"]
    for result in results:
        lines.append(
            f"| {result.case.name} | `{result.case.published.replace('^', '**')}` | `{_text(result.difference)}`"
            f"{'' if result.is_accounted_for else ' **not accounted for**'} |"
        )
    for result in results:
        lines += ["", *_section(result)]
    lines += ["", "## Not derived yet", ""]
    lines += [f"- {formula}: {reason}." for formula, reason in LEFT_OUT]
    return "\n".join(lines) + "\n"


def _text(size: object) -> str:
    return formula_text(size, (*ORDER, "t"))  # type: ignore[arg-type]


def _section(result: Result) -> list[str]:
    case = result.case
    recipe = f"{case.recipe.dtype}, amp {case.recipe.amp}, checkpoint {case.recipe.checkpoint}"
    sets = "".join(f" --set {name}={value}" for name, value in case.sets)
    lines = [f"## {case.name[0].upper()}{case.name[1:]}", "", f"{case.source}.", ""]
    lines += [f"Published `{case.published.replace('^', '**')}`, derived `{_text(result.derived)}`", ""]
    rewritten = f", rewritten by `{case.parallel}`" if case.parallel else ""
    lines += [
        f"from `{case.target}{sets}` ({recipe}){rewritten}, `--of {case.of}`; a fresh trace at {result.verified_at}",
        f"is the same to the byte{', before it is rewritten' if case.parallel else ''}.",
        "",
    ]
    lines += [f"{case.note}", ""] if case.note else []
    if case.replaced:
        lines += ["Written with " + ", ".join(f"`{s} = {text.replace('^', '**')}`" for s, text in case.replaced) + ".", ""]
    lines += [f"- `{text.replace('^', '**')}`: {account}." for text, account in case.differences] or ["- no difference."]
    lines += ["", "| term | made of |", "|---|---|"]
    for term in result.terms:
        made = "<br>".join(origin.replace("*", "\\*") for origin in origins(term))
        lines.append(f"| `{_text(term.size)}` | {made} |")
    return lines
