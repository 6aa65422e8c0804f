"""`memir init [FOLDER]`: a first memir.toml for the models of a folder."""

from __future__ import annotations

from pathlib import Path

import click

from memir.errors import EXIT_OK, UsageError


@click.command("init")
@click.argument("folder", default=".", type=click.Path(file_okay=False, path_type=Path))
@click.option("--stdout", is_flag=True, help="Print it instead of writing FOLDER/memir.toml.")
def command(folder: Path, stdout: bool) -> int:
    """Write a memir.toml with a scenario for each model in FOLDER, every budget in a comment. Files are read, not run."""
    from memir.check.init import configuration

    if not folder.is_dir():
        raise UsageError(f"{folder}: no such folder")
    text, targets = configuration(folder)
    if stdout:
        click.echo(text, nl=False)
        return EXIT_OK
    path = folder / "memir.toml"
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(f"{path} is there already", hint="memir init --stdout  prints what it would write") from None
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from None
    click.echo(f"wrote {path}: {len(targets)} scenario{'' if len(targets) == 1 else 's'}; next:  memir check --update-baseline")
    return EXIT_OK
