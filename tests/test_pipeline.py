"""Pipelines from text and back, the driver's promises, the registry."""

from __future__ import annotations

import enum
import io
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memir import registry
from memir.errors import EXIT_INTERNAL, EXIT_USAGE, InconclusiveError, ParseError, UsageError
from memir.ir.core import Program
from memir.ir.parser import parse
from memir.ir.size import Size
from memir.ir.source import read_program
from memir.options import parse_list, spec
from memir.pipeline import PassError, Pipeline, parse_backend
from tests.golden.test_golden import check

STEP = """memir 1
program @p
dim B
storage $a : 8*B activation
phase f
  %a: f32[B, 2] in $a = aten.f()
  aten.g(%a) frees $a
"""


class Colour(enum.StrEnum):
    RED = "red"
    BLUE = "dark blue"


@dataclass(frozen=True, slots=True)
class Options:
    """A pass with an option of every type."""

    name: ClassVar[str] = "options"
    degree: int
    sequence: bool = False
    overlap: bool = True
    ratio: float = 0.5
    policy: Literal["full", "none", 3] = "full"
    module_path: str = ""
    targets: tuple[str, ...] = ()
    cuts: tuple[int, ...] = (1, 2)
    bucket: Size | None = None
    colour: Colour = Colour.RED
    symbols: tuple[tuple[str, int], ...] = ()

    def run(self, program: Program) -> Program:
        return program


def _read(text: str) -> tuple[Any, ...]:
    return parse_list(text, lambda name: {"options": Options}[name])


@given(
    st.builds(
        Options,
        degree=st.integers(),
        sequence=st.booleans(),
        overlap=st.booleans(),
        ratio=st.floats(allow_nan=False),
        policy=st.sampled_from(("full", "none", 3)),
        module_path=st.text(),
        targets=st.lists(st.text("abc_.{} \"'", min_size=1), max_size=3).map(tuple),
        cuts=st.lists(st.integers(), max_size=3).map(tuple),
        bucket=st.sampled_from((None, Size.of(3), 4 * Size.of("B") * Size.of("S") - 1)),
        colour=st.sampled_from(Colour),
        symbols=st.dictionaries(st.sampled_from(("B", "S", "n_layer")), st.integers()).map(lambda d: tuple(d.items())),
    )
)
def test_specs_read_back(made: Options) -> None:
    text = spec(made)
    assert _read(f" {text} , {text}") == (made, made)


def test_defaults_are_not_written() -> None:
    assert spec(Options(8)) == "options{degree=8}"
    assert spec(Options(8, sequence=True, overlap=False)) == "options{degree=8 sequence overlap=false}"
    assert _read("options{degree=8 module-path=a.b}") == _read("options{ degree = 8  module_path=a.b }")


@pytest.mark.parametrize(
    ("text", "message", "column"),
    [
        ("options", "needs the option degree", 1),
        ("options{degree}", "degree needs a value", 9),
        ("options{degree=x}", "degree is a whole number, not 'x'", 16),
        ("options{degree=1 ratio=y}", "ratio is a number, not 'y'", 24),
        ("options{degree=1 sequence=maybe}", "sequence is true or false, not 'maybe'", 27),
        ("options{degree=1 policy=half}", "policy is one of full, none, 3, not 'half'", 25),
        ("options{degree=1 colour=green}", "colour is one of red, dark blue, not 'green'", 25),
        ("options{degree=1 bucket=B+}", "bucket is a size: expected a size", 25),
        ("options{degree=1 cuts=1,b}", "cuts is a whole number, not 'b'", 23),
        ("options{degree=1 degree=2}", "degree is given twice", 18),
        ("options{degree=1 degre=2 degre=3}", "degre is given twice", 26),
        ("options{degree=1", "expected an option or `}`", 17),
        ("options{degree=1}}", "expected `,` or the end", 18),
        (",options", "expected a name", 1),
        ("options{degree=}", "expected a value for degree", 16),
        ("options{=3}", "expected an option or `}`", 9),
    ],
)
def test_what_is_no_pipeline_says_where(text: str, message: str, column: int) -> None:
    with pytest.raises(ParseError) as caught:
        _read(text)
    assert message in caught.value.message
    assert caught.value.column == column


def test_unknown_options_have_nearest_names() -> None:
    with pytest.raises(ParseError, match="no option 'liv'") as caught:
        parse_backend("ir{liv}")
    assert caught.value.hint == "did you mean  live?"


def test_pipelines_read_back_and_run() -> None:
    pipeline = Pipeline.parse("bind{B=2},\n unroll")
    assert pipeline.spec() == "bind{B=2},unroll"
    assert Pipeline.parse(pipeline.spec()) == pipeline
    assert Pipeline.parse("") == Pipeline()
    seen: list[tuple[str, tuple[str, ...]]] = []
    program = pipeline.run(read_program(STEP), after=lambda p, made: seen.append((spec(p), made.dims)))
    assert seen == [("bind{B=2}", ()), ("unroll", ())]
    assert program.storages[0].nbytes is Size.of(16)


@dataclass(frozen=True, slots=True)
class Leaks:
    """A pass with a bug: it removes a free."""

    name: ClassVar[str] = "bind"  # under the name of a real pass, so that its reproducer can run
    symbols: tuple[tuple[str, int], ...] = ()

    def run(self, program: Program) -> Program:
        (phase,) = program.phases
        return replace(program, phases=(replace(phase, ops=tuple(replace(op, frees=()) for op in phase.ops)),))  # type: ignore[type-var]


