"""What a sweep prints: screens, CSV, JSON and its schema."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import jsonschema
import pytest

from memir.hardware import Gpu
from memir.recipe import Lora, Recipe
from memir.sweep.pool import Step
from memir.sweep.run import Table, solve, sweep
from memir.sweep.screen import WIDTH, to_text
from memir.sweep.tables import to_csv, to_json
from tests.programs import step

SCHEMA = json.loads((Path(__file__).parent.parent / "docs" / "sweep.schema.json").read_text(encoding="utf-8"))
GPU = Gpu("1MiB", 2**20)
ONE, OTHER = Recipe(), Recipe(checkpoint="full", lora=Lora(targets=("q", "v")))


def trace(batch: int, seq: int | None) -> Step:
    return Step(step(), seq=seq or 64, name="tiny", max_seq=900, versions=(("memir", "0"),), assumptions=("balanced routing",))


def lines(table: Table) -> list[str]:
    text = to_text(table)
    assert text.endswith("\n")
    return text.splitlines()


def test_one_recipe_is_a_grid() -> None:
    assert lines(sweep({ONE: trace}, (1, 2, 16), (8, 17, 64, 300, 1024), GPU))[:10] == [
        "tiny   MiB at the peak   cuda, bf16, adamw",
        "",
        "  B \\ S     8     17     64    300    1024",
        "      1  0.03a  0.03a  0.06b  0.25b      ?",
        "      2  0.03a  0.03a  0.11b  0.50b      ?",
        "     16  0.11b  0.23b  0.85b  3.99b*     ?",
        "",
        "  a  optimizer aten._foreach_sqrt   (4 cells)",
        "  b  backward aten._log_softmax_backward_data @head (model.py:31)   (8 cells)",
        "  ? 3 cells: tiny accepts sequences of at most 900 tokens",
    ]


def test_the_rest_says_what_the_marks_mean_and_what_was_assumed() -> None:
    found = lines(sweep({ONE: trace}, (1, 16), (8, 300), GPU))
    assert "  * does not fit 1MiB (allocated bytes)" in found
    assert "  recipe: target cuda, dtype bf16, " in "\n".join(found)
    assert found[-1] == "  assumed: balanced routing"
    assert max(map(len, found)) <= WIDTH


def test_a_grid_that_is_too_wide_is_a_line_a_cell() -> None:
    found = lines(sweep({ONE: trace}, (1, 2), tuple(range(1, 41))))
    assert found[2].split() == ["B", "S", "peak", "allocated", "between", "steps", "where"]
    assert found[3].startswith("  1   1  0.03       0.03      0.00       optimizer aten._foreach_sqrt")
    assert len([line for line in found if "aten." in line]) == 80


def test_several_recipes_are_told_apart_by_what_differs() -> None:
    found = lines(sweep({ONE: trace, OTHER: trace}, (16,), (17, 1024), GPU))
    assert found[2].split()[:4] == ["checkpoint", "lora", "B", "S"]
    assert found[3].split()[:5] == ["none", "none", "16", "17", "0.23"]
    assert found[6].split("  ")[-1] == "not known: tiny accepts sequences of at most 900 tokens"
    assert found[6].split()[:5] == ["full", "r=16,alpha=32,targets=q,v", "16", "1024", "?"]


def test_the_largest_batch() -> None:
    assert lines(solve({ONE: trace}, "B", (64, 300, 1024), GPU))[:8] == [
        "tiny   the largest batch that fits 1MiB (allocated bytes)   cuda, bf16, adamw",
        "",
        "     S  largest B   MiB  next   MiB  ended by",
        "    64         18  0.96    19  1.01  backward aten._log_softmax_backward_data @head (model.py:31)",
        "   300          3  0.75     4  1.00  backward aten._log_softmax_backward_data @head (model.py:31)",
        "  1024          ?                    tiny accepts sequences of at most 900 tokens",
        "",
        "  peak = 872*B*S + 3000   backward aten._log_softmax_backward_data @head (model.py:31)",
    ]


def test_the_longest_sequence() -> None:
    assert lines(solve({ONE: trace}, "S", (1, 2, 5000), GPU))[2:6] == [
        "     B  largest S   MiB  next   MiB  ended by",
        "     1        900  0.75              tiny accepts sequences of at most 900 tokens",
        "     2        599  1.00   600  1.00  backward aten._log_softmax_backward_data @head (model.py:31)",
        "  5000       none           1  4.16  backward aten._log_softmax_backward_data @head (model.py:31)",
    ]


TABLES = [
    pytest.param(sweep({ONE: trace, OTHER: trace}, (1, 16), (17, 300, 1024), GPU), id="cells"),
    pytest.param(sweep({ONE: trace}, (1,), None), id="default"),
    pytest.param(solve({ONE: trace, OTHER: trace}, "B", (64, 1024), GPU), id="batches"),
    pytest.param(solve({ONE: trace}, "S", (1, 2, 5000), GPU), id="sequences"),
]


@pytest.mark.parametrize("table", TABLES)
def test_json_follows_its_schema(table: Table) -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    document = json.loads(to_json(table, "model.py"))
    jsonschema.validate(document, SCHEMA, cls=jsonschema.Draft202012Validator)
    assert document["recipes"][0]["assumptions"] == ["balanced routing"]
    assert len(document["rows"]) == len(table.lines)


@pytest.mark.parametrize("table", TABLES)
def test_csv_is_the_rows_of_the_json(table: Table) -> None:
    document = json.loads(to_json(table, "model.py"))
    read = list(csv.DictReader(io.StringIO(to_csv(table))))
    for row, line in zip(document["rows"], read, strict=True):
        options = document["recipes"][row.pop("recipe")]
        options = {name: value for name, value in options.items() if name != "assumptions"}
        assert line == {name: shown(value) for name, value in {**options, **row}.items()}


def shown(value: object) -> str:
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def test_a_row_of_the_json() -> None:
    document = json.loads(to_json(sweep({ONE: trace}, (16,), (300, 1024), GPU), "model.py"))
    assert (document["target"], document["name"], document["gpu"]) == ("model.py", "tiny", {"name": "1MiB", "bytes": 2**20})
    known, unknown = document["rows"]
    assert known == {
        "recipe": 0,
        "B": 16,
        "S": 300,
        "requested_bytes": 872 * 4800 + 3000,
        "allocated_bytes": 38_400 + 1024 + 2048 + 307_200 + 2 * 1_920_000,
        "steady_requested_bytes": 8 * 4800 + 3000,
        "steady_allocated_bytes": 38_400 + 1024 + 2048,
        "phase": "backward",
        "op": "aten._log_softmax_backward_data",
        "module": "head",
        "source": "model.py:31",
        "fits": False,
        "proven": True,
        "reason": "",
    }
    assert {name for name, value in unknown.items() if value is None} == {*list(known)[3:12]}
    assert (unknown["proven"], unknown["reason"]) == (False, "tiny accepts sequences of at most 900 tokens")
