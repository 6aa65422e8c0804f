"""`memir gpus [WORD]`: the GPUs that `--gpu` knows, with their memory, rates and sources."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from memir.cli.options import listing_options, write
from memir.errors import EXIT_NO, EXIT_OK

if TYPE_CHECKING:
    from memir.hardware import Card

SCHEMA_VERSION = 1
HEAD = ("gpu", "GiB", "printed", "sm", "SMs", "bf16", "fp16", "fp8", "tf32", "fp32", "memory", "NVLink", "PCIe")
ABOVE = ("", "memory", "", "", "", "TFLOP/s", "", "", "", "", "GB/s", "", "")
FOOT = """
GiB: what the CUDA driver reports, and what is printed on the box. TFLOP/s: dense, 16 bits with sums
in fp32. GB/s are 10^9 bytes a second; links in both directions together. --format json: sources."""


@click.command("gpus")
@listing_options("json adds other names and sources.")
def command(word: str, form: str, output: Path | None) -> int:
    """List the GPUs whose name contains WORD (all without it).

    A name in the first column, or another one that it goes by, is what --gpu takes: `a100-80gb`, `rtx-4090`, `h100`.

    Exit code 1 when none matches.
    """
    from memir.hardware import cards, find_card

    exact = find_card(word)
    wanted = word.strip().lower()
    found = [card for card in cards() if any(wanted in name.lower() for name in (card.key, card.name, *card.aliases))]
    if exact is not None and exact not in found:
        found.append(exact)
    if not found:
        click.echo(f"no GPU matches {word!r}\n  memir gpus  lists them all", err=True)
        return EXIT_NO
    write(_json(found) if form == "json" else _table(found), output)
    return EXIT_OK


def _table(found: list[Card]) -> str:
    rows = [ABOVE, HEAD, *(_row(card) for card in found)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
    lines = []
    for row in rows:
        cells = [f"{row[0]:<{widths[0]}}", *(f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines) + "\n" + FOOT


def _row(card: Card) -> tuple[str, ...]:
    rates = (card.bf16, card.fp16, card.fp8, card.tf32, card.fp32)
    links = (card.bandwidth, card.nvlink, card.pcie)
    return (
        card.key,
        f"{card.capacity / 2**30:.2f}",
        f"{card.nominal // 2**30}",
        card.compute,
        str(card.sms),
        *("-" if rate is None else f"{rate / 1e12:.4g}" for rate in rates),
        *("-" if rate is None else f"{rate / 1e9:.4g}" for rate in links),
    )


def _json(found: list[Card]) -> str:
    """Bytes, FLOP/s and bytes/s; null where a card does not have it."""
    records = [
        {
            "key": card.key,
            "name": card.name,
            "aliases": list(card.aliases),
            "capacity_bytes": card.capacity,
            "capacity_source": card.capacity_source,
            "nominal_bytes": card.nominal,
            "compute_capability": card.compute,
            "sms": card.sms,
            "flops": {"fp32": card.fp32, "tf32": card.tf32, "fp16": card.fp16, "bf16": card.bf16, "fp8": card.fp8},
            "bandwidth": {"memory": card.bandwidth, "nvlink": card.nvlink, "pcie": card.pcie},
            "source": card.source,
        }
        for card in found
    ]
    return json.dumps({"schema_version": SCHEMA_VERSION, "gpus": records}, indent=2)