@dataclass(frozen=True, slots=True)
class Raises:
    """A pass that raises what it is given."""

    error: Exception
    name: ClassVar[str] = "unroll"

    def run(self, program: Program) -> Program:
        raise self.error


def test_a_program_that_breaks_a_rule_stops_the_pipeline_and_leaves_a_golden_test(tmp_path: Path) -> None:
    program, path = read_program(STEP), tmp_path / "reproducer.memir"
    with pytest.raises(PassError, match=r"bind made a program that breaks a rule: \$a is never freed") as caught:
        Pipeline((Leaks((("B", 2),)),)).run(program, reproducer=path)
    assert caught.value.exit_code == EXIT_INTERNAL
    assert str(path) in caught.value.hint
    text = path.read_text()
    assert text.startswith("# run: bind{B=2}\n# the pass bind made a program that breaks a rule: $a is never freed\nmemir 1\n")
    assert parse(text) == program
    with pytest.raises(AssertionError, match="nothing is expected yet"):
        check(path, tmp_path)
    check(path, tmp_path, bless=True)  # the real pass has no such bug
    check(path, tmp_path)


def test_the_reproducer_goes_to_the_temporary_folder_if_no_place_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(PassError, match="unroll failed: KeyError: 'x'"):
        Pipeline((Raises(KeyError("x")),)).run(read_program(STEP))  # type: ignore[arg-type]
    (path,) = tmp_path.iterdir()
    assert path.suffix == ".memir"
    assert parse(path.read_text()) == read_program(STEP)


def test_a_reproducer_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    with pytest.raises(PassError) as caught:
        Pipeline((Leaks(),)).run(read_program(STEP), reproducer=tmp_path / "no" / "folder")
    assert "no golden test could be written" in caught.value.hint


def test_without_verification_nothing_is_checked() -> None:
    assert Pipeline((Leaks(),)).run(read_program(STEP), verify=False) != read_program(STEP)


@pytest.mark.parametrize("error", [UsageError("no such axis"), InconclusiveError("an opaque operator")])
def test_what_a_pass_says_about_its_input_goes_through(error: Exception, tmp_path: Path) -> None:
    with pytest.raises(type(error)) as caught:
        Pipeline((Raises(error),)).run(read_program(STEP), reproducer=tmp_path / "x.memir")  # type: ignore[arg-type]
    assert caught.value is error
    assert not list(tmp_path.iterdir())


def test_every_pass_and_backend_is_what_it_should_be() -> None:
    for name in registry.passes.names():
        loaded = registry.passes.load(name)
        assert callable(loaded.run)  # type: ignore[attr-defined]
        assert loaded.__dataclass_params__.frozen  # type: ignore[attr-defined]
    for name in registry.backends.names():
        loaded = registry.backends.load(name)
        assert callable(loaded.emit)  # type: ignore[attr-defined]
        assert loaded.__dataclass_params__.frozen  # type: ignore[attr-defined]


def test_a_backend_is_one() -> None:
    out = io.StringIO()
    parse_backend("ir").emit(read_program(STEP), out)
    assert parse(out.getvalue()) == read_program(STEP)
    for text in ("", "ir,json"):
        with pytest.raises(UsageError, match="one backend is wanted"):
            parse_backend(text)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[EntryPoint]]:
    """Entry points as if a third party had installed them."""
    points: list[EntryPoint] = []
    monkeypatch.setattr(registry, "_entry_points", lambda group: tuple(p for p in points if p.group == group))
    return points  # type: ignore[return-value]


def test_third_parties_can_add_passes(installed: list[EntryPoint]) -> None:
    installed.append(EntryPoint("options", "tests.test_pipeline:Options", "memir.passes"))
    assert "options" in registry.passes.names()
    assert "options" not in registry.backends.names()
    assert Pipeline.parse("options{degree=3}").passes == (Options(3),)


@pytest.mark.parametrize(
    ("point", "message"),
    [
        (EntryPoint("bind", "other:Bind", "memir.passes"), "the name bind is taken"),
        (EntryPoint("mine", "no_such_module:Mine", "memir.passes"), "mine cannot be imported"),
        (EntryPoint("mine", "tests.test_pipeline:Nothing", "memir.passes"), "mine cannot be imported"),
        (EntryPoint("mine", "tests.test_pipeline:STEP", "memir.passes"), "is not a pass"),
        (EntryPoint("mine", "tests.test_pipeline:Options", "memir.passes"), "calls itself 'options'"),
    ],
)
def test_a_third_party_that_does_not_fit_is_named(installed: list[EntryPoint], point: EntryPoint, message: str) -> None:
    installed.append(point)
    with pytest.raises(UsageError, match=message) as caught:
        registry.passes.load(point.name)
    assert caught.value.exit_code == EXIT_USAGE


def test_unknown_names_have_nearest_ones() -> None:
    with pytest.raises(UsageError, match="unknown pass 'unrol'") as caught:
        Pipeline.parse("unrol")
    assert "unroll" in caught.value.hint
    with pytest.raises(UsageError, match="unknown backend 'xyz'") as caught:
        parse_backend("xyz")
    assert "formula, ir, json, markdown, text" in caught.value.hint
