"""A sweep for people: B down and S across where it is one recipe and fits the width, else a line a cell; the largest sizes.

B \\ S     512     1024
    1    1.16a    1.78b
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from memir.analysis.peak import Place
from memir.analysis.words import Unit, option, plural, shortened, shortened_end, wrapped
from memir.sweep.grid import Numbers
from memir.sweep.run import Table
from memir.sweep.tables import options_of, varying

WIDTH = 100
LETTERS = "abcdefghijklmnopqrstuvwxyz"
MARKS = LETTERS + "*?"
HEADLINE = ("target", "dtype", "optimizer")  # options that stand in the first line


def to_text(table: Table) -> str:
    """The screen, ending in a newline."""
    lines = _largest(table) if table.largest else _grid(table) or _long(table)
    return "\n".join(line.rstrip() for line in [*lines, *_notes(table)]) + "\n"


def _title(table: Table, what: str) -> str:
    options = [options_of(variant.recipe) for variant in table.variants]
    same = [str(options[0][name]) for name in HEADLINE if name not in varying(table.variants)]
    return f"{table.name or 'memory program'}   {what}   {', '.join(same)}"


def _grid(table: Table) -> list[str]:
    """B down, S across, a letter for the place of the peak; nothing where it is not one recipe, or is too wide."""
    batches, seqs = sorted({row.batch for row in table.rows}), sorted({row.seq for row in table.rows})
    places = _places(row.numbers for row in table.rows)
    if len(table.variants) > 1 or len(places) > len(LETTERS) or len(seqs) < 2:
        return []
    unit = _unit(row.numbers for row in table.rows)
    letters = {place: LETTERS[k] if len(places) > 1 else "" for k, place in enumerate(places)}
    texts: dict[tuple[int, int], str] = {}
    for row in table.rows:
        text = "?"
        if row.numbers is not None:
            marks = letters[_spot(row.numbers)] + ("*" if row.fits is False else "") + ("?" if row.reason else "")
            text = unit.number(row.numbers.requested) + marks
        texts[row.batch, row.seq] = text
    lines = [["B \\ S", *map(str, seqs)]] + [[str(b), *(texts[b, s] for s in seqs)] for b in batches]
    drawn = _columns(lines, lambda column: True)
    if max(map(len, drawn)) > WIDTH:
        return []
    return [_title(table, f"{unit.name} at the peak"), "", *drawn, "", *_legend(places, letters), *_reasons(table)]


def _long(table: Table) -> list[str]:
    """A line a cell."""
    unit = _unit(row.numbers for row in table.rows)
    names = varying(table.variants)
    lines = [[*(name.replace("_", "-") for name in names), "B", "S", "peak", "allocated", "between steps", "where"]]
    for row in table.rows:
        options = options_of(table.variants[row.variant].recipe)
        found = row.numbers
        if found is None:
            numbers, where = ["?", "", ""], f"not known: {row.reason}"
        else:
            marks = ("*" if row.fits is False else "") + ("?" if row.reason else "")
            numbers = [unit.number(found.requested) + marks, unit.number(found.allocated), unit.number(found.steady_requested)]
            where = _place_text(found.place) + (f"   not proven: {row.reason}" if row.reason else "")
        lines.append([*(option(options[name]) for name in names), str(row.batch), str(row.seq), *numbers, where])
    first = len(names)
    return [_title(table, unit.name), "", *_columns(lines, lambda column: first <= column < first + 5)]


def _largest(table: Table) -> list[str]:
    """A line for each size of the other symbol: the largest that fits, the next one, and what ends it."""
    symbol = table.largest[0].symbol
    unit = _unit(numbers for row in table.largest for numbers in (row.numbers, row.over))
    names = varying(table.variants)
    other = "S" if symbol == "B" else "B"
    lines = [
        [*(name.replace("_", "-") for name in names), other, f"largest {symbol}", unit.name, "next", unit.name, "ended by"]
    ]
    formulas: dict[str, None] = {}
    for row in table.largest:
        options = options_of(table.variants[row.variant].recipe)
        value = ("" if row.reason else "none") if row.value is None else str(row.value)
        value += "?" if row.reason else ""
        own = "" if row.numbers is None else unit.number(row.numbers.allocated)
        over = ("", "") if row.over is None else (str(row.over_at), unit.number(row.over.allocated))
        ended = row.limit or row.reason
        if row.over is not None:
            ended = _place_text(row.over.place)
            formulas[f"{row.formula}   {ended}"] = None
        lines.append([*(option(options[name]) for name in names), str(row.at), value, own, *over, ended])
    first = len(names)
    what = {"B": "the largest batch", "S": "the longest sequence"}[symbol]
    gpu = table.gpu.name if table.gpu is not None else ""
    drawn = _columns(lines, lambda column: first <= column < first + 5)
    pieces = [shortened_end(f"  peak = {text}", WIDTH) for text in formulas]
    return [_title(table, f"{what} that fits {gpu} (allocated bytes)"), "", *drawn, "", *pieces]


def _notes(table: Table) -> list[str]:
    """What the marks mean, what the variants share, and what was assumed."""
    lines = []
    gpu = table.gpu.name if table.gpu is not None else ""
    if any(row.fits is False for row in table.rows):
        lines.append(f"  * does not fit {gpu} (allocated bytes)")
    elif table.rows and gpu:
        lines.append(f"  every cell fits {gpu} (allocated bytes)" if table.is_proven else "")
    options = options_of(table.variants[0].recipe)
    different = varying(table.variants)
    same = ", ".join(f"{name.replace('_', '-')} {option(value)}" for name, value in options.items() if name not in different)
    assumptions = dict.fromkeys(text for variant in table.variants for text in variant.assumptions)
    return [*filter(None, lines), *wrapped("recipe: ", same, WIDTH, 3), *wrapped("assumed: ", "; ".join(assumptions), WIDTH, 3)]


def _legend(places: dict[Place, int], letters: dict[Place, str]) -> list[str]:
    lines = []
    for place, count in places.items():
        mark = f"{letters[place]}  " if letters[place] else "peak "
        lines.append(shortened_end(f"  {mark}{_place_text(place)}   ({plural(count, 'cell')})", WIDTH))
    return lines


def _reasons(table: Table) -> list[str]:
    """Why cells are not known or not proven, each reason once."""
    counted = Counter(row.reason for row in table.rows if row.reason)
    return [line for reason, count in counted.items() for line in wrapped(f"? {plural(count, 'cell')}: ", reason, WIDTH, 3)]


def _places(numbers: Iterable[Numbers | None]) -> dict[Place, int]:
    """Where the peaks are, in the order met, and how many are there."""
    found: dict[Place, int] = {}
    for each in numbers:
        if each is not None:
            found[_spot(each)] = found.get(_spot(each), 0) + 1
    return found


def _spot(numbers: Numbers) -> Place:
    """The place without its number, which differs from program to program."""
    return replace(numbers.place, index=0)


def _place_text(place: Place) -> str:
    if not place.opcode:
        return "at the start of the step"
    module = f" @{shortened(place.path, 30)}" if place.path else ""
    return f"{place.phase} {place.opcode}{module}" + (f" ({shortened(place.source, 30)})" if place.source else "")


def _unit(numbers: Iterable[Numbers | None]) -> Unit:
    return Unit.of(max((each.requested for each in numbers if each is not None), default=0))


def _columns(lines: Sequence[Sequence[str]], is_right: Callable[[int], bool]) -> list[str]:
    """The lines with their columns aligned: right ones by their numbers, with room for marks behind them."""
    cells = [
        [(text.rstrip(MARKS) or text, text) if is_right(k) else (text, text) for k, text in enumerate(line)] for line in lines
    ]
    drawn = [""] * len(lines)
    for k in range(len(lines[0])):
        width = max(len(line[k][0]) for line in cells)
        marks = max(len(line[k][1]) - len(line[k][0]) for line in cells)
        for number, line in enumerate(cells):
            core, text = line[k]
            aligned = f"{core:>{width}}{text[len(core) :]:{marks}}" if is_right(k) else f"{text:{width}}"
            drawn[number] += f"  {aligned}"
    return drawn
