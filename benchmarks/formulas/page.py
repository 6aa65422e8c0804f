"""`python -m benchmarks.formulas.page`: writes docs/model-formulas.md, six models' formulas side by side."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

from memir.api import wide_step
from memir.derivation.derive import Derivation
from memir.derivation.layout import Product, conditions, plain_style, products, size_text
from memir.derivation.step import MEANINGS, ORDER, Shown, shown
from memir.ir.size import Monomial, Size

MODELS = ("gpt2", "llama-3.1-8b", "qwen3-8b", "gemma-2-2b", "pythia-1.4b", "falcon-7b")
QUANTITIES = ("parameters", "states", "layer", "activations", "logits")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "model-formulas.md"


def page() -> str:
    """The page."""
    steps = {name: shown(wide_step(name)) for name in MODELS}
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("memir", "torch", "transformers"))
    lines = ["# Six models' memory formulas", ""]
    lines += [f"`python -m benchmarks.formulas.page` wrote this page, with {versions}."]
    lines += ["[formulas.md](formulas.md) says how formulas are derived."]
    lines += [
        "bf16, AdamW (foreach), CUDA (compute capability 8.0), no recomputation. Bytes, but for parameters, which are counted.",
        "",
    ]
    symbols = [symbol for symbol in ORDER if any(symbol in over.env for over in steps.values())]
    lines += ["| symbol | meaning | " + " | ".join(MODELS) + " |", "|---|---|" + "---:|" * len(MODELS)]
    for symbol in symbols:
        if symbol not in ("B", "S"):
            values = [f"{over.env[symbol]:,}" if symbol in over.env else "" for over in steps.values()]
            lines.append(f"| {symbol} | {MEANINGS[symbol]} | " + " | ".join(values) + " |")
    for name in QUANTITIES:
        lines += ["", *side_by_side(name, steps)]
    lines += ["", "## Peak", "", "The piece that is the peak at long sequences, and the one at short ones.", ""]
    for model, over in steps.items():
        quantity = Derivation(over).quantity("peak")
        lines += [f"**{model}**, valid for {', '.join(f'`{text}`' for text in conditions(quantity.domain))}", ""]
        for part in reversed(quantity.parts):
            where = f"{part.place.phase}, `{part.place.opcode}`" if part.place else ""
            lines += [
                "```",
                size_text(part.size, over.env, plain_style()),
                "```",
                "",
                f"{where}; {part.words}".rstrip("; "),
                "",
            ]
    return "\n".join(lines).rstrip() + "\n"


def side_by_side(name: str, steps: dict[str, Shown]) -> list[str]:
    """A row for each product of symbols, a column for each model."""
    elements = name == "parameters"
    quantities = {model: Derivation(over, elements=elements).quantity(name) for model, over in steps.items()}
    columns: dict[str, dict[Monomial, str]] = {}
    for model, quantity in quantities.items():
        column = {}
        for product in products(quantity.parts[-1].size, steps[model].env):
            column[product.monomial] = size_text(Product(product.layers, ()).size, steps[model].env, plain_style())
        columns[model] = column
    rows = list(dict.fromkeys(monomial for column in columns.values() for monomial in column))
    title = next(iter(quantities.values())).title
    lines = [f"## {name[0].upper()}{name[1:]}", "", f"{title[0].upper()}{title[1:]}.", ""]
    notes = [f"{model}: {quantity.note}." for model, quantity in quantities.items() if quantity.note]
    lines += [*notes, ""] if notes else []
    lines += ["| times | " + " | ".join(MODELS) + " |", "|---|" + "---:|" * len(MODELS)]
    for monomial in rows:
        factor = Size(((monomial, 1),))
        text = size_text(factor, dict.fromkeys(factor.symbols(), 1), plain_style())
        cells = [f"`{column[monomial]}`" if monomial in column else "" for column in columns.values()]
        lines.append(f"| `{text}` | " + " | ".join(cells) + " |")
    return lines


def main() -> int:
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
