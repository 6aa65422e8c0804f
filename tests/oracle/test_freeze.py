"""The pass freeze against PyTorch: the same model with its parameters really frozen, traced, operator by operator.

The oracle freezes by modules (benchmarks/freeze_pass/frozen.py), the pass by the program's data flow. Live bytes while and
after every operator are equal. `python -m benchmarks.freeze_pass` compares with real runs; a few of its cases are here too.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch import nn

from benchmarks.accuracy_cpu.models import CONFIGS
from benchmarks.accuracy_cpu.pool import each_in_fresh_process
from benchmarks.freeze_pass.__main__ import POINTS, TOLERANCE, read
from benchmarks.freeze_pass.cases import BATCH as BATCH_REAL
from benchmarks.freeze_pass.cases import DEPTH, Case, all_cases
from benchmarks.freeze_pass.cases import SEQ as SEQ_REAL
from benchmarks.freeze_pass.frozen import freeze_cut, freeze_pattern, layers_of
from benchmarks.freeze_pass.run import Adjust, Figures, measured, predicted
from memir.analysis.liveness import timeline
from memir.frontend.fake import Extent
from memir.frontend.load import load_target
from memir.frontend.loaded import LoadedModel
from memir.frontend.prepare import prepare
from memir.frontend.quiet import quiet
from memir.frontend.trace import trace_once
from memir.ir.core import Program
from memir.ir.verify import verify
from memir.passes.freeze import Freeze
from memir.recipe import Lora, Recipe

ROOT = Path(__file__).resolve().parents[2]
BATCH, SEQ = 2, 16
WIDTHS = {"vocab_size": 96, "hidden_size": 32, "n_embd": 32, "intermediate_size": 48, "n_inner": 48, "ffn_dim": 48}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "n_head": 2, "head_dim": 16, "word_embed_proj_dim": 32}
TINY = WIDTHS | HEADS | dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers"), DEPTH)
OWN = {"falcon-alibi": CONFIGS["falcon"] | {"multi_query": False, "parallel_attn": False, "bias": True, "alibi": True}}
SETS: dict[str, dict[str, str]] = {
    "tests/cases/own_function.py": {},
    "tests/cases/small_gpt.py": {"depth": str(DEPTH)},
    "examples/gpt.py": {"n_layer": str(DEPTH), "n_embd": "32", "n_head": "2", "vocab_size": "96"},
}


def traced(name: str, recipe: Recipe, folder: Path, adjust: Callable[[nn.Module], None]) -> Program:
    """One step at BATCH and SEQ, all layers and numbers only, of the model that `adjust` has changed."""
    sets, target = SETS.get(name, {}), ROOT / name
    if name not in SETS:
        target = folder / f"{name}.json"
        config = OWN.get(name) or CONFIGS[name]
        target.write_text(json.dumps({field: TINY.get(field, value) for field, value in config.items()}))

    def load() -> LoadedModel:
        return load_target(str(target), recipe=recipe, sets=sets, inputs=None, trust_remote_code=False, seq=SEQ)

    def prepared(loaded: LoadedModel, recipe: Recipe) -> nn.Module:
        module = prepare(loaded, recipe)
        adjust(module)
        return module

    with quiet(), mock.patch("memir.frontend.trace.prepare", prepared):
        found, _ = trace_once(load, recipe, Extent("B", BATCH, False), Extent("S", SEQ, False))
    return found.program


Step = tuple[str, str, int, int]


def steps(program: Program) -> tuple[int, list[Step]]:
    """Live bytes before the step, and of every operator its phase, name and live bytes while it runs and before the next one.

    What dies without an operator dies after the one before it: whether a `memir.free` of its own says so does not matter.
    """
    line = timeline(program)
    numbers = line.evaluate({})
    rows: list[Step] = []
    for step, running, after in zip(line.steps, numbers.running, numbers.after, strict=True):
        if step.op.opcode == "memir.free" and rows:
            rows[-1] = (*rows[-1][:3], after)
        else:
            rows.append((step.phase.name, step.op.opcode, running, after))
    return numbers.start, rows


Whole = Callable[[str, Recipe], Program]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """The step in which everything is trained, which the pass begins with; traced once a model and recipe."""
    folder = tmp_path_factory.mktemp("whole")
    return cache(lambda name, recipe: traced(name, recipe, folder, lambda _: None))


def check(rewritten: Program, real: Program) -> None:
    """The same operators, and live bytes equal at every one of them."""
    verify(rewritten)
    (start, mine), (real_start, theirs) = steps(rewritten), steps(real)
    assert start == real_start
    assert [pair for pair in zip(mine, theirs, strict=False) if pair[0] != pair[1]][:3] == []
    assert len(mine) == len(theirs)


CUTS = {
    "tests/cases/small_gpt.py": (1, 2, 3, 4),
    "examples/gpt.py": (2,),
    "llama": (1, 4),
    "gpt2": (1, 2, 3, 4),  # tied
    "opt": (2, 3),
    "bloom": (1, 4),  # its GELU is an autograd function of its own
    "gemma2": (3,),
    "falcon-alibi": (1, 4),  # its mask takes the efficient attention kernel, which makes no logsumexp without gradients
    "phi": (2,),
    "qwen3": (3,),
    "mixtral": (1, 3),
    "qwen2_moe": (4,),
}


@pytest.mark.parametrize(("name", "cut"), [(name, cut) for name, cuts in CUTS.items() for cut in cuts])
def test_a_cut(name: str, cut: int, whole: Whole, tmp_path: Path) -> None:
    real = traced(name, Recipe(), tmp_path, lambda module: freeze_cut(module, cut))
    check(Freeze(cut=cut).run(whole(name, Recipe())), real)


RECIPES = {
    "foreach": Recipe(optimizer_impl="foreach"),
    "fused": Recipe(optimizer_impl="fused"),
    "for-loop": Recipe(optimizer_impl="for-loop"),
    "sgd": Recipe(optimizer="sgd"),
    "adafactor": Recipe(optimizer="adafactor"),
    "clip": Recipe(clip=1.0),
    "accumulate": Recipe(accumulate=3),
    "checkpoint": Recipe(checkpoint="full"),
    "amp": Recipe(dtype="f32", amp="bf16"),
    "zero-first-keep-outputs": Recipe(zero_grad="first", keep_outputs=True),
    "everything": Recipe(dtype="f32", amp="bf16", checkpoint="full", accumulate=3, clip=1.0, zero_grad="first"),
    "cpu": Recipe(target="cpu", dtype="f32"),
    "no-dropout": Recipe(dropout=False),
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe(name: str, whole: Whole, tmp_path: Path) -> None:
    recipe, model = RECIPES[name], "tests/cases/small_gpt.py"
    real = traced(model, recipe, tmp_path, lambda module: freeze_cut(module, 2))
    check(Freeze(cut=2).run(whole(model, recipe)), real)


LORA = Lora(r=4, alpha=8, targets=("q_proj", "v_proj"))


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(Recipe(lora=LORA), id="lora"),
        pytest.param(Recipe(lora=LORA, checkpoint="full"), id="lora-checkpoint"),
        pytest.param(Recipe(checkpoint="full"), id="checkpoint"),
        pytest.param(Recipe(checkpoint="full", attention="math"), id="checkpoint-math"),  # casts that nobody reads run again
        pytest.param(Recipe(dtype="f32", amp="bf16"), id="amp"),
    ],
)
def test_a_library_model(recipe: Recipe, whole: Whole, tmp_path: Path) -> None:
    real = traced("llama", recipe, tmp_path, lambda module: freeze_cut(module, 2))
    check(Freeze(cut=2).run(whole("llama", recipe)), real)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("tests/cases/small_gpt.py", {"cut": 2, "embeddings": False}),
        ("gpt2", {"cut": 2, "embeddings": False}),
        ("tests/cases/small_gpt.py", {"cut": 2, "head": True}),
        ("tests/cases/small_gpt.py", {"cut": 0, "head": True}),
        ("gpt2", {"cut": 1, "head": True}),
        ("llama", {"cut": 2, "head": True}),
    ],
)
def test_embeddings_and_head(name: str, options: dict[str, Any], whole: Whole, tmp_path: Path) -> None:
    real = traced(name, Recipe(), tmp_path, lambda module: freeze_cut(module, **options))
    check(Freeze(**options).run(whole(name, Recipe())), real)


PATTERNS = {
    "norms": "norm|ln_",
    "all but norms": "^(?!.*(norm|ln_))",
    "every second layer": r"(layers|h)\.[02]\.",
    "all but the last layer": r"^(?!(model\.|transformer\.)?(layers|h)\.3\.)",
    "biases": "bias",
    "the embedding": "^(model.embed_tokens|tokens|transformer.wpe)",
}


@pytest.mark.parametrize(
    ("name", "pattern"),
    [(name, p) for name in ("tests/cases/small_gpt.py", "llama") for p in PATTERNS if not (name == "llama" and p == "biases")]
    + [("gpt2", "norms"), ("gpt2", "biases"), ("bloom", "every second layer")],
)
def test_a_pattern(name: str, pattern: str, whole: Whole, tmp_path: Path) -> None:
    """requires_grad=False by name, and nothing under no_grad."""
    expression = PATTERNS[pattern]
    real = traced(name, Recipe(), tmp_path, lambda module: freeze_pattern(module, expression))
    check(Freeze(pattern=expression).run(whole(name, Recipe())), real)


def test_a_function_of_the_models_own_keeps_what_it_saved(whole: Whole, tmp_path: Path) -> None:
    """ctx.save_for_backward keeps the input that only the frozen weight's gradient would need."""
    name, frozen = "tests/cases/own_function.py", r"layers\.\d\.own"
    real = traced(name, Recipe(), tmp_path, lambda module: freeze_pattern(module, frozen))
    check(Freeze(pattern=frozen).run(whole(name, Recipe())), real)


