"""What a report and a program are printed as: exact text on a step worked by hand, and the promises each format makes."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import sympy
from click import unstyle
from hypothesis import given, settings
from hypothesis import strategies as st

from memir.analysis.words import Unit, count, plural, shortened, small_bytes
from memir.backends.formula import Formula
from memir.backends.ir import Ir
from memir.backends.json import Json, as_dict
from memir.backends.markdown import Markdown
from memir.backends.text import Text, bar, sparkline
from memir.errors import UsageError
from memir.ir.core import Program
from memir.ir.parser import parse
from memir.ir.printer import to_text
from memir.recipe import Recipe
from memir.report import Report, Subject, build_report
from tests.programs import points, programs, step

AT = {"B": 2, "S": 500}
SCHEMA = json.loads((Path(__file__).parent.parent / "docs" / "analyze.schema.json").read_text(encoding="utf-8"))
SUBJECT = Subject(
    target="model.py",
    name="GPT",
    source="model.py:118",
    num_parameters=123_700_000,
    num_trainable=123_700_000,
    num_layers=12,
    max_seq=1024,
    versions=(("memir", "0.1.0"), ("torch", "2.13.0")),
)


def report(**others: Any) -> Report:
    return build_report(step(), AT, Recipe(), SUBJECT, assumptions=("steady state",), **others)


def emitted(backend: Any, program: Program) -> str:
    out = io.StringIO()
    backend.emit(program, out)
    return out.getvalue()


TEXT = """\
GPT (model.py:118)   123.7 M parameters, 12 layers, bf16, adamw   B=2, S=500

  peak    0.83 MiB   in backward at aten._log_softmax_backward_data (model.py:31, head)
  between steps 0.01   forward 0.46   backward 0.83   optimizer 0.04   allocated 0.84
  forward ▁▁▅  backward █▅▂  optimizer ▁▁▁

  at the peak                                          MiB
  saved for backward   ████████████▊                  0.44   53 %
  temporary            ███████████                    0.38   46 %
  inputs               ▎                              0.01    1 %

  largest there    MiB  count  kind
                  0.38      1  saved for backward aten.mm  @head  model.py:30
                  0.38      1  temporary          …en._log_softmax_backward_data  @head  model.py:31
                  0.06      1  saved for backward aten.mm  @layers.*.up  model.py:20
                  0.01      1  inputs             @ids
                  0.00      1  optimizer state    @w
                  0.00      1  parameters         @w

  peak = Max(8*B*S + 34000, 872*B*S + 3000)   valid for S <= 1024, B >= 1
    B*S <= 35   0.03 MiB, then 16 bytes a token   optimizer aten._foreach_sqrt
    B*S >= 36   0.03 MiB, then 1.70 KiB a token   backward …_log_softmax_backward_data (model.py:31)
  recipe: target cuda, dtype bf16, amp none, attention sdpa, optimizer adamw, optimizer-impl
    default, clip 0, accumulate 1, checkpoint none, lora none, quantize none, loss model, dropout
    on, mode train, keep-outputs off, function off, zero-grad last, batch-kind full
  assumed: steady state
