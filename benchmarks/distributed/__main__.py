"""`python -m benchmarks.distributed one TARGET --method "fsdp{degree=2}"`, `... table`, `... published [--save]`."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import click

from benchmarks.distributed.cases import CASES
from benchmarks.distributed.one import Around, predict, show, show_comparison
from benchmarks.distributed.published import TITAN, holds, page, published_rows, torchtitan_row
from benchmarks.distributed.table import renewed
from benchmarks.mistral.environment import ROOT, default_folder, make
from benchmarks.replay.table import csv_text, from_csv
from memir.cli.options import Request, step_options
from memir.errors import MemirError
from memir.runtime.ranks import real_ranks


@click.group()
def main() -> None:
    """Real peaks of distributed methods, by rank."""


@main.command()
@step_options
@click.option("--method", required=True, metavar="TEXT", help="fsdp{degree=2},tensor-parallel{degree=2}: run for real.")
@click.option("--pass", "passes", metavar="TEXT", help="memir's passes on the same step, compared with rank 0.")
@click.option("--rank", type=int, default=0, show_default=True, help="Whose timeline is shown.")
@click.option("--before", type=int, default=25, show_default=True, help="Events shown before the peak.")
@click.option("--after", type=int, default=5, show_default=True, help="Events shown after it.")
@click.option("--all", "everything", is_flag=True, help="All of the step's events.")
def one(request: Request, method: str, passes: str | None, rank: int, before: int, after: int, everything: bool) -> None:
    """One step on real ranks: bytes at its start, peak and end on each, and what happened around the peak.

    The target is the CPU; -b and -s are 2 and 64 unless given, and the dtype f32.
    """
    context = click.get_current_context()
    dtype = (
        request.recipe.dtype
        if context.get_parameter_source("recipe_dtype") is not click.core.ParameterSource.DEFAULT
        else "f32"
    )
    recipe = replace(request.recipe, target="cpu", dtype=dtype)
    batch, seq = request.batch or 2, request.seq or 64
    ranks = real_ranks(request.model, recipe, batch, seq, request.sets, method, inputs=request.inputs)
    around = Around(10**9, 10**9) if everything else Around(before, after)
    click.echo(show(ranks, rank, around))
    if passes is not None:
        click.echo(show_comparison(predict(replace(request, recipe=recipe), batch, seq, passes), ranks[rank]))


@main.command()
@click.option("--only", default="", metavar="WORD", help="Runs with WORD in their name.")
@click.option("--save", is_flag=True, help="Write published.csv and published.md.")
@click.option("--data", is_flag=True, hidden=True)
def published(only: str, save: bool, data: bool) -> None:
    """Published runs under FSDP beside memir's predictions; those on two A100 are traced under transformers 4.48.1."""
    if data:
        click.echo(csv_text(list(published_rows(only))), nl=False)
        return
    command = [str(make(default_folder())), "-m", "benchmarks.distributed", "published", "--data", "--only", only]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    text = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    rows = from_csv(text)
    if only in TITAN:
        rows.append(torchtitan_row())
    click.echo(page(rows), nl=False)
    if save:
        here = Path(__file__).resolve().parent
        (here / "published.csv").write_text(csv_text(rows))
        (here / "published.md").write_text(page(rows))
    if not holds(rows):
        sys.exit(1)


@main.command()
@click.option("--table", "only", is_flag=True, help="Only the page, from the committed measurements.")
def zero(only: bool) -> None:
    """DeepSpeed's ZeRO beside the pass: zero.csv and zero.md. Needs DeepSpeed, but for --table."""
    from benchmarks.distributed.zero import HERE, measured, read, table, write

    if not only:
        write(measured(click.echo))
    (HERE / "zero.md").write_text(table(read()))


@main.command()
@click.option("--only", default="", metavar="WORD", help="Only cases with WORD in their preset, ranks, method or checkpoint.")
@click.option("--save", is_flag=True, help="Write full.csv and full.md; lines of other cases stay.")
def full(only: str, save: bool) -> None:
    """Models in full size: the passes beside a trace of PyTorch's own code, on 8 to 512 ranks. Takes half an hour."""
    from benchmarks.distributed.full import HERE, measured, read, renewed
    from benchmarks.distributed.full import csv_text as full_text
    from benchmarks.distributed.full import page as full_page

    rows = list(measured(only))
    if save:
        rows = renewed(read(), rows)
        (HERE / "full.csv").write_text(full_text(rows))
        (HERE / "full.md").write_text(full_page(rows))
    click.echo(full_page(rows), nl=False)
    if any(row.start != row.start_traced or abs(row.error) > 1 for row in rows):
        sys.exit(1)


@main.command()
@click.option("--only", default="", metavar="WORD", help="Only cases with WORD in their name; other lines stay.")
@click.option("--missing", is_flag=True, help="Only cases without a prediction so far.")
def table(only: str, missing: bool) -> None:
    """Run the table's cases on real ranks, and write results.csv."""
    for lines in renewed(CASES, only, missing):
        for line in lines:
            click.echo(f"{line['case']}  rank {line['rank']}  {line['peak']}  trace {line['trace_error']}  {line['verdict']}")


if __name__ == "__main__":
    try:
        main(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except MemirError as error:
        print(error.render(), file=sys.stderr)
        sys.exit(error.exit_code)
