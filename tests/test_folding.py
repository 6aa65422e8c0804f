"""Folded and unrolled is fully traced: the same operators, sizes and lifetimes at every program point.

The full trace is one with numbers, of all layers; the folded program comes from a few layers, is unrolled, and gets the same
numbers. Layers that alternate need more than nine to repeat four times.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest

from memir.analysis.liveness import timeline
from memir.frontend.depth import find_layout
from memir.frontend.fake import Extent
from memir.frontend.load import load_target
from memir.frontend.loaded import LoadedModel
from memir.frontend.quiet import quiet
from memir.frontend.trace import Traced, trace, trace_once
from memir.ir.core import Op, Program, Storage, Value
from memir.ir.parser import parse
from memir.ir.printer import to_text
from memir.ir.size import ONE, Size
from memir.ir.unroll import unroll
from memir.ir.verify import verify
from memir.recipe import Lora, Quantize, Recipe

AT = {"B": 2, "S": 24}
BARE = {"hidden_size": 32, "vocab_size": 96, "num_attention_heads": 4}
SMALL = {**BARE, "intermediate_size": 64}
GQA = {**SMALL, "num_key_value_heads": 2}
GPT = {"n_embd": 32, "n_head": 4, "vocab_size": 96}
MOE = {**GQA, "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
DEEPSEEK = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 32}
MLA = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
LOCAL = {**GQA, "head_dim": 8, "sliding_window": 16}
CASES = Path(__file__).parent / "cases"

# name -> preset or file, the field that has the depth, layers, other fields, LoRA targets
MODELS: dict[str, tuple[str, str, int, dict[str, object], str]] = {
    "llama": ("llama-3.1-8b", "num_hidden_layers", 9, {**GQA, "head_dim": 8}, "q_proj,v_proj"),
    "gpt2, tied": ("gpt2", "n_layer", 9, GPT, "c_attn"),
    "qwen2": ("qwen2-0.5b", "num_hidden_layers", 9, GQA, "q_proj,v_proj"),
    "qwen2-moe": ("qwen1.5-moe-a2.7b", "num_hidden_layers", 9, {**MOE, "shared_expert_intermediate_size": 64}, "q_proj"),
    "qwen3-moe": ("qwen3-30b-a3b", "num_hidden_layers", 9, {**MOE, "head_dim": 8}, "q_proj"),
    "mixtral": ("mixtral-8x7b", "num_hidden_layers", 9, {**GQA, "num_local_experts": 4}, "q_proj"),
    "deepseek-v3, dense first": (
        *("deepseek-v3", "num_hidden_layers", 9),
        {**SMALL, **DEEPSEEK, **MLA, "num_key_value_heads": 4},
        "o_proj",
    ),
    "gemma-3, every other global": (
        *("gemma-3-1b", "num_hidden_layers", 10),
        {**LOCAL, "layer_types": '["sliding_attention", "full_attention"]'},  # repeated to the depth below
        "q_proj",
    ),
    "gemma-2, every other local": ("gemma-2-2b", "num_hidden_layers", 10, LOCAL, "q_proj"),
    "gpt-oss": (
        *("gpt-oss-20b", "num_hidden_layers", 10),
        {**LOCAL, "num_local_experts": 4, "num_experts_per_tok": 2},
        "q_proj",
    ),
    "opt": ("opt-125m", "num_hidden_layers", 9, {**BARE, "ffn_dim": 64, "word_embed_proj_dim": 32}, "q_proj"),
    "bloom": ("bloom-560m", "n_layer", 9, {"hidden_size": 32, "n_head": 4, "vocab_size": 96}, "query_key_value"),
    "falcon": ("falcon-7b", "num_hidden_layers", 9, BARE, "query_key_value"),
    "gpt-neox": ("pythia-70m", "num_hidden_layers", 9, SMALL, "query_key_value"),
    "phi": ("phi-2", "num_hidden_layers", 9, {**SMALL, "hidden_size": 64, "num_key_value_heads": 4}, "q_proj"),
    "olmo2": ("olmo-2-7b", "num_hidden_layers", 9, {**SMALL, "num_key_value_heads": 4}, "q_proj"),
    "mpt": ("mpt-7b", "n_layers", 9, {"d_model": 32, "n_heads": 4, "vocab_size": 96}, "Wqkv"),
    "gpt-j": ("gpt-j-6b", "n_layer", 9, {**GPT, "rotary_dim": 4}, "q_proj"),
    "starcoder2": ("starcoder2-3b", "num_hidden_layers", 9, GQA, "q_proj"),
    "a model.py": (
        f"{Path(__file__).parents[1] / 'examples' / 'gpt.py'}",
        "n_layer",
        9,
        {"n_embd": 32, "n_head": 4, "vocab_size": 96},
        "qkv",
    ),
}
RECIPES = {
    "plain": Recipe(),
    "checkpoint": Recipe(checkpoint="full"),
    "accumulate": Recipe(accumulate=2),
    "lora": None,  # its targets are the model's
}


def _recipe(name: str, targets: str) -> Recipe:
    return RECIPES[name] or Recipe(lora=Lora(r=4, alpha=8, dropout=0.0, targets=tuple(targets.split(","))))


def _traced(model: str, recipe: Recipe, depth: int) -> tuple[Traced, Program]:
    """The folded step, and the program of a full trace with numbers."""
    target, field, _, others, _ = MODELS[model]
    sets = {field: str(depth), **{name: str(value) for name, value in others.items()}}
    if "layer_types" in sets:
        sets["layer_types"] = json.dumps((json.loads(sets["layer_types"]) * depth)[:depth])

    def load() -> LoadedModel:
        return load_target(target, recipe=recipe, sets=sets)

    with quiet():
        folded = trace(load, recipe, AT["B"], AT["S"])
        full, _ = trace_once(load, recipe, *(Extent(name, value, False) for name, value in AT.items()))
    return folded, full.program


def _looks(storages: Mapping[str, Storage], op: Op) -> tuple[object, ...]:
    results = Counter((r.dtype, r.shape, _strides(r), r.offset) for r in op.results)
    held = ((storages[n] for n in names) for names in (op.frees, op.drops, op.saves))
    lists = tuple(Counter((s.nbytes.constant, str(s.kind)) for s in some) for some in held)
    return op.opcode, op.path, op.source, op.scratch, len(op.operands), results, lists


def _strides(value: Value) -> tuple[Size, ...]:
    """The strides that matter: a dimension of one may have any."""
    return tuple(stride for stride, extent in zip(value.strides, value.shape, strict=True) if extent is not ONE)


def _same(folded: Program, full: Program) -> None:
    """Every operator of both, and the live bytes at every point."""
    ours, theirs = list(folded.ops()), list(full.ops())
    assert len(ours) == len(theirs)
    our_storages, their_storages = ({s.name: s for s in p.storages} for p in (folded, full))
    for (phase, op), (other_phase, other) in zip(ours, theirs, strict=True):
        assert (phase.name, _looks(our_storages, op)) == (other_phase.name, _looks(their_storages, other))
    resident = [Counter((s.nbytes, s.kind, s.device, s.live_out) for s in p.storages if s.live_in) for p in (folded, full)]
    assert resident[0] == resident[1]
    for device in ("gpu", "host"):
        assert timeline(folded, device).evaluate({}) == timeline(full, device).evaluate({})


PLAIN = (
    "gemma-2, every other local",
    "gpt-oss",
    "gpt-j",
    "starcoder2",
)  # of these one recipe: to trace them in full takes long
GRID = [(model, recipe) for model in MODELS for recipe in RECIPES if recipe == "plain" or model not in PLAIN]
MORE = {
    "accumulate": ("llama", "gpt2, tied", "qwen3-moe", "a model.py"),
    "lora": ("llama", "deepseek-v3, dense first", "bloom", "a model.py"),
}
ALWAYS = [(model, recipe) for model, recipe in GRID if model in MORE.get(recipe, MODELS)]  # the others with --whole


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The grid of models and recipes: a part of accumulation and LoRA, all of them with --whole."""
    if {"model", "grid_recipe"} <= set(metafunc.fixturenames):
        metafunc.parametrize(("model", "grid_recipe"), GRID if metafunc.config.getoption("--whole") else ALWAYS)


