"""The coverage benchmark's inputs: tiny configs of every type build, some run for real."""

from __future__ import annotations

import os
import time

import pytest
from transformers import CONFIG_MAPPING

from benchmarks.coverage import tiny
from benchmarks.coverage.isolate import ChildError, isolated
from benchmarks.coverage.real import real_step
from benchmarks.coverage.run import COLUMNS, Row, summary, write_table
from benchmarks.coverage.traced import is_pinned

TYPES = tiny.model_types()


def test_every_type_has_a_tiny_config():
    for model_type in TYPES:
        config = tiny.tiny_config(model_type)
        assert config.model_type == CONFIG_MAPPING[model_type].model_type
        text = config.get_text_config(decoder=True)
        assert (getattr(text, "vocab_size", None) or tiny.VOCAB) <= 260, model_type  # blt: 256 bytes and four specials


def test_overrides_are_of_types_that_exist():
    from benchmarks.coverage.overrides import FIXED_FIELDS, OVERRIDES

    assert set(OVERRIDES) | set(FIXED_FIELDS) <= set(TYPES)


@pytest.mark.parametrize(
    "model_type",
    [
        "gpt2",  # fields under other names
        "gemma2",  # kinds of layers in a list
        "deepseek_v3",  # latent attention, grouped experts
        "jamba",  # kinds of layers by period
        "llama4",  # nested text config
        "bert",  # needs is_decoder
        "bart",  # the decoder of an encoder-decoder type
    ],
)
def test_runs_for_real(model_type):
    run = real_step(model_type, batch=2, seq=16)
    assert (run.dtype, run.reason) == ("f32", "")
    assert 0 < run.num_parameters < 500_000


def test_why_a_type_does_not_run_is_said_with_its_place():
    run = real_step("gemma4_assistant")
    assert run.dtype == ""
    assert run.reason.startswith("ValueError: inputs_embeds and shared_kv_states cannot be None.")
    assert "(transformers/models/gemma4_assistant/modeling_gemma4_assistant.py:" in run.reason


def test_one_layer_of_every_kind_is_kept():
    default = CONFIG_MAPPING["gemma3_text"]()
    assert len(default.layer_types) > 2
    kept = tiny.tiny_config("gemma3_text")
    assert sorted(kept.layer_types) == sorted(set(default.layer_types))
    assert kept.num_hidden_layers == len(kept.layer_types)


def test_grouped_heads_stay_grouped():
    assert tiny.tiny_config("mistral").num_key_value_heads == 2
    assert tiny.tiny_config("llama").num_key_value_heads == 4


def test_merge_lays_nested_fields_over_and_drops_what_is_left_to_the_default():
    base = {"a": 1, "b": {"c": 2, "d": 3}, "e": 4}
    assert tiny.merge(base, {"b": {"c": 5}, "e": ..., "f": 6}) == {"a": 1, "b": {"c": 5, "d": 3}, "f": 6}


def test_a_child_answers():
    assert isolated(divmod, 17, 5, timeout=60) == (3, 2)


def test_a_child_that_dies_or_hangs_is_reported():
    with pytest.raises(ChildError, match="status 7"):
        isolated(os._exit, 7, timeout=60)
    with pytest.raises(ChildError, match=r"no answer within 0\.2 s"):
        isolated(time.sleep, 60, timeout=0.2)


def row(model_type: str, traced: str, reason: str = "") -> Row:
    return Row(model_type, traced != "", "f32" if traced else "", 10, traced, 5, ("B >= 2", "S <= 512"), reason)


def test_summary_counts_and_gives_every_reason():
    rows = [
        row("a", "symbolic"),
        row("b", "fit", "a loop"),
        row("c", "exit 3", "asks data (m.py:3)"),
        row("d", "", "ImportError: x"),
    ]
    text = summary(rows)
    assert "4 model types, 3 run one real training step" in text
    assert "2 of these (66.7 %) are traced with B and S in every size: 1 with both" in text
    assert "  b: fit: a loop" in text
    assert "  c: exit 3: asks data (m.py:3)" in text
    assert "  d: ImportError: x" in text


def test_pinned_is_one_value_however_it_is_said():
    assert is_pinned(("B >= 2", "S == 160"))
    assert is_pinned(("B >= 2", "S >= 160", "S <= 160"))
    assert not is_pinned(("B >= 2", "S >= 129", "S <= 192", "S % 32 == 0"))


def test_table_is_sorted(tmp_path):
    path = tmp_path / "table.csv"
    write_table([row("b", "symbolic"), row("a", "fit")], path)
    lines = path.read_text().splitlines()
    assert lines[0] == ",".join(COLUMNS)
    assert [line.split(",")[0] for line in lines[1:]] == ["a", "b"]
    assert lines[1] == "a,yes,f32,10,fit,5,B >= 2; S <= 512,"
