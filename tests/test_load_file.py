"""A plain model.py is understood as it is: its class, configuration, entry, loss, layers and limit."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from memir.frontend.discover import IDS_NAMES
from memir.frontend.load import load_target
from memir.frontend.loaded import LoadedModel
from memir.recipe import Recipe

ROOT = Path(__file__).parents[1]
CASES = ROOT / "tests" / "cases"
HEAD = "import torch\nimport torch.nn.functional as F\nfrom torch import nn\n"
BODY = """
class GPT(nn.Module):
    def __init__(self, width=16, vocab_size=40):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, width)
        self.head = nn.Linear(width, vocab_size)
"""


def load(target: str | Path, recipe: Recipe | None = None, inputs: str | None = None, **sets: str) -> LoadedModel:
    return load_target(str(target), recipe=recipe or Recipe(), sets=sets, inputs=inputs)


def write(folder: Path, text: str, name: str = "model.py") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def with_forward(folder: Path, forward: str, head: str = HEAD) -> Path:
    lines = "".join(f"    {line}\n" for line in forward.splitlines())
    return write(folder, f"{head}{BODY}\n{lines}")


def test_example_gpt() -> None:
    loaded = load(ROOT / "examples" / "gpt.py", n_layer="3", n_embd="32", n_head="4", bias="false")
    assert (loaded.name, loaded.max_seq, loaded.layers) == ("GPT", 1024, ("layers.0", "layers.1", "layers.2"))
    assert (loaded.call.ids, loaded.call.targets, loaded.call.loss) == ("ids", "targets", "item:1")
    assert loaded.source.endswith("gpt.py:83")
    assert loaded.config["n_embd"] == 32
    assert loaded.config["bias"] is False
    assert loaded.roots == (str(ROOT / "examples"),)
    assert loaded.module.training
    assert not loaded.is_hf
    assert loaded.assumptions == []
    module = loaded.module
    assert {p.device.type for p in module.parameters()} == {"meta"}
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
    assert module.get_submodule("head").weight is module.get_submodule("tokens").weight


def test_published_sizes_of_the_examples() -> None:
    assert sum(p.numel() for p in load(ROOT / "examples" / "gpt.py").module.parameters()) == 124_475_904
    assert sum(p.numel() for p in load(ROOT / "examples" / "llama.py").module.parameters()) == 1_100_048_384


def test_example_llama_gives_only_logits() -> None:
    loaded = load(f"{ROOT / 'examples' / 'llama.py'}:small", n_layers="1")
    assert (loaded.call.ids, loaded.call.targets, loaded.call.loss) == ("tokens", None, "logits:return")
    assert any("only logits" in line for line in loaded.assumptions)
    assert loaded.module.get_buffer("cos").dtype == torch.bfloat16  # as model.to(dtype) does
    assert loaded.max_seq == 8192


@pytest.mark.parametrize(("dtype", "expected"), [("bf16", torch.bfloat16), ("f16", torch.float16), ("f32", torch.float32)])
def test_dtype_of_the_recipe(dtype: str, expected: torch.dtype) -> None:
    assert load(CASES / "stored_loss.py", Recipe(dtype=dtype)).dtype == expected


def test_loss_stored_on_the_module_and_tied_weights() -> None:
    loaded = load(CASES / "stored_loss.py")
    assert loaded.call.loss == "module:last_loss"
    assert loaded.module.last_loss is None  # the trial left nothing behind
    assert len(loaded.layers) == 3
    assert len(list(loaded.module.modules())) == 3 * 2 + 4
    assert sum(p.numel() for p in loaded.module.parameters()) == 101 * 32 + 3 * 32 * 32
    assert load(CASES / "stored_loss.py", n_kv_heads="2").config["n_kv_heads"] == 2
    assert "n_kv_heads" not in load(CASES / "stored_loss.py", n_kv_heads="none").config


def test_package_with_open_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    loaded = load(CASES / "mini" / "model.py")
    assert (loaded.config["kind"], loaded.config["depth"], loaded.max_seq) == ("small", 2, 64)
    assert any("vocab_size=97" in line and "kind=small" in line for line in loaded.assumptions)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "built 2" in captured.err


def test_open_configuration_with_options() -> None:
    assert load(CASES / "mini" / "model.py", kind="large").config["depth"] == 4
    partly = load(CASES / "mini" / "model.py", width="24")
    assert (partly.config["width"], partly.config["depth"]) == (24, 2)
    assert any("kind=small" in line for line in partly.assumptions)
    both = load(CASES / "mini" / "model.py", width="24", depth="3", vocab_size="11")
    assert (both.config["depth"], both.config["vocab_size"]) == (3, 11)
    assert both.module.get_parameter("embed.weight").shape == (11, 24)


def test_factories_and_class_methods() -> None:
    path = CASES / "named_sizes.py"
    assert load(path).config["n_layer"] == 4  # the file's one top-level class
    assert load(f"{path}:tiny").config["n_embd"] == 16
    assert load(f"{path}:GPT").name == "GPT"
    assert load(f"{path}:GPT.from_name", name="wide").config["n_embd"] == 64
    assert load(f"{path}:GPT.from_name", name="wide", n_layer="1").layers == ("transformer.h.0",)
    assert load(f"{path}:by_size", n_layer="3").layers == tuple(f"transformer.h.{i}" for i in range(3))
    assert load(path).max_seq == 40


def test_cache_on_the_gpu_complex_factors_and_inference_mode() -> None:
    loaded = load(f"{CASES / 'with_cache.py'}:model")
    assert loaded.call.constants == (("start_pos", 0),)
    assert any("without gradients" in line for line in loaded.assumptions)
    assert loaded.module.freqs_cis.dtype == torch.complex64
    assert loaded.module.freqs_cis.device.type == "meta"
    assert loaded.module.get_submodule("layers.0").cache_k.device.type == "meta"


@pytest.mark.parametrize(
    ("forward", "loss"),
    [
        (
            "def forward(self, idx, targets):\n    x = self.head(self.embed(idx))\n    return F.cross_entropy(x.mT, targets)",
            "return",
        ),
        ("def forward(self, idx, targets):\n    x = self.head(self.embed(idx))\n    return x.mean(), x", "item:0"),
        (
            "def forward(self, idx, targets):\n    x = self.head(self.embed(idx))\n    return {'logits': x, 'loss': x.mean()}",
            "item:loss",
        ),
        ("def forward(self, idx, targets):\n    x = self.head(self.embed(idx))\n    return Out(x, x.mean())", "attr:loss"),
        ("def forward(self, idx, targets):\n    x = self.head(self.embed(idx))\n    return Obj(x, x.mean())", "attr:loss"),
        ("def forward(self, idx):\n    return self.head(self.embed(idx)), None", "logits:item:0"),
        ("def forward(self, idx):\n    return Obj(self.head(self.embed(idx)), None)", "logits:attr:logits"),
        ("def forward(self, idx):\n    return [self.embed(idx), self.head(self.embed(idx))][1]", "logits:return"),
    ],
)
def test_where_the_loss_is(tmp_path: Path, forward: str, loss: str) -> None:
    head = (
        HEAD
        + "from typing import NamedTuple, Any\n"
        + "class Out(NamedTuple):\n    logits: Any\n    loss: Any\n\n"
        + "class Obj:\n    def __init__(self, logits, loss): self.logits, self.loss = logits, loss\n"
    )
    assert load(with_forward(tmp_path, forward, head)).call.loss == loss


def test_several_scalars_are_said(tmp_path: Path) -> None:
    path = with_forward(
        tmp_path, "def forward(self, idx, y):\n    x = self.head(self.embed(idx))\n    return x, x.mean(), x.sum()"
    )
    loaded = load(path)
    assert (loaded.call.targets, loaded.call.loss) == ("y", "item:1")
    assert any("2 scalars" in line for line in loaded.assumptions)
    assert load(path, inputs="loss=item:2").call.loss == "item:2"


def test_data_dependent_forward_is_read_by_its_names(tmp_path: Path) -> None:
    forward = """def forward(self, idx, targets=None):
    x = self.head(self.embed(idx))
    if (idx == 0).nonzero().shape[0] > 3 and float(x.sum()) > 0:
        x = x + 1
    loss = x.mean()
    return x, loss"""
    loaded = load(with_forward(tmp_path, forward))
    assert loaded.call.loss == "item:1"
    assert any("by the names in forward" in line for line in loaded.assumptions)


def test_inputs_name_the_entry(tmp_path: Path) -> None:
    forward = "def forward(self, weights, words, scale, labels=None):\n    return self.head(self.embed(words)) * scale"
    loaded = load(with_forward(tmp_path, forward), inputs="ids=words,weights=None,scale=2.5,targets=none,loss=logits:return")
    assert (loaded.call.ids, loaded.call.targets, loaded.call.loss) == ("words", None, "logits:return")
    assert loaded.call.constants == (("weights", None), ("scale", 2.5))


def test_mask_is_passed_for_a_padded_batch_only(tmp_path: Path) -> None:
    forward = "def forward(self, idx, attention_mask=None):\n    x = self.embed(idx)\n    return self.head(x)"
    path = with_forward(tmp_path, forward)
    assert load(path).call.mask is None
    assert load(path, Recipe(batch_kind="padded")).call.mask == "attention_mask"


def test_constructor_that_needs_real_numbers(tmp_path: Path) -> None:
    text = HEAD + BODY.replace(
        "super().__init__()", "super().__init__()\n        self.rates = [x.item() for x in torch.linspace(0, 1, 3)]"
    )
    loaded = load(
        write(tmp_path, text + "    def forward(self, idx):\n        return self.head(self.embed(idx)) * self.rates[1]\n")
    )
    assert loaded.module.rates == [0.0, 0.5, 1.0]
    assert {p.device.type for p in loaded.module.parameters()} == {"meta"}


def test_registered_complex_buffer_is_kept(tmp_path: Path) -> None:
    text = HEAD + BODY + "        self.register_buffer('turn', torch.polar(torch.ones(4), torch.arange(4.0)))\n"
    loaded = load(
        write(tmp_path, text + "    def forward(self, idx):\n        return self.head(self.embed(idx)) * self.turn[1].real\n")
    )
    assert loaded.module.get_buffer("turn").dtype == torch.complex64
    assert any("complex buffers keep their dtype: turn" in line for line in loaded.assumptions)


CONFIGS = {
    "class attributes": ("class Config:\n    width = 8\n    heads: int = 2\n", "config", "config.width"),
    "constructor": (
        "class ModelConfig:\n    def __init__(self, width=8, heads=2): self.width, self.heads = width, heads\n",
        "cfg",
        "cfg.width",
    ),
    "set in constructor": ("class Hyperparams:\n    def __init__(self): self.width, self.heads = 8, 2\n", "hp", "hp.width"),
    "named tuple": (
        "from typing import NamedTuple\nclass Args(NamedTuple):\n    width: int = 8\n    heads: int = 2\n",
        "args: Args",
        "args.width",
    ),
    "dictionary": ("SMALL = {'width': 8, 'heads': 2}\n", "cfg", "cfg['width']"),
    "instance": (
        "from types import SimpleNamespace\nbase_config = type('TinyConfig', (SimpleNamespace,), {})(width=8, heads=2)\n",
        "config",
        "config.width",
    ),
    "frozen dataclass": (
        "from dataclasses import dataclass\n@dataclass(frozen=True)\nclass C:\n    width: int = 8\n    heads: int = 2\n",
        "config: 'C | None' = None",
        "config.width",
    ),
}


@pytest.mark.parametrize("kind", sorted(CONFIGS))
def test_kinds_of_configuration(tmp_path: Path, kind: str) -> None:
    definition, parameter, width = CONFIGS[kind]
    name = parameter.partition(":")[0]
    heads = width.replace("width", "heads")
    text = f"""{HEAD}{definition}