def test_folded_and_unrolled_is_fully_traced(model: str, grid_recipe: str) -> None:
    depth = MODELS[model][2]
    folded, full = _traced(model, _recipe(grid_recipe, MODELS[model][4]), depth)
    assert folded.dims == {"L": depth}, folded.assumptions
    verify(folded.program)
    assert parse(to_text(folded.program)) == folded.program
    _same(unroll(folded.program, {**AT, "L": depth}), full)


QLORA = Recipe(
    dtype="f16",
    checkpoint="full",
    lora=Lora(r=4, targets=("q_proj", "v_proj")),
    quantize=Quantize(),
    keep_outputs=True,
    function=True,
)


@pytest.mark.parametrize(
    ("model", "recipe", "depth"),
    [
        ("llama", Recipe(clip=1.0), 7),  # stacks the norms: a size that grows with the depth
        ("llama", Recipe(optimizer_impl="for-loop", zero_grad="first"), 7),
        ("llama", Recipe(optimizer_impl="fused", keep_outputs=True), 7),
        ("llama", Recipe(optimizer="sgd", target="cpu", batch_kind="padded"), 7),
        ("gpt2, tied", Recipe(mode="forward"), 7),
        ("gpt2, tied", Recipe(attention="eager", dtype="f32"), 7),
        ("llama", QLORA, 7),
        ("llama", Recipe(dtype="f32", amp="bf16"), 7),
        ("llama", Recipe(dtype="f32", amp="f16", checkpoint="full"), 7),
        ("llama", Recipe(optimizer="paged_adamw_8bit", loss="fused-linear", checkpoint="full"), 7),
        ("llama", Recipe(lora=QLORA.lora, quantize=Quantize("int8"), loss="chunked"), 7),
        ("llama", Recipe(optimizer="muon"), 7),
    ],
)
def test_other_recipes_fold_too(model: str, recipe: Recipe, depth: int) -> None:
    folded, full = _traced(model, recipe, depth)
    assert folded.dims == {"L": depth}, folded.assumptions
    _same(unroll(folded.program, {**AT, "L": depth}), full)


