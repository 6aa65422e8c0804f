"""Runs every *.memir file beside this one. docs/ir.md, "Golden tests", says how one is written.

# run: bind{B=4},unroll          what is run ("# run:" alone only reads, verifies and prints), and/or
# backend: json                  the backend that prints; without one, the text form
# fails: 2                       the exit code of an error, if that is what is expected
# A sentence that says what this shows.
memir 1
...                              a line may end in  # error: text  : the error must be at that line and say that
# ---
what is printed
"""

from __future__ import annotations

import difflib
import io
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from memir.errors import MemirError, UsageError
from memir.ir.parser import END
from memir.ir.printer import to_text
from memir.ir.source import read_program
from memir.pipeline import Pipeline, golden_text, parse_backend
from memir.registry import PASSES

FOLDER = Path(__file__).parent
FILES = sorted(FOLDER.rglob("*.memir"))
DIRECTIVE = re.compile(r"# (run|backend|fails):(.*)")
ERROR = re.compile(r"#\s*error:\s*(.*?)\s*$")


@dataclass(frozen=True)
class Case:
    """One file, taken apart."""

    name: str
    directives: dict[str, str]
    shown: str
    source: str
    expected: str | None
    errors: tuple[tuple[int, str], ...]  # line, text

    @staticmethod
    def read(path: Path) -> Case:
        text = path.read_text(encoding="utf-8")
        source, separator, expected = text.partition(f"\n{END}\n")
        source += "\n" if separator else ""
        directives: dict[str, str] = {}
        shown = []
        for line in source.splitlines():
            if not line.startswith("#") or ERROR.match(line):
                break
            if found := DIRECTIVE.fullmatch(line):
                directives[found[1]] = found[2].strip()
            else:
                shown.append(line.lstrip("# "))
        lines = enumerate(source.splitlines(), 1)
        errors = tuple((number, found[1]) for number, line in lines if (found := ERROR.search(line)))
        return Case(path.name, directives, " ".join(shown), source, expected if separator else None, errors)

    def output(self, scratch: Path) -> str:
        """What is printed. MemirError if something is wrong, with this file's name."""
        pipeline = Pipeline.parse(self.directives.get("run", ""))
        program = read_program(self.source, self.name, verify=not pipeline.accepts_unverified)
        program = pipeline.run(program, reproducer=scratch / "reproducer.memir")
        if "backend" not in self.directives:
            return to_text(program)
        out = io.StringIO()
        parse_backend(self.directives["backend"]).emit(program, out)
        return out.getvalue() if out.getvalue().endswith("\n") else out.getvalue() + "\n"


def check(path: Path, scratch: Path, bless: bool = False) -> None:
    """AssertionError, with a diff, if the file does not say what happens; with `bless` the file is rewritten."""
    case = Case.read(path)
    assert case.shown, f"{path}: say in a comment under the directives what this shows"
    if case.errors:
        return check_error(case, scratch)
    assert case.directives, f"{path}: it begins with `# run: PIPELINE` or `# backend: SPEC`, or has `# error: text` on a line"
    code = int(case.directives.get("fails", "0"))
    if code:
        with pytest.raises(MemirError) as caught:
            case.output(scratch)
        assert caught.value.exit_code == code, caught.value.render()
        output = caught.value.render() + "\n"
    else:
        output = case.output(scratch)
    if bless:
        path.write_text(f"{case.source}{END}\n{output}", encoding="utf-8")
        return None
    assert case.expected is not None, f"nothing is expected yet; what is printed:\n{output}\nwrite it with  --bless"
    if output != case.expected:
        diff = difflib.unified_diff(
            case.expected.splitlines(), output.splitlines(), "expected", "printed now", lineterm="", n=3
        )
        raise AssertionError("\n".join([f"{path}:", *diff, f"if it is right:  pytest tests/golden --bless -k {path.stem}"]))
    return None


def check_error(case: Case, scratch: Path) -> None:
    assert len(case.errors) == 1, "one `# error:` a file: only the first error is reported"
    assert case.expected is None, "a file with `# error:` has no other expectation"
    ((line, message),) = case.errors
    with pytest.raises(UsageError) as caught:
        case.output(scratch)
    error = caught.value
    assert message, "say after `# error:` a part of the message"
    assert message in f"{error.message}\n{error.hint}", error.render()  # not in `where`, which shows the line, comment and all
    assert re.match(rf"{re.escape(case.name)}:{line}(:|\n|$)", error.where), f"expected at line {line}:\n{error.render()}"


@pytest.mark.parametrize("path", [pytest.param(p, id=str(p.relative_to(FOLDER).with_suffix(""))) for p in FILES])
def test_golden(path: Path, bless: bool, tmp_path: Path) -> None:
    check(path, tmp_path, bless)


def test_there_is_a_case_for_every_pass() -> None:
    cases = [Case.read(path).directives for path in FILES]
    used = {spec.partition("{")[0].strip() for d in cases if "fails" not in d for spec in d.get("run", "").split(",")}
    assert not set(PASSES) - used


SOURCE = "# run: bind{B=2}\n# Shows a bound symbol.\nmemir 1\nprogram @p\ndim B\nstorage $w : 8*B buffer live_in live_out\n"
RESULT = "# ---\nmemir 1\nprogram @p\nstorage $w : 16 buffer live_in live_out\n"


def test_a_case_that_holds_passes(tmp_path: Path) -> None:
    path = tmp_path / "case.memir"
    path.write_text(SOURCE + RESULT)
    check(path, tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (SOURCE + RESULT.replace("16", "17"), r"-storage \$w : 17(.|\n)*\+storage \$w : 16(.|\n)*--bless -k case"),
        (SOURCE, "nothing is expected yet"),
        (SOURCE.replace("# Shows a bound symbol.\n", "") + RESULT, "what this shows"),
        ("# Without a directive.\nmemir 1\nprogram @p\n", "it begins with"),
        (SOURCE.replace("live_in live_out", "live_in live_in # error: never"), "never"),
        (SOURCE.replace("dim B", "dim B # error: twice").replace("out", "out live_in"), "expected at line 5"),
        (SOURCE.replace("dim B", "dim B # error: a").replace("out", "out live_in # error: b"), "one `# error:` a file"),
    ],
)
def test_a_case_that_does_not_hold_fails(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "case.memir"
    path.write_text(text)
    with pytest.raises(AssertionError, match=message):
        check(path, tmp_path)


def test_an_error_that_does_not_come_fails(tmp_path: Path) -> None:
    path = tmp_path / "case.memir"
    path.write_text(SOURCE.replace("dim B", "dim B # error: anything"))
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        check(path, tmp_path)


def test_bless_writes_what_is_printed(tmp_path: Path) -> None:
    path = tmp_path / "case.memir"
    path.write_text(SOURCE)
    check(path, tmp_path, bless=True)
    assert path.read_text() == SOURCE + RESULT
    check(path, tmp_path)


def test_a_reproducer_is_a_golden_test(tmp_path: Path) -> None:
    path = tmp_path / "case.memir"
    path.write_text(golden_text("run: bind{B=2}", "Shows a bound symbol.", read_program(SOURCE), RESULT.partition("\n")[2]))
    check(path, tmp_path)
