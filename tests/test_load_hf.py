"""Hugging Face models: a config (folder, file, preset, cached id) to a module on meta, called as a training loop calls it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from memir.frontend.load import load_target
from memir.frontend.loaded import LoadedModel
from memir.recipe import Recipe

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 64}
LLAMA = SMALL | {"model_type": "llama"}


def load(
    folder: Path, values: dict[str, object], recipe: Recipe | None = None, trust: bool = False, **sets: str
) -> LoadedModel:
    (folder / "config.json").write_text(json.dumps(values))
    return load_target(str(folder), recipe=recipe or Recipe(), sets=sets, trust_remote_code=trust)


def test_llama(tmp_path: Path) -> None:
    loaded = load(tmp_path, LLAMA)
    assert (loaded.name, loaded.is_hf, loaded.max_seq) == ("LlamaForCausalLM", True, None)
    assert loaded.layers == ("model.layers.0", "model.layers.1")
    assert (loaded.call.ids, loaded.call.targets, loaded.call.mask) == ("input_ids", "labels", None)
    assert (loaded.call.constants, loaded.call.loss) == ((("use_cache", False),), "attr:loss")
    assert loaded.source.startswith("modeling_llama.py:")
    assert loaded.config["hidden_size"] == 16
    assert loaded.module.training
    assert {p.device.type for p in loaded.module.parameters()} == {"meta"}
    assert {p.dtype for p in loaded.module.parameters()} == {torch.bfloat16}
    assert all(Path(root).is_dir() for root in loaded.roots)
    assert [Path(root).name for root in loaded.roots] == ["llama", "loss"]


def test_same_tensors_as_transformers_itself(tmp_path: Path) -> None:
    """`from_config(config, dtype=...)` on the CPU: same names, shapes, dtypes; inv_freq stays float32."""
    loaded = load(tmp_path, LLAMA)
    real = AutoModelForCausalLM.from_config(LlamaConfig(**SMALL), dtype=torch.bfloat16)

    def tensors(module: torch.nn.Module) -> list[tuple[str, torch.Size, torch.dtype]]:
        return [(n, t.shape, t.dtype) for n, t in [*module.named_parameters(), *module.named_buffers()]]

    assert tensors(loaded.module) == tensors(real)
    assert loaded.module.get_buffer("model.rotary_emb.inv_freq").dtype == torch.float32


def test_file_and_folder_are_the_same(tmp_path: Path) -> None:
    folder = load(tmp_path, LLAMA)
    file = load_target(str(tmp_path / "config.json"), recipe=Recipe())
    assert [p.shape for p in file.module.parameters()] == [p.shape for p in folder.module.parameters()]


@pytest.mark.parametrize(("attention", "expected"), [("sdpa", "sdpa"), ("eager", "eager")])
def test_attention_of_the_recipe(tmp_path: Path, attention: str, expected: str) -> None:
    assert load(tmp_path, LLAMA, Recipe(attention=attention)).module.config._attn_implementation == expected


def test_model_without_sdpa_says_so(tmp_path: Path) -> None:
    loaded = load(tmp_path, {"model_type": "bloom", "hidden_size": 16, "n_layer": 1, "n_head": 2, "vocab_size": 64})
    assert loaded.assumptions == ["eager attention: transformers has no sdpa attention for bloom"]


def test_mask_only_for_a_padded_batch(tmp_path: Path) -> None:
    assert load(tmp_path, LLAMA, Recipe(batch_kind="padded")).call.mask == "attention_mask"


@pytest.mark.parametrize(
    ("values", "limit"),
    [
        ({"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 48}, 48),
        (SMALL | {"model_type": "opt", "ffn_dim": 32, "word_embed_proj_dim": 16, "max_position_embeddings": 48}, 48),
        (SMALL | {"model_type": "biogpt", "max_position_embeddings": 48}, 48),
        ({"model_type": "gptj", "n_embd": 16, "n_layer": 1, "n_head": 2, "rotary_dim": 4, "n_positions": 48}, 48),
        ({"model_type": "gpt_neo", "hidden_size": 16, "num_layers": 2, "num_heads": 2, "max_position_embeddings": 48}
         | {"attention_types": [[["global", "local"], 1]]}, 48),
        (LLAMA | {"max_position_embeddings": 48}, None),
        (SMALL | {"model_type": "qwen3", "head_dim": 8, "num_key_value_heads": 2}, None),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else str(value),
)  # fmt: skip
def test_limit_only_where_more_really_fails(tmp_path: Path, values: dict[str, object], limit: int | None) -> None:
    assert load(tmp_path, values).max_seq == limit


def test_layers_of_a_mixture_of_experts_are_not_its_experts(tmp_path: Path) -> None:
    loaded = load(tmp_path, SMALL | {"model_type": "mixtral", "num_local_experts": 4, "num_key_value_heads": 2})
    assert loaded.layers == ("model.layers.0", "model.layers.1")


def test_numbers_that_json_lacks(tmp_path: Path) -> None:
    values = {"model_type": "mamba2", "hidden_size": 16, "num_hidden_layers": 1, "num_heads": 4, "head_dim": 8, "n_groups": 1}
    loaded = load(tmp_path, values | {"time_step_limit": [0.0, {"__float__": "Infinity"}]})
    assert loaded.config["time_step_limit"][1] == float("inf")
    assert loaded.assumptions == []  # no word on attention, which it has none of


def test_layers_of_the_text_and_not_of_the_images(tmp_path: Path) -> None:
    vision = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 256, "image_size": 16}
    loaded = load(tmp_path, SMALL | {"model_type": "git", "vision_config": vision | {"patch_size": 8}})
    assert loaded.layers == ("git.encoder.layer.0", "git.encoder.layer.1")


def test_decoder_half_when_the_config_names_it(tmp_path: Path) -> None:
    small = {"d_model": 16, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 32, "vocab_size": 64}
    loaded = load(tmp_path, small | {"model_type": "bart", "architectures": ["BartForCausalLM"]})
    assert loaded.name == "BartForCausalLM"


def test_options_in_the_config(tmp_path: Path) -> None:
    loaded = load(tmp_path, LLAMA, num_hidden_layers="3", tie_word_embeddings="true", rms_norm_eps="1e-3")
    assert len(loaded.layers) == 3
    module = loaded.module
    assert module.get_parameter("lm_head.weight") is module.get_parameter("model.embed_tokens.weight")
    assert loaded.config["rms_norm_eps"] == 1e-3


def test_options_by_the_common_name(tmp_path: Path) -> None:
    loaded = load(
        tmp_path, {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2}, hidden_size="32", num_hidden_layers="2"
    )
    assert loaded.module.get_parameter("transformer.wte.weight").shape[1] == 32
    assert len(loaded.layers) == 2


def test_lists_with_an_entry_a_layer_follow_the_depth(tmp_path: Path) -> None:
    kinds = ["sliding_attention", "full_attention"] * 2
    values = SMALL | {"model_type": "gemma3_text", "num_hidden_layers": 4, "head_dim": 8, "layer_types": kinds}
    loaded = load(tmp_path, values | {"num_key_value_heads": 2}, num_hidden_layers="6")
    assert loaded.config["layer_types"] == ["sliding_attention", "full_attention"] * 3
    assert "layer_types fitted to 6 layers" in loaded.assumptions
    assert len(loaded.layers) == 6


def test_quantization_is_left_out_and_said(tmp_path: Path) -> None:
    loaded = load(tmp_path, LLAMA | {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}})
    assert any("quantization_config is ignored" in line for line in loaded.assumptions)
    assert loaded.dtype == torch.bfloat16


def test_known_type_with_remote_code_uses_transformers_own(tmp_path: Path) -> None:
    (tmp_path / "modeling_x.py").write_text("raise RuntimeError('this code ran')\n")
    loaded = load(tmp_path, LLAMA | {"auto_map": {"AutoModelForCausalLM": "modeling_x.X"}})
    assert loaded.name == "LlamaForCausalLM"
    assert any("not the repository's" in line for line in loaded.assumptions)


REMOTE = """
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

