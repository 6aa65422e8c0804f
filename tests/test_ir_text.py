"""The text form: what is printed parses back to the same program, and what is no program says where."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from memir.errors import ParseError
from memir.ir.core import Kind, Op, Phase, Program, Repeat, Storage
from memir.ir.parser import parse, parse_located
from memir.ir.printer import to_text
from memir.ir.size import Size
from tests.strategies import documents, programs

HEAD = "memir 1\nprogram @p\n"


@given(documents)
@example(Program("", ("a b",), ("#", ' "', "x # y"), (), (), (), ()))
def test_anything_parses_back(program: Program) -> None:
    text = to_text(program)
    assert parse(text) == program
    assert to_text(parse(text)) == text


@given(programs)
def test_programs_parse_back_with_comments_and_blank_lines(program: Program) -> None:
    text = to_text(program)
    loose = "# before\r\n\n" + "\n\n".join(f"{line}   # {number}\r" for number, line in enumerate(text.splitlines()))
    assert parse(loose) == program


@given(st.text())
def test_any_other_text_is_a_parse_error(text: str) -> None:
    with pytest.raises(ParseError):
        parse(text)


@given(programs, st.data())
def test_damaged_text_parses_or_says_where(program: Program, data: st.DataObject) -> None:
    text = to_text(program)
    at = data.draw(st.integers(0, len(text) - 1))
    broken = text[:at] + data.draw(st.text('()[]{}%$@#:,=*+-/^" \nx0', max_size=3)) + text[at + data.draw(st.integers(0, 3)) :]
    fault = None
    try:
        parse(broken, "f")
    except ParseError as error:
        fault = error
    if fault:
        assert 1 <= fault.line <= broken.count("\n") + 1
        assert 1 <= fault.column <= len(broken.split("\n")[fault.line - 1]) + 1


@pytest.mark.parametrize("symbol", ["a b", "2", "", "a-b", " a"])
def test_a_symbol_that_is_no_identifier_has_no_text(symbol: str) -> None:
    storage = Storage("w", Size.of(symbol), Kind.BUFFER)
    with pytest.raises(ValueError, match="not an identifier"):
        to_text(Program("p", (symbol,), (), (), (storage,), (), ()))


def test_factors_are_in_the_order_of_the_dims() -> None:
    text = HEAD + "dim S, B\nstorage $w : 8*B*S + B^2 + 3*ceil((B + S)/64) buffer\n"
    assert "8*S*B + B^2 + 3*ceil((S + B)/64)" in to_text(parse(text))


def test_every_field_is_where_it_belongs() -> None:
    line = "aten.f(%x) saves $a drops $b, $c frees $d scratch 4*B stream s forward of %y at @layers.{i}.a from m.py:3"
    (phase,) = parse(f"{HEAD}phase fwd\n  {line}\n").phases
    expected = Op("aten.f", ("x",), (), ("d",), ("b", "c"), ("a",), Size.of("B") * 4, "s", "layers.{i}.a", "m.py:3", "y")
    assert phase == Phase("fwd", (expected,))


def test_clauses_may_come_in_any_order() -> None:
    (phase,) = parse(f"{HEAD}phase f\n  g() from m.py:3 at @a frees $d\n").phases
    assert phase.ops == (Op("g", frees=("d",), path="a", source="m.py:3"),)


def test_bodies_nest_by_indentation() -> None:
    text = f"{HEAD}phase f\n  repeat i < 2\n    a()\n    repeat j < 3\n      b()\n    c()\n  repeat k < 4\n  d()\n"
    (phase,) = parse(text).phases
    inner = Repeat("j", Size.of(3), (Op("b"),))
    assert phase.ops == (Repeat("i", Size.of(2), (Op("a"), inner, Op("c"))), Repeat("k", Size.of(4), ()), Op("d"))
    assert to_text(parse(text)) == text


def test_an_operator_may_be_called_repeat() -> None:
    (phase,) = parse(f"{HEAD}phase f\n  repeat(%x)\n  repeat.default(%x)\n").phases
    assert [op.opcode for op in phase.ops if isinstance(op, Op)] == ["repeat", "repeat.default"]


def test_lines_are_known() -> None:
    text = f"{HEAD}# here\nstorage $a : 8 buffer live_in live_out\nvalue %a: f32[2] in $a\nphase f\n  repeat i < 2\n    g(%a)\n"
    _, lines = parse_located(text, "x.memir")
    assert (lines.storages, lines.values, lines.ops) == ((4,), (5,), (7, 8))


def test_nothing_is_read_after_the_line_that_ends_the_program() -> None:
    assert parse(f"{HEAD}phase f\n  g()\n# ---\nanything\n") == parse(f"{HEAD}phase f\n  g()\n")


def test_twenty_thousand_operators() -> None:
    lines = [f"storage $h{k} : 128*B*S + {k % 50}*S activation" for k in range(20_000)]
    lines.append("phase forward")
    value = "bf16[B, S, 64] in"
    lines += [
        f"  %h{k}: {value} $h{k} = aten.mm(%h{k - 1}, %x) frees $h{k - 2} at @layers.{k // 99}.up from model.py:{k % 300}"
        for k in range(2, 20_000)
    ]
    text = f"{HEAD}dim B, S\n" + "\n".join(lines) + "\n"
    assert to_text(parse(text)) == text.replace(" + 0*S", "").replace(" + 1*S", " + S")
