"""A record as text reads back as it was, and no text makes reading it fail in another way than is foreseen."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memir.cache.record import Record, from_text, to_text
from memir.errors import ParseError
from memir.ir.core import Program
from memir.ir.size import Size
from tests.strategies import flat_programs, repeated_programs

programs = st.one_of(flat_programs(), repeated_programs())
texts = st.lists(st.text(max_size=9), max_size=3).map(tuple)
EMPTY = Program("a", (), (), (), (), (), ())
SMALL = Record(EMPTY, None, "symbolic", 7, 5, ("a",), (), (("L", 3),), "GPT", "model.py:3", None, 64, (("torch", "2.13.0"),))


@given(programs, st.one_of(st.none(), programs), texts, texts, st.text(max_size=9), st.one_of(st.none(), st.integers(1)))
def test_a_record_reads_back(
    program: Program, general: Program | None, assumptions: Any, inconclusive: Any, name: str, limit: int | None
) -> None:
    record = replace(SMALL, program=program, general=general, assumptions=assumptions, inconclusive=inconclusive, name=name)
    record = replace(record, max_seq=limit, num_layers=limit)
    assert from_text(to_text(record)) == record


def test_a_program_without_a_text_form_is_refused() -> None:
    with pytest.raises(ValueError, match="not an identifier"):
        to_text(replace(SMALL, program=replace(EMPTY, mesh=(("tp", Size.of("a b")),))))


@pytest.mark.parametrize("name", sorted(json.loads(to_text(SMALL))))
@pytest.mark.parametrize("value", [None, 3, "text", [None], {"a": []}, []])
def test_every_field_is_checked(name: str, value: object) -> None:
    data = json.loads(to_text(SMALL)) | {name: value}
    try:
        record = from_text(json.dumps(data))
    except (ParseError, ValueError, KeyError, TypeError, AttributeError):
        return
    assert json.loads(to_text(record)) == data


@pytest.mark.parametrize("text", ["", "[]", "{}", "nothing", to_text(SMALL)[:-1], to_text(SMALL)[:-1] + ', "x": 1}'])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises((ValueError, TypeError, KeyError, AttributeError)):
        from_text(text)
