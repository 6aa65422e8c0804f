"""`--loop trainer`: what is asked of transformers, what is refused, what the program of a step has."""

from __future__ import annotations

import json
from pathlib import Path

import accelerate.utils
import pytest
import torch
from torch import nn

import memir
from memir.errors import UsageError
from memir.frontend import trainer
from memir.ir.core import Kind
from memir.ir.verify import verify
from memir.recipe import Recipe

LLAMA = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
GPT = str(Path(__file__).parent / "cases" / "small_gpt.py")


class Outputs(dict):  # type: ignore[type-arg]
    """A mapping of its own class, as transformers' outputs are."""


def test_outputs_are_widened_as_accelerate_does_it() -> None:
    half = torch.ones(2, dtype=torch.bfloat16)
    given = Outputs(
        logits=half, loss=torch.ones(()), hidden=(half, [half]), ids=torch.ones(2, dtype=torch.long), cache=object()
    )
    ours, theirs = trainer.widened(given), accelerate.utils.convert_to_fp32(given)
    assert type(ours) is type(theirs) is Outputs
    flat = [(o["logits"], o["loss"], o["hidden"][0], o["hidden"][1][0], o["ids"]) for o in (ours, theirs)]
    assert [t.dtype for t in flat[0]] == [t.dtype for t in flat[1]]
    assert ours["loss"] is given["loss"]
    assert ours["cache"] is given["cache"]


def test_biases_and_norms_are_a_group_of_their_own() -> None:
    module = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3))
    decayed, others = trainer.groups(module)
    assert [tuple(p.shape) for p in decayed["params"]] == [(3, 2)]
    assert [tuple(p.shape) for p in others["params"]] == [(3,), (3,), (3,)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "forward"}, "a training step"),
        ({"keep_outputs": True}, "drops the outputs"),
        ({"zero_grad": "first"}, "frees gradients after"),
    ],
)
def test_what_trainer_does_not_do(options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Recipe(loop="trainer", **options)  # type: ignore[arg-type]


def test_clipping_is_the_loops_own_unless_it_is_given() -> None:
    assert [Recipe().clip, Recipe(loop="trainer").clip, Recipe(loop="trainer", clip=0.0).clip] == [0.0, 1.0, 0.0]


def test_a_model_that_does_not_return_its_loss_first() -> None:
    with pytest.raises(UsageError, match="takes the loss from the model") as caught:
        memir.trace(GPT, Recipe(loop="trainer"), batch=2, seq=8)
    assert caught.value.where == "the loss is at item:1"


def test_a_step_of_several_micro_batches_has_all_their_inputs(tmp_path: Path) -> None:
    """Three tensors of int64 [B, S] for each, and the number of targets; the optimizer is the fused one."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    found = memir.trace(str(path), Recipe(loop="trainer", accumulate=5), batch=2, seq=16).program
    inputs = {s.name: str(s.nbytes) for s in found.storages if s.kind == Kind.INPUT}
    names = ("input_ids", "labels", "attention_mask")
    assert inputs == {**dict.fromkeys(names, "8*B*S"), **{f"{n}_of_other_batches[:4]": "8*B*S" for n in names}}
    verify(found)
    held = {s.name: str(s.nbytes) for s in found.storages if s.name.startswith("loop.") and s.live_in}
    assert held.pop("loop.gradient_norm") == "2"  # bf16, as the gradients
    assert held == dict.fromkeys(("loop.num_items_in_batch", "loop.sum_of_losses", "loop.loss"), "4")
    assert any(op.opcode.startswith("aten._fused_adamw_") for op, _ in found.counted({"L": 2}))
