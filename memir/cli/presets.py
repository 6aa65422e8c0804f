"""`memir presets [WORD]`: the known models and their published parameter counts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import click

from memir.cli.options import listing_options, write
from memir.errors import EXIT_NO, EXIT_OK

if TYPE_CHECKING:
    from memir.frontend.presets import Preset

SCHEMA_VERSION = 1


@click.command("presets")
@listing_options("json adds each configuration.")
def command(word: str, form: str, output: Path | None) -> int:
    """List the known models whose name, Hugging Face id or model type contains WORD (all without it).

    A name in the first column is a TARGET for every other command. The parameter counts are the published ones: "~" marks a
    figure that its publisher rounded; the others are exact, and a tied matrix counts once.

    Exit code 1 when no model matches.
    """
    from memir.frontend import presets

    found = sorted(presets.search(word), key=_order)
    if not found:
        close = presets.nearest(word)
        hint = f"nearest: {', '.join(close)}" if close else "memir presets  lists them all"
        click.echo(f"no preset matches {word!r}\n  {hint}", err=True)
        return EXIT_NO
    write(_json(found) if form == "json" else _table(found), output)
    return EXIT_OK


def _order(preset: Preset) -> tuple[str, int, str]:
    """Families alphabetically, and within one the small model first: pythia-160m before pythia-1b."""
    return re.sub(r"-?\d+(\.\d+)?[mb](?![a-z]).*", "", preset.name), preset.params, preset.name


def _count(preset: Preset) -> str:
    """8,030,261,248 for an exact figure; ~15.5B for a rounded one, with the digits that were published."""
    if preset.digits is None:
        return f"{preset.params:,}"
    scale, unit = (10**9, "B") if preset.params >= 10**9 else (10**6, "M")
    decimals = max(preset.digits - len(str(preset.params // scale)), 0)
    return f"~{preset.params / scale:.{decimals}f}{unit}"


def _table(found: list[Preset]) -> str:
    rows = [("name", "parameters", "model type", "Hugging Face id")]
    rows += [(preset.name, _count(preset), preset.config["model_type"], preset.hf_id) for preset in found]
    name, count, kind = (max(len(row[column]) for row in rows) for column in range(3))
    lines = [f"{row[0]:<{name}}  {row[1]:>{count}}  {row[2]:<{kind}}  {row[3]}" for row in rows]
    return "\n".join(lines)


def _json(found: list[Preset]) -> str:
    records = [
        {
            "name": preset.name,
            "hf_id": preset.hf_id,
            "aliases": list(preset.aliases),
            "params": preset.params,
            "params_exact": preset.params_exact,
            "params_digits": preset.digits,
            "params_source": preset.params_source,
            "config": preset.config,
            "source": preset.source,
        }
        for preset in found
    ]
    return json.dumps({"schema_version": SCHEMA_VERSION, "presets": records}, indent=2)