def test_the_formula_holds_at_other_depths() -> None:
    folded, _ = _traced("llama", Recipe(), 6)
    _, deeper = _traced("llama", Recipe(), 11)
    _same(unroll(folded.program, {**AT, "L": 11}), deeper)


def test_too_few_layers_for_a_size_that_grows_are_all_traced() -> None:
    folded, full = _traced("llama", Recipe(clip=1.0), 5)
    assert any("a size grows with the layers, and 5 are too few to see how" in text for text in folded.assumptions)
    _same(unroll(folded.program, AT), full)


def test_few_layers_are_all_traced() -> None:
    folded, _ = _traced("llama", Recipe(), 4)
    assert (folded.dims, folded.program.dims) == ({}, ("B", "S"))


UNEVEN = '''
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(16, 16)

    def forward(self, x):
        return x + torch.relu(self.up(x))


class Uneven(nn.Module):
    """{what}"""

    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(50, 16)
        self.layers = nn.ModuleList([Block() for _ in range(10)])
        self.head = nn.Linear(16, 50)

    def forward(self, ids, targets):
        x = self.emb(ids)
        kept = []
        {loop}
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())
'''


@pytest.mark.parametrize(
    ("what", "loop"),
    [
        (
            "a U-net: the second half adds what the first half made",
            """for k, layer in enumerate(self.layers):
            if k < len(self.layers) // 2:
                kept.append(x)
            else:
                x = x + kept.pop()
            x = layer(x)""",
        ),
        (
            "a loop over a number that is no depth for the tool",
            """for k in range(10):
            x = self.layers[k](x)""",
        ),
        (
            "a layer in the middle that runs twice",
            """for k, layer in enumerate(self.layers):
            x = layer(x)
            if k == 2:
                x = layer(x)""",
        ),
    ],
)
def test_layers_that_do_not_repeat_are_all_traced_and_it_is_said(tmp_path: Path, what: str, loop: str) -> None:
    file = tmp_path / "uneven.py"
    file.write_text(UNEVEN.format(what=what, loop=loop))
    recipe = Recipe()
    with quiet():
        found = trace(lambda: load_target(f"{file}:Uneven", recipe=recipe), recipe, 2, 8)
        full = trace(lambda: load_target(f"{file}:Uneven", recipe=recipe), recipe, 2, 8, fold=False)
    assert found.dims == {}
    assert found.program == full.program
    assert any(text.startswith("all layers were traced, no formula in L: ") for text in found.assumptions)


def test_lists_and_numbers_of_layers_are_cut_with_the_layers() -> None:
    recipe = Recipe()
    with quiet():
        loaded = load_target("gemma-3-4b", recipe=recipe)
        layout = find_layout(loaded, 4)
    assert layout is not None
    assert (layout.path, layout.lead, layout.period, layout.units, layout.tail) == ("model.layers", 0, 6, 5, 4)
