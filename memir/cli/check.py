"""`memir check [SCENARIO...]`: budgets and the baseline, before a change is merged."""

from __future__ import annotations

import os
from pathlib import Path

import click

from memir.cli.options import also_option, output_option, progress, write
from memir.errors import EXIT_INCONCLUSIVE, EXIT_OK, UsageError

FORMATS = ("text", "json", "markdown", "github", "sarif")


@click.command("check")
@click.argument("scenarios", nargs=-1, metavar="[SCENARIO]...")
@click.option(
    "--config", type=click.Path(path_type=Path), metavar="FILE", help="memir.toml or pyproject.toml.  [default: the nearest]"
)
@click.option("--update-baseline", is_flag=True, help="Write what the scenarios take now into the baseline, and pass.")
@click.option("--jobs", "-j", type=click.IntRange(min=1), metavar="N", help="Processes at a time.  [default: the processors]")
@click.option("--no-cache", "cache", is_flag=True, default=True, flag_value=False, help="Trace anew (see memir cache).")
@click.option("--allow-inconclusive", is_flag=True, help="Exit 0 where exit 3 would say that something is not proved.")
@click.option("--exit-zero", is_flag=True, help="Report only: exit 0 whatever is found.")
@click.option("--format", "form", type=click.Choice(FORMATS), default="text", show_default=True)
@also_option(FORMATS)
@output_option
def command(
    scenarios: tuple[str, ...],
    config: Path | None,
    update_baseline: bool,
    jobs: int | None,
    cache: bool,
    allow_inconclusive: bool,
    exit_zero: bool,
    form: str,
    also: list[tuple[str, Path]],
    output: Path | None,
) -> int:
    """Hold the scenarios of the configuration against their budgets and the baseline; all of them, or those named.

    Exit code 1: one is over a budget, or takes more than the baseline says. 3: one could not be proved, or was skipped.
    """
    from memir.check.baseline import read, to_text, updated
    from memir.check.config import find, load
    from memir.check.outputs import render
    from memir.check.run import check

    path = config or find(Path.cwd())
    if path is None:
        raise UsageError("there is no memir.toml and no [tool.memir] in a pyproject.toml here", hint="memir init  writes one")
    found = load(path, shown_from_here(path))
    chosen = found.chosen(scenarios)
    baseline = read(found.baseline, shown_from_here(found.baseline))
    with progress() as stage:
        known = None if update_baseline else baseline
        checked = check(found, chosen, known, keywords={"cache": cache}, jobs=jobs, progress=stage)
    for outcome in checked.outcomes:
        if outcome.scenario.skip:
            click.echo(f"warning: {outcome.scenario.name} was not checked: {outcome.scenario.skip}", err=True)
    if update_baseline:
        names = frozenset(scenario.name for scenario in found.scenarios)
        new = updated(baseline, checked.entries, names, {**(baseline.versions if baseline else {}), **checked.versions})
        write(to_text(new), found.baseline)
        click.echo(f"wrote {shown_from_here(found.baseline)}: {len(checked.entries)} scenarios", err=True)
    write(render(checked, form), output)
    for other, file in also:
        write(render(checked, other), file)
    code = checked.exit_code
    if exit_zero or (allow_inconclusive and code == EXIT_INCONCLUSIVE):
        return EXIT_OK
    return code


def shown_from_here(path: Path) -> str:
    """A path as seen from the working directory."""
    return os.path.relpath(path).replace(os.sep, "/")
