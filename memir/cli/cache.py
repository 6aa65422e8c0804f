"""`memir cache info` and `memir cache clear`: the programs that were traced before, and are not traced again."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from memir.errors import UsageError

if TYPE_CHECKING:
    from memir.cache.store import Store, Usage

SCHEMA_VERSION = 1


@click.group("cache")
def command() -> None:
    """Say what is kept of traced steps, or remove it.

    A step that `memir analyze` or `memir ir` has traced is kept, and read again as long as nothing has changed that it depends
    on: the model's sources, options, installed packages, memir. MEMIR_CACHE_DIR is the folder, MEMIR_NO_CACHE=1 keeps nothing.
    """


@command.command("info")
@click.option("--format", "form", type=click.Choice(("text", "json")), default="text", show_default=True)
def info(form: str) -> None:
    """Where the kept programs are, how many, and how large they are."""
    from memir.cache.store import LIMIT

    store = _store()
    usage = store.usage()
    if form == "json":
        data = {
            "schema_version": SCHEMA_VERSION,
            "folder": str(store.folder),
            "programs": usage.entries,
            "targets": usage.targets,
            "bytes": usage.nbytes,
            "limit_bytes": LIMIT,
        }
        click.echo(json.dumps(data, indent=2))
        return
    click.echo(f"folder    {store.folder}")
    click.echo(f"programs  {_counted(usage)}")
    click.echo(f"size      {_size(usage.nbytes)}, at most {_size(LIMIT)}")


@command.command("clear")
def clear() -> None:
    """Remove all kept programs."""
    store = _store()
    try:
        usage = store.clear()
    except OSError as error:
        raise UsageError(f"cannot clear the cache: {error.strerror}", where=str(error.filename or store.folder)) from None
    click.echo(f"removed {_counted(usage)}, {_size(usage.nbytes)}")


def _store() -> Store:
    from memir.cache.store import Store, cache_folder

    return Store(cache_folder())


def _counted(usage: Usage) -> str:
    programs = f"{usage.entries} program{'' if usage.entries == 1 else 's'}"
    return programs if not usage.entries else f"{programs} of {usage.targets} target{'' if usage.targets == 1 else 's'}"


def _size(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):,.1f} MiB" if nbytes >= 1 << 20 else f"{nbytes / 1024:.1f} KiB"
