"""A quantity as text for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from memir.analysis.words import Unit, shortened
from memir.derivation.bounds import CUT, DEPTH, without_cut
from memir.derivation.derive import Part, Quantity
from memir.derivation.layout import conditions, plain_style, size_text
from memir.derivation.step import Shown
from memir.derivation.terms import Term
from memir.ir.size import Size

WIDTH = 118
MAXIMUM = (
    "maximum: over every point that is the largest for some B and S at the model's own widths and depth; at other widths "
    "others may be, and --format python has them all"
)
ORIGINS = 4  # that a term lists


def to_text(shown: Shown, quantities: Sequence[Quantity], unit: str) -> str:
    """All quantities, the symbols once."""
    lines = [heading(shown), ""]
    for quantity in quantities:
        lines += [*_quantity(quantity.shown, quantity, unit), ""]
    if any(len(quantity.parts) > 1 for quantity in quantities) and shown.widths:
        text = MAXIMUM if quantities[0].cuts is None else MAXIMUM.replace("B and S", "B, S and c")
        lines += textwrap.wrap(text, WIDTH, subsequent_indent="  ")
    return "\n".join([*lines, *legend(shown, common_domain(quantities))]) + "\n"


def heading(shown: Shown) -> str:
    """`llama-3.1-8b (modeling_llama.py:474)   bf16, adamw, cuda`."""
    recipe = dict(shown.step.recipe)
    options = [str(recipe[name]) for name in ("target", "dtype", "optimizer", "attention") if name in recipe]
    if recipe.get("checkpoint") == "full":
        options.append("checkpoint full")
    if recipe.get("lora"):
        options.append(f"lora {recipe['lora']}")
    options += [str(recipe[name]) for name in ("frozen", "parallel") if name in recipe]
    return f"{shown.step.name} ({shown.step.source})   {', '.join(options)}"


def title_of(quantity: Quantity) -> str:
    """What the quantity is, and for which cuts."""
    return quantity.title if quantity.cuts is None else f"{quantity.title}, where {quantity.cuts.words()}"


def common_domain(quantities: Sequence[Quantity]) -> list[str]:
    """The conditions of all quantities, without those on the cut, which each says itself; of lower bounds the largest."""
    texts = list(dict.fromkeys(text for quantity in quantities for text in quantity.domain))
    if all(quantity.cuts is None for quantity in quantities):
        return texts
    texts = without_cut(texts)
    least: dict[str, int] = {}
    for text in texts:
        name, sign, number = [*text.split(" "), "", ""][:3]
        if sign == ">=" and number.isdigit():
            least[name] = max(least.get(name, 0), int(number))
    bounds = {f"{name} >= {number}" for name, number in least.items()}
    return [text for text in texts if not (text.partition(" >= ")[2].isdigit() and text not in bounds)]


def at_text(shown: Shown) -> str:
    """`B=2, S=2048, L=32, h=4096`."""
    return ", ".join(f"{name}={value}" for name, value in shown.env.items())


def place_text(part: Part) -> str:
    """`backward at aten._log_softmax_backward_data (loss_utils.py:42)`; what the number is a sum of has no place."""
    place = part.place
    if place is None:
        return ""
    if not place.opcode:
        return "between two steps"
    where = ", ".join(filter(None, (place.path, place.source)))
    return f"{place.phase} at {place.opcode}" + (f" ({where})" if where else "")


def value_text(shown: Shown, name: str, value: int) -> str:
    """The target's value of a symbol; of a cut that is a symbol, all of them."""
    return f"0 to {DEPTH}" if name == CUT and shown.step.cuts is not None else str(value)


def when_text(part: Part) -> str:
    """Where the part is the quantity, in words, or a point where it is."""
    if part.words:
        return f"where {part.words}"
    return f"for example at {part.example}" if part.example else "perhaps somewhere"


