"""The cells as data and as a page, and the figures that sum them up."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks import pages
from benchmarks.llmem_table3.facts import CARD, COLUMNS, FACTS, MIB, RECIPES, Fact
from benchmarks.llmem_table3.predict import Cell, choice, column, order

GIB = 2**30
TEXT = """# LLMem's choice of a method on four V100-16GB beside memir's

`python -m benchmarks.llmem_table3 --save` wrote this page. LLMem (arXiv 2404.10933), Table 3: seconds of fine-tuning,
sequences of 512, every layer checkpointed, fp16 with an fp32 copy and fp32 Adam, gradients in the parameters' place
(facts.py). memir: the step traced and split as tensor parallelism splits it, parameters and states as the recipe holds
them, the largest batch that fits 16384 MiB, and sequences per second by the cost model over NVLink. Nothing is tuned to
the table.

`llmem-cdp`: 14 bytes a parameter on every GPU. `llmem-adp`: 2 on every GPU, 12 divided by four. `llmem-dptp`: two copies of two
ranks, 2 bytes divided by two and 12 by four. `llmem-tp`: 14 divided by four. 4DP is the better of the first two.
"""


def of(fact: Fact, cells: Sequence[Cell]) -> list[Cell]:
    """A model's cells."""
    return [cell for cell in cells if cell.model == fact.name]


def right_choices(cells: Sequence[Cell]) -> int:
    """Models for which memir chooses what the paper did."""
    return sum(choice(of(fact, cells)) == fact.chosen for fact in FACTS)


def ordered_pairs(cells: Sequence[Cell]) -> tuple[int, int]:
    """(pairs in the measured order, pairs), of methods that ran, within a model."""
    found = [order(fact, of(fact, cells)) for fact in FACTS]
    return sum(right for right, _ in found), sum(pairs for _, pairs in found)


def called_out_of_memory(cells: Sequence[Cell]) -> list[str]:
    """Methods that ran in the paper and of which memir says that they do not fit."""
    return [
        f"{fact.name} {name}"
        for fact in FACTS
        for name, seconds in zip(COLUMNS, fact.seconds, strict=True)
        if seconds is not None and not column(of(fact, cells), name)
    ]


def said_to_fit(cells: Sequence[Cell]) -> list[tuple[Fact, Cell]]:
    """Cells that the paper prints as out of memory and that fit by memir, each with its best recipe."""
    found = []
    for fact in FACTS:
        for name, seconds in zip(COLUMNS, fact.seconds, strict=True):
            recipes = [r.name for r in RECIPES if r.column == name]
            fitting = [cell for cell in of(fact, cells) if cell.recipe in recipes and cell.batch]
            if seconds is None and fitting:
                found.append((fact, max(fitting, key=lambda cell: cell.samples)))
    return found


def csv_text(cells: Sequence[Cell]) -> str:
    """One line a cell; bytes."""
    return pages.csv_text(Cell, cells)


def from_csv(text: str) -> list[Cell]:
    """The cells that `csv_text` wrote."""
    return pages.from_csv(Cell, text)


def markdown(cells: Sequence[Cell]) -> str:
    """The page."""
    lines = [TEXT, "| model | paper | memir | " + " | ".join(f"{c}: s measured, samples/s" for c in COLUMNS) + " | order |"]
    lines.append("|---|---|---|---|---|---|---|")
    for fact in FACTS:
        own = of(fact, cells)
        mine = choice(own)
        shown = f"**{mine}**" if mine != fact.chosen else mine
        columns = []
        for name, seconds in zip(COLUMNS, fact.seconds, strict=True):
            speed = column(own, name)
            columns.append(f"{'OOM' if seconds is None else f'{seconds:,}'}, {f'{speed:.1f}' if speed else 'does not fit'}")
        right, pairs = order(fact, own)
        lines.append(f"| {fact.name} | {fact.chosen} | {shown} | {' | '.join(columns)} | {right} of {pairs} |")
    right, pairs = ordered_pairs(cells)
    lines += [
        "",
        f"Choices as in the paper: {right_choices(cells)} of {len(FACTS)}. Pairs in the measured order: {right} of {pairs}.",
    ]
    lost = called_out_of_memory(cells)
    lines.append(f"Methods that ran in the paper and that memir says do not fit: {', '.join(lost) or 'none'}.")
    lines += ["", "## Cells that the paper prints as out of memory and that fit by memir", ""]
    lines.append("GiB of a rank at memir's largest batch, the same for both sums; last, the paper's equation for one sequence.")
    lines += [
        "",
        "| cell | batch | parameters, states | step | backward | context, cuBLAS | memir | paper's equation | card | of one |",
    ]
    lines.append("|---|" + "---:|" * 9)
    for fact, cell in said_to_fit(cells):
        sizes = (cell.static, cell.step, cell.backward, cell.beside, cell.total, cell.paper, CARD * MIB, cell.paper_one)
        numbers = " | ".join(f"{size / GIB:.2f}" for size in sizes)
        lines.append(f"| {fact.name} {cell.recipe} | {cell.batch} | {numbers} |")
    lines += ["", NOTES.rstrip(), "", "## All cells", ""]
    lines.append(
        "| cell | batch | parameters and states | step | of it 3 logits | backward | memir | paper's equation | samples/s |"
    )
    lines.append("|---|" + "---:|" * 8)
    for cell in cells:
        sizes = (cell.static, cell.step, cell.logits, cell.backward, cell.total, cell.paper)
        numbers = " | ".join(f"{size / GIB:.2f}" for size in sizes)
        speed = f"{cell.samples:.1f}" if cell.batch else "does not fit"
        lines.append(f"| {cell.model} {cell.recipe} | {cell.batch or '-'} | {numbers} | {speed} |")
    return "\n".join(lines) + "\n"


NOTES = """
The paper's equation: parameters and states as the recipe holds them, a hidden state for each layer, three times the logits, the
head's weights, m_back, and here memir's CUDA context for its m_base. By it, too, one sequence fits in each of these cells (last
column), so what made them fail is in neither sum. memir says that they fit, and takes one where it is the fastest: that is
behind every choice above that is not the paper's. Without these cells bloom-3b would get 4TP, and OPT-2.7b and codegen-2B
2DP+2TP.

What can be said of these cells: LLMem's released scripts (taehokim20/LLMem, dp_real.py and tp_real.py) load the whole model in
fp32 on every GPU, halve it and only then divide it, four bytes a parameter at the start: 9.9, 11.2 and 10.4 GiB, which fit. The
unused ends of Gemini's chunks, by its own search, are 0.10 GiB of OPT-2.7b and less of the others
(`python -m benchmarks.llmem_table3.chunks`). Fragmentation and NCCL are left; no bytes of these runs are published.

Both pairs that are out of order are of OPT-2.7b and codegen-2B: two copies of two ranks were measured slower than four ranks
(codegen: by 1 %) and are predicted faster, since their all-reduces go over two ranks and not four. Whatever holds memory there
beyond these sums also makes batches smaller, and gathering and reducing all parameters is once for each batch.
"""