class LM(nn.Module):
    def __init__(self, {parameter}):
        super().__init__()
        assert {heads} > 0
        self.kept = {name}
        self.embed = nn.Embedding(20, {width})

    def forward(self, tokens):
        return self.embed(tokens) @ self.embed.weight.T
"""
    path = write(tmp_path, text)
    assert load(path).module.get_parameter("embed.weight").shape == (20, 8)
    loaded = load(path, width="12")
    assert loaded.module.get_parameter("embed.weight").shape == (20, 12)
    assert loaded.config["width"] == 12
    assert loaded.config["heads"] == 2


def test_sections_of_a_configuration(tmp_path: Path) -> None:
    text = f"""{HEAD}from dataclasses import dataclass, field
@dataclass
class AttentionConfig:
    heads: int = 2
    width: int = 8

@dataclass
class Config:
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    double: int = field(init=False)

    def __post_init__(self):
        self.double = 2 * self.attention.width

class LM(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(20, config.double)

    def forward(self, tokens):
        return self.embed(tokens) @ self.embed.weight.T
"""
    path = str(write(tmp_path, text))
    for option in ("attention.width", "config.attention.width"):
        loaded = load_target(path, recipe=Recipe(), sets={option: "5"})
        assert loaded.module.get_parameter("embed.weight").shape == (20, 10)
        assert loaded.config["attention"]["width"] == 5


def test_base_class_and_helpers_are_not_candidates(tmp_path: Path) -> None:
    text = f"""{HEAD}
class Base(nn.Module):
    def forward(self, idx):
        return self.head(self.embed(idx))

def make_norm(width):
    return Norm(width)

class Norm(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x)

class Model(Base):
    def __init__(self):
        super().__init__()
        self.embed = nn.Sequential(nn.Embedding(9, 4), make_norm(4))
        self.head = nn.Linear(4, 9)

class Trainer:
    def __init__(self, model: Model):
        self.model = Model()
"""
    assert load(write(tmp_path, text)).name == "Model"


def test_ids_by_position_when_no_name_tells(tmp_path: Path) -> None:
    assert "quux" not in IDS_NAMES
    assert load(with_forward(tmp_path, "def forward(self, quux):\n    return self.head(self.embed(quux))")).call.ids == "quux"


def test_window_that_wants_a_multiple(tmp_path: Path) -> None:
    forward = "def forward(self, idx):\n    assert idx.shape[1] % 64 == 0\n    return self.head(self.embed(idx))"
    assert load(with_forward(tmp_path, forward)).call.loss == "logits:return"


def test_instance_is_built_on_meta_while_imported(tmp_path: Path) -> None:
    forward = "def forward(self, idx):\n    return self.head(self.embed(idx))\n"
    path = with_forward(tmp_path, forward)
    path.write_text(path.read_text() + "\nmodel = GPT(width=100_000, vocab_size=1_000_000)  # 400 GB\n")
    loaded = load(f"{path}:model")
    assert loaded.module.get_parameter("embed.weight").shape == (1_000_000, 100_000)


def test_module_of_a_package_and_lazy_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "zoo").mkdir()
    write(tmp_path / "zoo", "")
    write(tmp_path / "zoo", "SCALE = 2\n", "late.py")
    (tmp_path / "zoo" / "__init__.py").write_text("")
    text = (
        HEAD
        + BODY
        + "    def forward(self, idx):\n        from zoo.late import SCALE\n        return self.head(self.embed(idx)) * SCALE\n"
    )
    write(tmp_path / "zoo", text, "lm.py")
    monkeypatch.chdir(tmp_path)
    loaded = load("zoo.lm:GPT")
    assert loaded.name == "GPT"
    assert loaded.source == "zoo/lm.py:5"
    assert "zoo" not in sys.modules
    from memir.frontend.load_import import user_scope

    with user_scope(loaded.module):
        import zoo.late  # type: ignore[import-not-found]

        assert zoo.late.SCALE == 2
    assert "zoo" not in sys.modules


def test_two_files_of_one_name_do_not_meet(tmp_path: Path) -> None:
    for name, width in (("one", 4), ("two", 6)):
        (tmp_path / name).mkdir()
        write(tmp_path / name, f"WIDTH = {width}\n", "sizes.py")
        text = HEAD + "from sizes import WIDTH\n" + BODY.replace("width=16", "width=WIDTH")
        write(tmp_path / name, text + "    def forward(self, idx):\n        return self.head(self.embed(idx))\n")
    widths = [
        load(tmp_path / name / "model.py").module.get_parameter("embed.weight").shape[1] for name in ("one", "two", "one")
    ]
    assert widths == [4, 6, 4]


def test_file_named_like_a_library(tmp_path: Path) -> None:
    path = with_forward(tmp_path, "def forward(self, idx):\n    return self.head(self.embed(idx))")
    renamed = path.rename(tmp_path / "random.py")
    before = sys.modules.get("random")
    assert load(renamed).name == "GPT"
    assert sys.modules.get("random") is before


def test_module_given_in_python_stays_as_it_is() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(20, 8)
            self.head = nn.Linear(8, 20, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, idx: torch.Tensor) -> torch.Tensor:
            return self.head(self.embed(idx))

    module = Tied().eval()
    weight, values = module.embed.weight, module.embed.weight.detach().clone()
    loaded = load_target(module, recipe=Recipe())
    assert module.embed.weight is weight
    assert torch.equal(weight, values)
    assert not module.training
    assert loaded.module.head.weight is loaded.module.embed.weight
    assert loaded.module.embed.weight.device.type == "meta"
    assert loaded.module.embed.weight.dtype == torch.bfloat16


def test_hugging_face_model_from_a_factory(tmp_path: Path) -> None:
    text = """
from transformers import LlamaConfig, LlamaForCausalLM

def make(layers: int = 1):
    return LlamaForCausalLM(LlamaConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=layers,
                                        num_attention_heads=2, vocab_size=32))
"""
    loaded = load(f"{write(tmp_path, text)}:make", layers="2")
    assert loaded.is_hf
    assert (loaded.call.targets, loaded.call.loss) == ("labels", "attr:loss")
    assert any(os.path.join("models", "llama") in root for root in loaded.roots)