def _quantity(shown: Shown, quantity: Quantity, unit: str) -> list[str]:
    style = plain_style()
    scale = Unit.of(quantity.value)
    value = scale.text(quantity.value) if unit == "bytes" else f"{quantity.value:,} {unit}"
    lines = [f"{quantity.name}: {title_of(quantity)}, in {unit}   ({value} at {at_text(shown)})"]
    lines += [f"  {quantity.note}"] if quantity.note else []
    several = len(quantity.parts) > 1
    if several:
        names = ", ".join(f"M{number}" for number in range(1, len(quantity.parts) + 1))
        lines.append(f"  {quantity.name} = max({names})")
    for number, part in enumerate(quantity.parts, 1):
        name = f"M{number}" if several else quantity.name
        text = f"{name} = {size_text(part.size, shown.point, style)}"
        lines += ["", *textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="      ", break_long_words=False)]
        where = place_text(part)
        lines += [f"    {where}{f', the peak {when_text(part)}' if several else ''}"] if where else []
        lines += [f"    {line}" for line in _table(part, shown)]
    return lines


def _table(part: Part, shown: Shown) -> list[str]:
    style = plain_style()
    scale = Unit.of(part.size.evaluate(shown.point))
    rows = []
    for term in part.terms:
        name = size_text(term.size, shown.point, style)
        rows.append((name, scale.number(term.size.evaluate(shown.point)), origins(term)))
    width = max((len(name) for name, _, _ in rows), default=0)
    head = f"{'term'.ljust(width)}  {scale.name:>8}  made of"
    return [
        head,
        *(f"{name.ljust(width)}  {number:>8}  {shortened_origins(made, WIDTH - width)}" for name, number, made in rows),
    ]


def origins(term: Term) -> list[str]:
    """`16 layers.*.mlp: mul`, the largest first; coefficients of the term's monomial."""
    merged: dict[str, int] = {}
    for part in term.parts:
        merged[part.row.origin] = merged.get(part.row.origin, 0) + part.coefficient
    items = sorted(((c, name) for name, c in merged.items() if c), key=lambda item: (-abs(item[0]), item[1]))
    return [f"{c} {name}" for c, name in items]


def shortened_origins(made: Sequence[str], width: int) -> str:
    """The first origins, and how many more there are."""
    rest = len(made) - ORIGINS
    text = "; ".join(made[:ORIGINS]) + (f"; {rest} more" if rest > 0 else "")
    return (
        text
        if len(text) <= max(width, 40)
        else "; ".join(shortened(one, 34) for one in made[:ORIGINS]) + (f"; {rest} more" if rest > 0 else "")
    )


def legend(shown: Shown, domain: Sequence[str]) -> list[str]:
    """Symbols, validity, what stayed a number, where it was traced and verified."""
    step = shown.step
    lines = [
        "symbols: "
        + ", ".join(
            f"{name} {shown.meanings.get(name, '')} ({value_text(shown, name, value)})" for name, value in shown.env.items()
        )
    ]
    lines += [f"{symbol} = {text}" for symbol, text in shown.ties]
    lines.append("valid for: " + ", ".join(conditions(domain)))
    fixed = [f"{name}={value}" for name, value in shown.fixed.items() if name in ("B", "S") or _matters(shown, name)]
    lines += [f"numbers: {', '.join(fixed)}"] if fixed else []
    lines += [f"stays a number: {reason}" for reason in step.numbers]
    verified = "; ".join(", ".join(f"{n}={v}" for n, v in point.items()) for point in step.verified_at)
    lines.append(f"traced at {1 + len(step.traced_at)} sets of widths; a fresh trace at {verified} is the same to the byte")
    lines += [f"assumed: {text}" for text in step.assumptions]
    lines.append("versions: " + ", ".join(f"{name} {version}" for name, version in step.versions))
    return [line for text in lines for line in textwrap.wrap(text, WIDTH, subsequent_indent="  ")]


def _matters(shown: Shown, name: str) -> bool:
    """Whether a size of the step has the symbol."""
    over = dict(shown.step.symbols).get(name, Size.of(name)).symbols()
    return any(over & storage.nbytes.symbols() for storage in shown.step.program.storages)
