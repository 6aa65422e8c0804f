"""From what the user names to two sides and the difference of their sources: files, targets, saved programs, git revisions."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memir.diff.lines import Sources, compare_sources
from memir.diff.revisions import WORKING_TREE, Repository
from memir.diff.side import Side
from memir.errors import InconclusiveError, MemirError, UsageError
from memir.recipe import Recipe
from memir.workers import Call, Place, run

if TYPE_CHECKING:
    from memir.api import TracedProgram

Progress = Callable[[str], None]
SAVED = ".memir"


@dataclass(frozen=True, slots=True)
class Question:
    """How a target is traced: its recipe, and the keyword arguments of `memir.api.program_of`."""

    target: str
    recipe: Recipe
    keywords: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Pair:
    """Two sides and what differs in their sources. `missing`: the base has no such target; only the head's side is there."""

    base: Side | None
    head: Side
    sources: Sources


def traced(question: Question, avoid: str = "") -> TracedProgram:
    """A target's step. InconclusiveError where a module of it was imported from the folder `avoid`, the user's own tree."""
    from memir.api import program_of

    found = program_of(question.target, question.recipe, **question.keywords)
    for name, module in sorted(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if avoid and file and _is_own(file, avoid) and name.partition(".")[0] not in ("memir", "__main__", "__mp_main__"):
            raise InconclusiveError(
                f"the module {name} was imported from the working tree, not from the revision",
                where=file,
                hint="it is installed in editable mode through a finder; run with PYTHONPATH set to its source folder",
            )
    return found


def _is_own(file: str, folder: str) -> bool:
    path = Path(file)
    return path.is_relative_to(folder) and not {"site-packages", "dist-packages", "lib"} & set(path.parts)


def side(label: str, found: TracedProgram) -> Side:
    """A traced step as a side."""
    return Side(label, found.program, found.env, found.subject.name, found.assumptions, found.inconclusive)


def of_programs(base: Path, head: Path, env: Mapping[str, int]) -> Pair:
    """Two saved programs; `env` gives B, S and other dims their values. UsageError: one lacks, or a file cannot be read."""
    from memir.ir.source import read_program

    sides = []
    for path in (base, head):
        try:
            program = read_program(path.read_text(encoding="utf-8"), str(path))
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{path} cannot be read: {error}") from None
        lacking = [name for name in program.dims if name not in env]
        if lacking:
            flags = {"B": "-b 4", "S": "-s 1024"}
            hint = "add  " + " ".join(flags.get(name, f"--dim {name}=12") for name in lacking)
            raise UsageError(f"{path}: no value is given for {', '.join(lacking)}", hint=hint)
        sides.append(Side(str(path), program, {name: env[name] for name in program.dims}, program.name))
    return Pair(sides[0], sides[1], Sources({}, {}, {}, ()))


def of_targets(base: Question, head: Question, progress: Progress) -> Pair:
    """Two targets, traced beside each other. Where both are files, their lines are compared."""
    progress(f"tracing {base.target} and {head.target}")
    here = Place(os.getcwd())
    calls = [Call("memir.diff.inputs:traced", {"question": question}, here) for question in (base, head)]
    first, second = (_program(answer) for answer in run(calls))
    files = [_file_of(question.target, Path.cwd()) for question in (base, head)]
    sources = Sources({}, {}, {}, ())
    if files[0] is not None and files[1] is not None and files[0] != files[1]:
        texts = [_text(file) for file in files]
        names = [shown(file, Path.cwd()) for file in files]
        sources = compare_sources([(names[0], texts[0], names[1], texts[1])])
    return Pair(side(base.target, first), side(head.target, second), sources)


def _program(answer: Any) -> TracedProgram:
    if isinstance(answer, MemirError):
        raise answer
    found: TracedProgram = answer
    return found


@dataclass(frozen=True, slots=True)
class Trees:
    """The folders of two states of a repository, and what differs between them."""

    repository: Repository
    base: Path
    head: Path
    names: tuple[str, str]  # as the user named them
    sources: Sources


@contextmanager
def trees(repository: Repository, base: str, head: str, progress: Progress) -> Iterator[Trees]:
    """Both states as folders, for as long as the context lasts. `.` is the working tree, as it is."""
    commits = [name if name == WORKING_TREE else repository.known(name) for name in (base, head)]
    progress(f"reading {base} and {head}")
    with ExitStack() as stack:
        folders = [
            repository.top if commit == WORKING_TREE else stack.enter_context(repository.checkout(commit)) for commit in commits
        ]
        if commits[0] == WORKING_TREE:
            changed = [(b, a) for a, b in repository.changed(commits[1], WORKING_TREE)] if commits[1] != commits[0] else []
        else:
            changed = repository.changed(commits[0], commits[1])
        pairs = [
            (b or h, _text(folders[0] / b) if b else None, h or b, _text(folders[1] / h) if h else None) for b, h in changed
        ]
        yield Trees(repository, folders[0], folders[1], (base, head), compare_sources(pairs))


def of_revisions(found: Trees, questions: Sequence[Question], progress: Progress) -> list[Pair | MemirError]:
    """Each question asked in both states; an error in place of a pair that cannot be had."""
    prefix = Path(os.path.relpath(Path.cwd().resolve(), found.repository.top.resolve()))
    calls = []
    for folder in (found.base, found.head):
        is_own = folder == found.repository.top
        place = Place(str(folder), "" if is_own else str(found.repository.top.resolve()), "" if is_own else str(folder))
        for question in questions:
            target = _moved(question.target, prefix, (found.base, found.head, found.repository.top))
            keywords = {**question.keywords, **({} if is_own else {"cache": False})}
            moved = Question(target, question.recipe, keywords)
            avoid = "" if is_own else str(found.repository.top.resolve())
            calls.append(Call("memir.diff.inputs:traced", {"question": moved, "avoid": avoid}, place))
    progress(f"tracing {found.names[0]} and {found.names[1]}")
    answers = run(calls)
    pairs: list[Pair | MemirError] = []
    for number, question in enumerate(questions):
        base, head = answers[number], answers[len(questions) + number]
        target = _moved(question.target, prefix, (found.base, found.head, found.repository.top))
        if isinstance(head, MemirError):
            pairs.append(_about(head, found.names[1]))
        elif isinstance(base, UsageError) and _file_of(target, found.base) is None and _file_of(target, found.head) is not None:
            pairs.append(Pair(None, side(found.names[1], head), found.sources))
        elif isinstance(base, MemirError):
            pairs.append(_about(base, found.names[0], cannot=True))
        else:
            pairs.append(Pair(side(found.names[0], base), side(found.names[1], head), found.sources))
    return pairs


def _about(error: MemirError, name: str, *, cannot: bool = False) -> MemirError:
    """An error with the state that it is about; of the base it means that nothing can be proved."""
    kind = InconclusiveError if cannot and isinstance(error, UsageError) else type(error)
    return kind(f"{'the working tree' if name == WORKING_TREE else name}: {error.message}", where=error.where, hint=error.hint)


def _moved(target: str, prefix: Path, folders: Sequence[Path]) -> str:
    """A target typed in a folder of the repository as it is typed at its top, where it is a file or folder there."""
    head, colon, name = target.rpartition(":") if ":" in target else (target, "", "")
    place = Path(head or name)
    if place.is_absolute():
        for folder in folders:
            if place.is_relative_to(folder):
                return place.relative_to(folder).as_posix() + colon + name
        return target
    inside = Path(os.path.normpath(prefix / place))
    if any((folder / inside).exists() for folder in folders):
        return inside.as_posix() + colon + name
    return target


def _file_of(target: str, folder: Path) -> Path | None:
    """The Python file that a target names below a folder; None where it is no file."""
    for text in (target, target.rpartition(":")[0]):
        path = (folder / text).resolve() if text else folder
        if path.is_file() and path.suffix == ".py":
            return path
    return None


def _text(path: Path | None) -> str | None:
    try:
        return None if path is None else path.read_bytes().decode("utf-8", errors="replace")
    except OSError:
        return None


def shown(path: Path | None, folder: Path) -> str:
    """A file's path as operators' lines show it (memir/frontend/origin.py): relative to the folder, or its name."""
    assert path is not None
    try:
        return path.resolve().relative_to(folder.resolve()).as_posix()
    except ValueError:
        return path.name
