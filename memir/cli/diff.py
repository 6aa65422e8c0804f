"""`memir diff BASE HEAD [TARGET]`: what a change of the model's code does to the peak, and which line is behind it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from memir.cli.options import Request, also_option, cache_option, output_option, progress, recipe_options, write
from memir.cli.parallel import parallel_option
from memir.errors import EXIT_INCONCLUSIVE, EXIT_OK, MemirError, UsageError

if TYPE_CHECKING:
    from memir.diff.inputs import Pair, Question
    from memir.diff.outputs import Item

FORMATS = ("text", "json", "markdown", "github", "sarif")


@click.command("diff")
@click.argument("base")
@click.argument("head")
@click.argument("target", required=False)
@recipe_options
@cache_option
@parallel_option
@click.option("--dim", "dims", multiple=True, metavar="NAME=N", help="Another symbol of a saved program; repeatable.")
@click.option("--format", "form", type=click.Choice(FORMATS), default="text", show_default=True)
@also_option(FORMATS)
@output_option
def command(
    request: Request,
    base: str,
    head: str,
    target: str | None,
    dims: tuple[str, ...],
    form: str,
    also: list[tuple[str, Path]],
    output: Path | None,
) -> int:
    """Say what differs between two versions of a training step: bytes, formula, storages, and the changed line behind it.

    With TARGET, or the name of a scenario of the configuration (memir check), BASE and HEAD are git revisions; HEAD may be .
    for the working tree, uncommitted changes included. Without it they are two files or other targets, two programs that
    memir ir wrote (NAME.memir), or two revisions in which all scenarios are compared.

    Exit code 3: one of the two could not be traced, or its number is not proved; the reason is said.
    """
    from memir.diff.inputs import SAVED, Pair, Question, of_programs, of_targets
    from memir.diff.outputs import Item, render

    keywords = request.program_keywords()
    with progress() as stage:
        if target is None and base.endswith(SAVED) and head.endswith(SAVED):
            items = [_item("", of_programs(Path(base), Path(head), _env(request, dims)))]
        elif target is None and not _are_revisions(base, head):
            questions = [Question(name, request.recipe, keywords) for name in (base, head)]
            items = [_item("", of_targets(questions[0], questions[1], stage))]
        else:
            asked = _questions(target, request)
            pairs = _in_revisions(base, head, [question for _, question in asked], stage)
            stage("comparing")
            items = [
                _item(name, pair) if isinstance(pair, Pair) else Item(name, error=pair)
                for (name, _), pair in zip(asked, pairs, strict=True)
            ]
    if len(items) == 1 and items[0].error is not None:
        raise items[0].error
    write(render(items, form), output)
    for other, file in also:
        write(render(items, other), file)
    return EXIT_OK if all(item.is_proven for item in items) else EXIT_INCONCLUSIVE


def _item(name: str, pair: Pair) -> Item:
    from memir.diff.compare import compare
    from memir.diff.outputs import Item

    return Item(name, None if pair.base is None else compare(pair.base, pair.head, pair.sources), pair.head)


def _are_revisions(base: str, head: str) -> bool:
    """Whether both name a state of the repository and neither a target: a file of a branch's name is a file."""
    from memir.diff.revisions import WORKING_TREE, Repository

    names = [name for name in (base, head) if name != WORKING_TREE]
    if not names or any(Path(name).exists() for name in names):
        return False
    repository = Repository.at(Path.cwd())
    return repository is not None and all(repository.commit(name) for name in names)


def _questions(target: str | None, request: Request) -> list[tuple[str, Question]]:
    """What is asked in both states: a target; or a scenario, or all of them, by name."""
    from memir.check.config import find, load
    from memir.cli.check import shown_from_here
    from memir.diff.inputs import Question

    path = find(Path.cwd())
    config = None if path is None else load(path, shown_from_here(path))
    names = {scenario.name for scenario in config.scenarios} if config else set()
    if config is None or (target is not None and target not in names):
        if target is None:
            raise UsageError("two revisions, and no TARGET", hint="name one, or write scenarios:  memir init")
        return [("", Question(target, request.recipe, request.program_keywords()))]
    found = []
    for scenario in config.chosen([target] if target else []):
        if scenario.skip:
            click.echo(f"warning: {scenario.name} is not compared: {scenario.skip}", err=True)
            continue
        place = str(config.folder / scenario.target) if (config.folder / scenario.target.partition(":")[0]).exists() else ""
        question = Question(place or scenario.target, scenario.recipe, {**scenario.keywords(), "fold": request.fold})
        found.append((scenario.name, question))
    if not found:
        raise UsageError("there is no scenario to compare", where=config.shown)
    return found


def _in_revisions(base: str, head: str, questions: list[Question], stage: Callable[[str], None]) -> list[Pair | MemirError]:
    from memir.diff.inputs import of_revisions, trees
    from memir.diff.revisions import Repository

    repository = Repository.at(Path.cwd())
    if repository is None:
        raise UsageError(
            "this folder is in no git repository, and BASE HEAD TARGET compares two revisions",
            hint="memir diff BEFORE.py AFTER.py  compares two files",
        )
    with trees(repository, base, head, stage) as found:
        return of_revisions(found, questions, stage)


def _env(request: Request, dims: tuple[str, ...]) -> dict[str, int]:
    env = {name: value for name, value in (("B", request.batch), ("S", request.seq)) if value is not None}
    for word in dims:
        name, _, value = word.partition("=")
        if not value.isdigit():
            raise UsageError(f"--dim: {word!r} is not NAME=N", hint="write  --dim L=12")
        env[name.strip()] = int(value)
    return env
