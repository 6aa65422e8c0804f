"""`memir diff BASE HEAD [TARGET]`: what a change of the model's code does to the peak, and which line is behind it."""

from __future__ import annotations

from pathlib import Path

import click

from memir.cli.options import Request, cache_option, output_option, progress, recipe_options, write
from memir.errors import EXIT_INCONCLUSIVE, EXIT_OK, UsageError

FORMATS = ("text", "json", "markdown", "github", "sarif")


@click.command("diff")
@click.argument("base")
@click.argument("head")
@click.argument("target", required=False)
@recipe_options
@cache_option
@click.option("--dim", "dims", multiple=True, metavar="NAME=N", help="Another symbol of a saved program; repeatable.")
@click.option("--format", "form", type=click.Choice(FORMATS), default="text", show_default=True)
@output_option
def command(
    request: Request,
    base: str,
    head: str,
    target: str | None,
    dims: tuple[str, ...],
    form: str,
    output: Path | None,
) -> int:
    """Say what differs between two versions of a training step: bytes, formula, storages, and the changed line behind it.

    With TARGET, BASE and HEAD are git revisions; HEAD may be . for the working tree, uncommitted changes included. Without it
    they are two files or other targets, or two programs that memir ir wrote (NAME.memir).

    Exit code 3: one of the two could not be traced, or its number is not proved; the reason is said.
    """
    from memir.diff.compare import compare
    from memir.diff.inputs import SAVED, Question, of_programs, of_revisions, of_targets, trees
    from memir.diff.outputs import render
    from memir.diff.revisions import Repository
    from memir.errors import MemirError

    keywords = request.program_keywords()
    with progress() as stage:
        if target is not None:
            repository = Repository.at(Path.cwd())
            if repository is None:
                raise UsageError(
                    "this folder is in no git repository, and BASE HEAD TARGET compares two revisions",
                    hint="memir diff BEFORE.py AFTER.py  compares two files",
                )
            with trees(repository, base, head, stage) as found:
                (pair,) = of_revisions(found, [Question(target, request.recipe, keywords)], stage)
        elif base.endswith(SAVED) and head.endswith(SAVED):
            pair = of_programs(Path(base), Path(head), _env(request, dims))
        else:
            questions = [Question(name, request.recipe, keywords) for name in (base, head)]
            pair = of_targets(questions[0], questions[1], stage)
        if isinstance(pair, MemirError):
            raise pair
        stage("comparing")
        difference = None if pair.base is None else compare(pair.base, pair.head, pair.sources)
    write(render(difference, pair.head, form), output)
    doubts = difference.inconclusive if difference is not None else pair.head.inconclusive
    return EXIT_INCONCLUSIVE if doubts else EXIT_OK


def _env(request: Request, dims: tuple[str, ...]) -> dict[str, int]:
    env = {name: value for name, value in (("B", request.batch), ("S", request.seq)) if value is not None}
    for word in dims:
        name, _, value = word.partition("=")
        if not value.isdigit():
            raise UsageError(f"--dim: {word!r} is not NAME=N", hint="write  --dim L=12")
        env[name.strip()] = int(value)
    return env
