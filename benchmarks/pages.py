"""What benchmarks share whose rows are predicted one after the other and kept as results.csv and results.md."""

from __future__ import annotations

import argparse
import csv
import io
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


class Named(Protocol):
    """A case that is predicted."""

    @property
    def name(self) -> str: ...


C = TypeVar("C", bound=Named)
R = TypeVar("R", bound="DataclassInstance")
_READ: dict[str, Callable[[str], Any]] = {"str": str, "int": int, "float": float, "bool": lambda text: text == "True"}


def csv_text(kind: type[R], rows: Iterable[R]) -> str:
    """A line a row, under the names of the dataclass's fields."""
    out = io.StringIO()
    writer = csv.DictWriter(out, [f.name for f in fields(kind)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in rows)
    return out.getvalue()


def from_csv(kind: type[R], text: str) -> list[R]:
    """The rows that `csv_text` wrote; fields are str, int, float and bool."""
    read = {f.name: _READ[str(f.type)] for f in fields(kind)}
    return [kind(**{name: read[name](value) for name, value in row.items()}) for row in csv.DictReader(io.StringIO(text))]


def main(
    module: str,
    doc: str | None,
    cases: Sequence[C],
    predict: Callable[[C], Iterable[R]],
    to_csv: Callable[[Sequence[R]], str],
    to_page: Callable[[Sequence[R]], str],
    folder: Path,
) -> int:
    """The command: the page on stdout, each case as it is predicted on stderr; `--save` writes both files into `folder`."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=doc)
    parser.add_argument("--save", action="store_true", help="write results.csv and results.md")
    options = parser.parse_args()
    rows: list[R] = []
    for case in cases:
        print(f"  {case.name}", file=sys.stderr, flush=True)
        rows += predict(case)
    print(to_page(rows), end="")
    if options.save:
        (folder / "results.csv").write_text(to_csv(rows))
        (folder / "results.md").write_text(to_page(rows))
    return 0
