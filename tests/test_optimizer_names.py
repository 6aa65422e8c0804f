"""What names of optimizers mean: Hugging Face's words against its Trainer, bytes of bitsandbytes' states on CUDA by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn
from transformers import Trainer, TrainingArguments
from transformers.training_args import OptimizerNames

import memir
from memir.cuda.optimizers import trainer_default
from memir.errors import UsageError
from memir.frontend.optimizers import make_optimizer, named_optimizer, resolved_impl
from memir.ir.core import Kind, Program
from memir.recipe import Recipe
from memir.updates.names import BITSANDBYTES, NAMES, named

WORDS = sorted({name.value for name in OptimizerNames} & set(NAMES))
NOT_TAKEN = (  # of other packages, or with a step that is not described
    *(
        "adamw_torch_xla",
        "adamw_torch_npu_fused",
        "adamw_anyprecision",
        "adamw_torch_4bit",
        "adamw_torch_8bit",
        "lomo",
        "adalomo",
    ),
    *("galore_adamw", "galore_adamw_8bit", "galore_adafactor", "galore_adamw_layerwise", "galore_adamw_8bit_layerwise"),
    *("galore_adafactor_layerwise", "grokadamw", "schedule_free_radam", "schedule_free_adamw", "schedule_free_sgd"),
    *("apollo_adamw", "apollo_adamw_layerwise", "stable_adamw"),
    *("ademamix", "ademamix_8bit", "paged_ademamix_32bit", "paged_ademamix_8bit"),
)


def test_every_word_of_the_trainer_is_taken_or_listed() -> None:
    words = {name.value for name in OptimizerNames} - {"sgd", "adagrad", "rmsprop", "adafactor"}  # torch.optim has these
    assert words <= {*WORDS, *NOT_TAKEN}
    assert len(WORDS) >= 13


@pytest.mark.parametrize("word", WORDS)
def test_a_word_means_what_the_trainer_builds(word: str, tmp_path: Path) -> None:
    arguments = TrainingArguments(output_dir=str(tmp_path), optim=word, use_cpu=True, report_to=[])
    cls, options = Trainer.get_optimizer_cls_and_kwargs(arguments, nn.Linear(2, 2))
    found = named(word)
    assert found is not None
    assert (found.package, found.cls) == (cls.__module__.partition(".")[0], cls.__name__)
    assert found.bits == options.get("optim_bits", 32)
    assert found.paged == options.get("is_paged", False)
    assert (found.impl == "fused") == options.get("fused", False)
    assert found.wide_embeddings == (found.package == BITSANDBYTES and found.bits == 8)


def test_the_trainers_adafactor_has_its_name(tmp_path: Path) -> None:
    arguments = TrainingArguments(output_dir=str(tmp_path), optim="adafactor", use_cpu=True, report_to=[])
    cls, options = Trainer.get_optimizer_cls_and_kwargs(arguments, nn.Linear(2, 2))
    made = make_optimizer(nn.Linear(2, 2), Recipe(optimizer="transformers-adafactor"))
    assert type(made) is cls
    assert {name: made.defaults[name] for name in ("scale_parameter", "relative_step")} == {
        name: options[name] for name in ("scale_parameter", "relative_step")
    }
    assert named_optimizer(Recipe(optimizer="adafactor")).package == "torch"


@pytest.mark.parametrize(
    ("transformers_release", "torch_release", "word"),
    [
        ("4.48.1", "2.4.1", "adamw_torch"),
        ("4.53.3", "2.8.0", "adamw_torch"),
        ("4.54.0", "2.7.1", "adamw_torch"),
        ("4.54.0", "2.8.0", "adamw_torch_fused"),
        ("5.24.0", "2.13.0", "adamw_torch_fused"),
        (transformers.__version__, torch.__version__, TrainingArguments.default_optim),
    ],
)
def test_what_the_trainer_takes_by_default(transformers_release: str, torch_release: str, word: str) -> None:
    assert trainer_default(transformers_release, torch_release) == word


def test_forms() -> None:
    assert resolved_impl(Recipe(optimizer="adamw_torch_fused")) == "fused"
    assert resolved_impl(Recipe(optimizer="adamw_torch")) == "foreach"
    assert resolved_impl(Recipe(optimizer="lion-8bit")) == "for-loop"
    with pytest.raises(UsageError, match=r"bitsandbytes\.AdamW has no foreach form"):
        resolved_impl(Recipe(optimizer="adamw-8bit", optimizer_impl="foreach"))
    with pytest.raises(UsageError, match="lomo is no optimizer that is known") as caught:
        resolved_impl(Recipe(optimizer="lomo"))
    assert "paged-adamw-8bit" in caught.value.hint


LLAMA = {
    "model_type": "llama",
    "vocab_size": 800,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
}
ONE_LAYER = (*[128 * 128] * 4, *[128 * 256] * 3)
EMBEDDING = 800 * 128  # as much as has paged states; the head is another of that size
NORMS = (128,) * 3
SMALL = 4 * 2 * sum(NORMS)  # under 4096 elements: two fp32 states


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("llama") / "config.json"
    path.write_text(json.dumps(LLAMA))
    return str(path)


def states(program: Program, device: str) -> int:
    """Bytes of optimizer states."""
    kept = [s for s in program.storages if s.kind is Kind.OPTIMIZER_STATE and s.device == device]
    return sum(s.nbytes.evaluate({}) for s in kept)


def eight_bits(count: int) -> int:
    """Bytes of one state: a byte an element and a scale for 256."""
    return count + 4 * -(-count // 256)


@pytest.mark.parametrize("name", ["adamw-8bit", "adamw_bnb_8bit", "paged-adamw-8bit", "paged_adamw_32bit", "lion"])
def test_states_on_cuda_by_hand(llama: str, name: str) -> None:
    traced = memir.trace(llama, Recipe(optimizer=name), batch=2, seq=16)
    tables = 2 * 1024
    layer = 2 * sum(map(eight_bits, ONE_LAYER))
    both = 2 * 2 * eight_bits(EMBEDDING)  # two matrices, two states
    paged = 2 * 2 * EMBEDDING  # without scales
    expected = {
        "adamw-8bit": (layer + both + SMALL + tables, 0),
        "adamw_bnb_8bit": (layer + both // 2 + 2 * 4 * EMBEDDING + SMALL + tables, 0),
        "paged-adamw-8bit": (layer + both - paged + SMALL + tables, paged),
        "paged_adamw_32bit": (2 * 4 * sum(ONE_LAYER) + SMALL, 4 * paged),
        "lion": (4 * (sum(ONE_LAYER) + 2 * EMBEDDING + sum(NORMS)), 0),
    }
    assert (states(traced.program, "gpu"), states(traced.program, "host")) == expected[name]
    said = " ".join(traced.assumptions)
    assert ("managed memory" in said) == ("paged" in name)
    assert ("stay 32-bit" in said) == (name == "adamw_bnb_8bit")
    assert "bitsandbytes" not in said  # its kernels' workspaces are known