# -- real runs: a few cases of `python -m benchmarks.freeze_pass`

LIVE = ("llama/plain/cut2", "gpt2/plain/cut4", "gpt2/plain/second-layers")
CHECKPOINTED = Case("llama", "checkpoint", Recipe(target="cpu", dtype="f32", checkpoint="full"), DEPTH - 1)


def left(module: nn.Module) -> None:
    """Embedding and leading layers frozen by name, after gradient_checkpointing_enable()."""
    for part in (module.get_input_embeddings(), *layers_of(module)[: DEPTH - 1]):  # type: ignore[operator]
        part.requires_grad_(False)


def taken(module: nn.Module) -> None:
    """The same, and the embedding's output does not require a gradient any more."""
    left(module)
    module.disable_input_require_grads()  # type: ignore[operator]


@dataclass(frozen=True, slots=True)
class Real:
    case: Case
    adjust: Adjust | None = None


def run(real: Real) -> Figures:
    return measured(real.case, real.adjust)


@pytest.fixture(scope="module")
def truth() -> list[Figures]:
    """Every case run for real, each in a fresh process: LIVE, then CHECKPOINTED without and with the hook, and by the cut."""
    cases = [Real(case) for name in LIVE for case in all_cases() if case.name == name]
    cases += [Real(CHECKPOINTED, left), Real(CHECKPOINTED, taken), Real(CHECKPOINTED)]
    return list(each_in_fresh_process(run, cases, jobs=2))