"""


def test_the_screen() -> None:
    assert Text().render(report()) == TEXT


def test_colours_only_when_asked() -> None:
    assert "\x1b" not in Text().render(report())
    colored = Text(color=True).render(report())
    assert "\x1b[1m" in colored
    assert unstyle(colored) == Text().render(report())


LONG = st.text(st.characters(categories=["L", "N", "P", "Zs"]), max_size=300)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_the_screen_is_at_most_30_lines_of_100_columns(data: st.DataObject) -> None:
    program = data.draw(programs())
    env = data.draw(points(program))
    subject = Subject(name=data.draw(LONG), source=data.draw(LONG), num_parameters=10**11, num_layers=5)
    notes = data.draw(st.lists(LONG, max_size=8))
    found = build_report(program, env, Recipe(), subject, assumptions=notes, inconclusive=notes)
    lines = Text().render(found).splitlines()
    assert len(lines) <= 30
    assert max(map(len, lines)) <= 100


def test_units_and_words() -> None:
    assert Unit.of(10**9).text(10**9) == "0.93 GiB"
    assert Unit.of(10**7).text(10**7) == "9.54 MiB"
    assert [small_bytes(n) for n in (0, 100, 512, 600_000, 2**30)] == [
        "0 bytes",
        "100 bytes",
        "0.50 KiB",
        "0.57 MiB",
        "1.00 GiB",
    ]
    assert [count(n) for n in (12, 1500, 123_700_000, 8_030_000_000)] == ["12", "1.5 K", "123.7 M", "8.03 B"]
    assert (plural(1, "storage"), plural(1234, "storage")) == ("1 storage", "1,234 storages")
    assert (shortened("abcdef", 6), shortened("abcdef", 4)) == ("abcdef", "…def")


def test_bars_and_sparklines() -> None:
    assert (bar(0, 8), bar(1e-9, 8), bar(0.5, 8), bar(1, 8)) == ("", "▏", "████", "████████")
    assert sparkline((0, 1, 2, 3, 4, 5, 6, 7), 8, 8) == "▁▂▃▄▅▆▇█"
    assert sparkline((1, 8, 1, 1), 2, 8) == "█▂"
    assert sparkline((5,), 10, 0) == "█"


def test_json_follows_its_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    found = json.loads(Json().render(report()))
    jsonschema.validate(found, SCHEMA, cls=jsonschema.Draft202012Validator)
    assert set(found) == set(SCHEMA["properties"])
    assert found["peak"] == {
        "requested_bytes": 875_000,
        "allocated_bytes": 876_032,
        "phase": "backward",
        "op": "aten._log_softmax_backward_data",
        "module": "head",
        "source": "model.py:31",
    }
    assert found["steady"] == {"requested_bytes": 11_000, "allocated_bytes": 11_264}
    assert found["phases"] == {"forward": 479_096, "backward": 875_000, "optimizer": 42_000}
    assert found["symbols"] == AT
    assert found["versions"] == {"memir": "0.1.0", "torch": "2.13.0"}
    assert found["formula"]["regions"][0] == {"when": "B*S <= 35", "bytes": "8*B*S + 34000", "phase": "optimizer", "module": ""}
    assert found["recipe"]["lora"] is None
    assert Json(indent=0).render(report()).count("\n") == 1


def test_the_schema_refuses_what_is_not_a_report() -> None:
    for key, value in (("peak", {}), ("schema_version", 2), ("top", [{"bytes": -1}]), ("breakdown", {"parameter": 1})):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**as_dict(report()), key: value}, SCHEMA)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_json_of_any_program_follows_the_schema_and_its_formula_gives_its_bytes(data: st.DataObject) -> None:
    program = data.draw(programs(max_ops=8))
    env = data.draw(points(program))
    found = json.loads(Json().render(build_report(program, env, Recipe())))
    jsonschema.validate(found, SCHEMA)
    numbers = {name: sympy.Integer(value) for name, value in found["symbols"].items()}
    assert sympy.sympify(found["formula"]["peak"], locals=numbers) == found["peak"]["requested_bytes"]
    assert sympy.sympify(found["formula"]["steady"], locals=numbers) == found["steady"]["requested_bytes"]
    assert sum(bool(sympy.sympify(region["when"], locals=numbers)) for region in found["formula"]["regions"]) == 1


def test_markdown() -> None:
    page = Markdown().render(report())
    assert page.startswith(
        "## GPT\n\n`model.py:118`, 123.7 M parameters, 12 layers, B=2, S=500\n\n**Peak 0.83 MiB** in backward at "
    )
    assert "| activation | 0.44 | 53.0 % |" in page
    assert "| 0.06 | 1 | activation | `aten.mm` | `layers.*.up` | `model.py:20` |" in page
    assert "peak = Max(8*B*S + 34000, 872*B*S + 3000)\nsteady = 8*B*S + 3000\n" in page
    assert "| `B*S <= 35` | `8*B*S + 34000` | in optimizer at `aten._foreach_sqrt` |" in page
    assert "- zero-grad: last" in page
    assert "\x1b" not in page
    for table in re.findall(r"(?:^\|.*\n)+", page, flags=re.MULTILINE):
        assert len({len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines()}) == 1


def test_markdown_escapes_bars_in_names() -> None:
    found = build_report(step(), AT, subject=Subject(name="a|b"), assumptions=("x | y",))
    page = Markdown().render(found)
    assert page.startswith("## a\\|b\n")
    assert "- x \\| y" in page


def test_formulas_are_a_line_each() -> None:
    assert emitted(Formula(), step()) == (
        "peak = Max(8*B*S + 34000, 872*B*S + 3000)\n"
        "steady = 8*B*S + 3000\n"
        "forward = 472*B*S + 7096\n"
        "backward = Max(136*B*S + 4000, 872*B*S + 3000)\n"
        "optimizer = 8*B*S + 34000\n"
        "# 8*B*S + 34000: in optimizer at aten._foreach_sqrt, where B*S <= 35\n"
        "# 872*B*S + 3000: in backward at aten._log_softmax_backward_data (model.py:31, head), where B*S >= 36\n"
        "# bytes, valid for S <= 1024, B >= 1\n"
    )


def test_formulas_in_latex() -> None:
    program = parse("memir 1\nprogram @p\ndim B, S\nstorage $a : 8*B*S^2 + 4*ceil(S/64) buffer live_in live_out\n")
    assert emitted(Formula(latex=True), program) == (
        "\\mathrm{peak} = 8 B S^{2} + 4 \\left\\lceil{\\frac{S}{64}}\\right\\rceil\n"
        "\\mathrm{steady} = 8 B S^{2} + 4 \\left\\lceil{\\frac{S}{64}}\\right\\rceil\n"
    )
    assert emitted(Formula(latex=True), step()).startswith(r"\mathrm{peak} = \max\left(8 B S + 34000, 872 B S + 3000\right)")


def test_the_program_with_live_bytes_parses_back() -> None:
    assert emitted(Ir(), step()) == to_text(step())
    text = emitted(Ir(live=True), step())
    assert parse(text) == step()
    lines = text.splitlines()
    assert "# start: 8*B*S + 3000 bytes: resident only" in lines
    after = lines.index(next(line for line in lines if "scratch 4096" in line))
    assert lines[after + 1 : after + 3] == [
        "    # while: 472*B*S + 7096 bytes",
        "    # after: 472*B*S + 3000 bytes: $h $logits",
    ]


def test_live_names_are_cut_to_the_youngest() -> None:
    text = emitted(Ir(live=True, names=1), step())
    assert "    # after: 472*B*S + 3000 bytes: $logits and 1 more" in text


@given(programs())
@settings(deadline=None)
def test_any_program_with_live_bytes_parses_back(program: Program) -> None:
    assert parse(emitted(Ir(live=True, names=0), program)) == program


def test_backends_that_report_take_a_bare_program() -> None:
    for backend in (Text(batch=2, seq=500), Markdown(batch=2, seq=500)):
        assert "0.83 MiB" in emitted(backend, step())
    assert json.loads(emitted(Json(batch=2, seq=500), step()))["peak"]["requested_bytes"] == 875_000
    with pytest.raises(UsageError, match="symbol L"):
        Text().emit(parse("memir 1\nprogram @p\ndim L\nstorage $a : 8*L buffer live_in live_out\n"), io.StringIO())


def test_an_empty_program_has_a_report_in_every_format() -> None:
    empty = parse("memir 1\nprogram @empty\n")
    assert "peak" in emitted(Text(), empty)
    assert "**Peak 0.00 MiB** at the start of the step" in emitted(Markdown(), empty)
    jsonschema.validate(json.loads(emitted(Json(), empty)), SCHEMA)
    assert emitted(Formula(), empty).startswith("peak = 0\nsteady = 0\n")
