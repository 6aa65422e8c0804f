"""Each preset's model, built on the meta device, has the published number of parameters; names, search and the command."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from memir import cli
from memir.frontend import presets

# Fields of published config.json files that transformers 5 folds into others (rope_parameters, layer_types).
OLDER = {
    "partial_rotary_factor",
    "rope_local_base_freq",
    "rope_scaling",
    "rope_theta",
    "rotary_emb_base",
    "rotary_pct",
    "sliding_window_pattern",
}
# The brief of every list: a family that an issue asks for must not get lost.
FAMILIES = (
    *(
        "gpt2",
        "opt",
        "bloom",
        "gpt_neox",
        "gpt_neo",
        "gptj",
        "codegen",
        "biogpt",
        "gpt_bigcode",
        "starcoder2",
        "llama",
        "mistral",
    ),
    *("mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3_text", "phi", "phi3", "falcon", "olmo"),
    *("olmo2", "granite", "deepseek_v2", "deepseek_v3", "smollm3", "stablelm"),
)


def configuration(name: str) -> PretrainedConfig:
    preset = presets.get(name)
    assert preset is not None
    return AutoConfig.for_model(**preset.config)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.main, ["presets", *arguments])


@pytest.mark.parametrize("name", presets.names())
def test_the_model_has_the_published_number_of_parameters(name: str) -> None:
    preset = presets.get(name)
    assert preset is not None
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(configuration(name))
    assert [type(model).__name__] == preset.config["architectures"]
    count = sum(parameter.numel() for parameter in model.parameters())
    assert preset.agrees(count), f"{name}: {count:,} built, {preset.params:,} published by {preset.params_source}"


@pytest.mark.parametrize("name", presets.names())
def test_every_field_is_known_to_the_configuration_and_kept(name: str) -> None:
    preset = presets.get(name)
    assert preset is not None
    config = configuration(name)
    known = {"architectures", *inspect.signature(type(config).__init__).parameters, *config.attribute_map}
    file = Path(inspect.getfile(type(config)))
    modeling = file.with_name(file.name.replace("configuration_", "modeling_")).read_text()
    for field, value in preset.config.items():
        if field in OLDER or field == "model_type":
            continue
        kept = getattr(config, field)
        kept = kept.to_dict() if isinstance(kept, PretrainedConfig) else kept
        read = (
            field in known or f'getattr(config, "{field}"' in modeling
        )  # qwen3_moe reads head_dim, which its class does not declare
        assert read, f"{name}: transformers ignores {field}"
        assert value.items() <= kept.items() if isinstance(value, dict) else kept == value, f"{name}: {field}"


@pytest.mark.parametrize("name", presets.names())
def test_the_position_encoding_arrives(name: str) -> None:
    preset = presets.get(name)
    assert preset is not None
    given = preset.config
    rope = getattr(configuration(name), "rope_parameters", None)
    theta = given.get("rope_theta", given.get("rotary_emb_base"))
    if theta is None:
        assert rope is None or given.get("alibi"), f"{name} rotates without a stated base"
        return
    assert rope is not None
    outer = rope.get("full_attention", rope)
    assert outer["rope_theta"] == theta
    for field, value in (given.get("rope_scaling") or {"rope_type": "default"}).items():
        assert outer[field] == value, f"{name}: {field}"
    if "rope_local_base_freq" in given:
        assert rope["sliding_attention"]["rope_theta"] == given["rope_local_base_freq"]
    if "partial_rotary_factor" in given or "rotary_pct" in given:
        assert outer["partial_rotary_factor"] == given.get("partial_rotary_factor", given.get("rotary_pct"))


def test_sliding_windows_alternate_as_published() -> None:
    def kinds(name: str) -> list[str]:
        kept: list[str] = configuration(name).layer_types
        return kept

    assert kinds("gemma-2-2b")[:4] == ["sliding_attention", "full_attention"] * 2
    assert kinds("gemma-3-1b")[:7] == ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"]
    assert kinds("gpt-oss-20b")[:2] == ["sliding_attention", "full_attention"]
    assert set(kinds("qwen2.5-7b")) == {"full_attention"}


def test_at_least_sixty_models_of_all_families() -> None:
    assert len(presets.names()) >= 60
    types = {preset.config["model_type"] for preset in presets.search("")}
    assert not set(FAMILIES) - types


def test_the_data_file_is_sorted_and_each_part_has_a_line() -> None:
    text = resources.files("memir.frontend.presets").joinpath("presets.json").read_text(encoding="utf-8")
    records = json.loads(text)
    assert list(records) == sorted(records)
    parts = ("ids", "config", "published", "source")
    lines = ["{"]
    for name, record in records.items():
        assert tuple(record) == parts
        assert name == name.lower()
        body = [f'    "{part}": {json.dumps(record[part])}' for part in parts]
        lines += [f'  "{name}": {{', *[line + "," for line in body[:-1]], body[-1], "  },"]
    lines[-1] = "  }"
    assert text == "\n".join([*lines, "}", ""])


def test_published_figures_are_exact_or_say_how_they_were_rounded() -> None:
    text = resources.files("memir.frontend.presets").joinpath("presets.json").read_text(encoding="utf-8")
    exact = 0
    for name, record in json.loads(text).items():
        published = record["published"]
        exact += "exact" in published
        assert ("exact" in published) != ("digits" in published), name
        assert published.get("exact", True) is True
        assert published["source"], name
        assert record["source"], name
        if "digits" in published:
            assert published["params"] % 10 ** (len(str(published["params"])) - published["digits"]) == 0, name
    assert exact >= 100


def test_agrees_within_the_last_published_digit() -> None:
    rounded, exact = presets.get("opt-6.7b"), presets.get("gpt2")
    assert rounded is not None
    assert exact is not None
    assert (rounded.params, rounded.digits, rounded.params_exact) == (6_700_000_000, 2, False)
    assert [rounded.agrees(n) for n in (6_600_000_000, 6_600_000_001, 6_799_999_999, 6_800_000_000)] == [
        False,
        True,
        True,
        False,
    ]
    assert [exact.agrees(exact.params + n) for n in (-1, 0, 1)] == [False, True, False]


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("llama-3.1-8b", "llama-3.1-8b"),
        (" Llama-3.1-8B ", "llama-3.1-8b"),
        ("meta-llama/Llama-3.1-8B", "llama-3.1-8b"),
        ("META-LLAMA/meta-llama-3.1-8b-instruct", "llama-3.1-8b"),
        ("Mistral-7B-v0.1", "mistral-7b"),
        ("gpt2-small", "gpt2"),
        ("bigscience/bloom", "bloom-176b"),
        ("starcoder-15b", "starcoder"),
        ("no-such-model", None),
        ("", None),
    ],
)
def test_get_by_name_alias_and_id(typed: str, name: str | None) -> None:
    preset = presets.get(typed)
    assert (preset and preset.name) == name


def test_every_name_and_every_id_leads_to_its_own_preset() -> None:
    seen: dict[str, str] = {}
    for preset in presets.search(""):
        for written in (preset.name, preset.hf_id, *preset.aliases):
            assert seen.setdefault(written.lower(), preset.name) == preset.name, f"{written} is claimed twice"
            found = presets.get(written)
            assert found is not None
            assert found.name == preset.name


def test_a_configuration_is_the_callers_own() -> None:
    first, second = presets.get("gpt-neo-125m"), presets.get("gpt-neo-125m")
    assert first is not None
    assert second is not None
    assert first == second
    first.config["attention_types"][0][1] = 99
    first.config["num_layers"] = 99
    assert presets.get("gpt-neo-125m") == second
    (listed,) = presets.search("gpt-neo-125m")
    listed.config.clear()
    assert presets.get("gpt-neo-125m") == second


def test_nearest_names() -> None:
    assert presets.nearest("mistrall-7b")[0] == "mistral-7b"
    assert presets.nearest("LLAMA-3.1-9b")[0] == "llama-3.1-8b"
    assert len(presets.nearest("qwen2.5-8b", 5)) == len(set(presets.nearest("qwen2.5-8b", 5))) == 5
    assert presets.nearest("xyzzy") == []


def test_search() -> None:
    assert [preset.name for preset in presets.search("CODEGEN-2b")] == ["codegen-2b"]
    assert {preset.config["model_type"] for preset in presets.search("gpt_bigcode")} == {"gpt_bigcode"}
    assert len(presets.search("")) == len(presets.names())
    assert presets.search("no-such-model") == []


def test_the_command_lists_a_family_from_small_to_large() -> None:
    result = run("opt")
    assert (result.exit_code, result.stderr) == (0, "")
    rows = [line.split() for line in result.stdout.splitlines()]
    assert rows[0][:2] == ["name", "parameters"]
    names = [row[0] for row in rows[1:] if row[0].startswith("opt-")]
    assert names == [f"opt-{size}" for size in ("125m", "350m", "1.3b", "2.7b", "6.7b", "13b", "30b", "66b")]
    assert ["opt-125m", "125,239,296", "opt", "facebook/opt-125m"] in rows
    assert ["opt-6.7b", "~6.7B", "opt", "facebook/opt-6.7b"] in rows


def test_the_command_lists_everything_without_a_word_and_is_deterministic() -> None:
    first, second = run(), run()
    assert len(first.stdout.splitlines()) == len(presets.names()) + 1
    assert first.stdout == second.stdout


def test_the_command_in_json(tmp_path: Any) -> None:
    result = run("llama-3.1-8b", "--format", "json")
    assert result.exit_code == 0
    answer = json.loads(result.stdout)
    assert answer["schema_version"] == 1
    (record,) = answer["presets"]
    preset = presets.get("llama-3.1-8b")
    assert preset is not None
    assert (record["params"], record["params_exact"], record["params_digits"]) == (8_030_261_248, True, None)
    assert record["config"] == preset.config
    assert run("llama-3.1-8b", "--format", "json", "-o", str(tmp_path / "out.json")).stdout == ""
    assert json.loads((tmp_path / "out.json").read_text()) == answer


def test_an_unknown_word_is_a_no_with_the_nearest_names() -> None:
    result = run("mistrall-7b")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("no preset matches 'mistrall-7b'\n  nearest: mistral-7b, ")
    assert run("xyzzy").stderr == "no preset matches 'xyzzy'\n  memir presets  lists them all\n"


def test_neither_torch_nor_transformers_is_imported() -> None:
    code = (
        "import sys; from memir import cli\ntry: cli.main(['presets', 'gpt2'])\nexcept SystemExit as end: assert not end.code\n"
    )
    code += "assert not {'torch', 'transformers', 'sympy', 'numpy'} & set(sys.modules), 'heavy'"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