@pytest.mark.parametrize("name", LIVE)
def test_a_real_run(name: str, truth: list[Figures]) -> None:
    """Start, peak of every phase and end, within 1 KiB."""
    real = truth[LIVE.index(name)]
    (told,) = predicted([case for case in all_cases() if case.name == name])
    assert not real.error
    assert not told.error
    assert max(abs(p - m) for p, m in zip(told.numbers, real.numbers, strict=True)) <= TOLERANCE


@pytest.mark.parametrize("name", LIVE)
def test_the_committed_table_is_measured_again(name: str, truth: list[Figures]) -> None:
    """Bytes of float32 runs do not depend on the machine."""
    numbers = truth[LIVE.index(name)].numbers
    assert [str(n) for n in numbers] == [read()[name][f"{point}_measured"] for point in POINTS]


def test_a_hook_of_transformers_keeps_what_a_frozen_prefix_would_save(truth: list[Figures]) -> None:
    """docs/freeze-pass.md: gradient_checkpointing_enable() makes the frozen embedding's output require a gradient."""
    hooked, unhooked, by_cut = truth[len(LIVE) :]
    assert hooked.at_start == unhooked.at_start
    inputs = 4 * BATCH_REAL * SEQ_REAL * CONFIGS["llama"]["hidden_size"]  # of one layer, float32
    generator = 5056  # each checkpoint keeps the CPU generator's state
    assert hooked.peaks[0] - unhooked.peaks[0] == (DEPTH - 1) * (inputs + generator)
    assert hooked.peaks[1] > unhooked.peaks[1]
    assert unhooked == by_cut


def test_the_committed_table_has_known_cases_that_agree() -> None:
    rows, known = read(), [case.name for case in all_cases()]
    assert list(rows) == [name for name in known if name in rows]
    assert [name for name, row in rows.items() if row["verdict"] not in ("exact", "within 1 KiB")] == []