class NewConfig(PretrainedConfig):
    model_type = "memir-test-new"
    def __init__(self, width=8, vocab_size=32, **kwargs):
        self.width, self.vocab_size = width, vocab_size
        super().__init__(**kwargs)

class NewModel(PreTrainedModel):
    config_class = NewConfig
    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.width)
        self.post_init()
    def _init_weights(self, module): pass
    def forward(self, input_ids, labels=None, **kwargs):
        logits = self.embed(input_ids) @ self.embed.weight.T
        return CausalLMOutput(loss=logits.mean(), logits=logits)
"""


def test_remote_code_with_the_flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers.dynamic_module_utils as dynamic

    monkeypatch.setattr(dynamic, "HF_MODULES_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("sys.path", [*__import__("sys").path, str(tmp_path / "cache")])
    repository = tmp_path / "repository"
    repository.mkdir()
    (repository / "modeling_new.py").write_text(REMOTE)
    auto_map = {"AutoConfig": "modeling_new.NewConfig", "AutoModelForCausalLM": "modeling_new.NewModel"}
    values = {"model_type": "memir-test-new", "auto_map": auto_map, "width": 12}
    loaded = load(repository, values, trust=True, width="20")
    assert loaded.name == "NewModel"
    assert loaded.module.get_parameter("embed.weight").shape == (32, 20)
    assert loaded.call.loss == "attr:loss"


def test_id_in_the_local_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    snapshot = tmp_path / "models--some--model" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (tmp_path / "models--some--model" / "refs").mkdir()
    (tmp_path / "models--some--model" / "refs" / "main").write_text("0" * 40)
    (snapshot / "config.json").write_text(json.dumps(LLAMA))
    monkeypatch.setattr("huggingface_hub.file_download.HF_HUB_CACHE", str(tmp_path), raising=False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    loaded = load_target("some/model", recipe=Recipe())
    assert (loaded.name, loaded.target) == ("LlamaForCausalLM", "some/model")


def test_preset() -> None:
    loaded = load_target("gpt2", recipe=Recipe(), sets={"n_layer": "1"})
    assert (loaded.name, loaded.max_seq, loaded.layers) == ("gpt2", 1024, ("transformer.h.0",))
    assert sum(p.numel() for p in loaded.module.parameters()) == 50257 * 768 + 1024 * 768 + 7_087_872 + 2 * 768
