"""The callback in a real Trainer: it freezes, caches and resumes; the weights are those of a plain loop's AutoFreeze."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from memir.errors import UsageError
from memir.freezing import ActivationCache, FreezingCallback
from tests.decoders import ids
from tests.test_freezing_prefix import hugging_face


class Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        row = ids(1, 7, seed=number)[0]
        return {"input_ids": row, "labels": row, "attention_mask": torch.ones_like(row)}


def arguments(folder: Path, **settings: Any) -> Any:
    return transformers.TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=6,
        per_device_train_batch_size=2,
        learning_rate=0.01,
        save_strategy="steps",
        save_steps=14,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        seed=3,
        disable_tqdm=True,
        **settings,
    )


def trained(folder: Path, callback: FreezingCallback, resume: str | None = None, **settings: Any) -> Any:
    model = hugging_face("llama", tie_word_embeddings=False)
    args = arguments(folder, **settings)
    trainer = transformers.Trainer(model=model, args=args, train_dataset=Samples(), callbacks=[callback])
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, FreezingCallback, Path]:
    folder = tmp_path_factory.mktemp("plain")
    callback = FreezingCallback(num_intervals=6)
    return trained(folder, callback), callback, folder


def test_it_freezes_and_says_so(plain: tuple[Any, FreezingCallback, Path]) -> None:
    trainer, callback, _ = plain
    assert callback.freezer is not None
    assert [event.step for event in callback.freezer.events][:2] == [8, 12]
    assert callback.freezer.cut == 2
    frozen = {name for name, p in trainer.model.named_parameters() if not p.requires_grad}
    assert {"model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight"} <= frozen
    assert not any(name.startswith(("model.layers.2", "lm_head")) for name in frozen)
    trains = {id(p) for p in trainer.model.parameters() if p.requires_grad}
    assert {id(p) for p in trainer.optimizer.state} == trains


@pytest.mark.parametrize(("settings", "percentile"), [({}, 50), ({"gradient_accumulation_steps": 2}, 80)])
def test_with_a_cache_the_losses_are_the_same(
    plain: tuple[Any, FreezingCallback, Path], tmp_path: Path, settings: dict[str, Any], percentile: float
) -> None:
    expected = plain[0]
    if settings:
        expected = trained(tmp_path / "plain", FreezingCallback(num_intervals=6, percentile=percentile), **settings)
    cache = ActivationCache(tmp_path / "activations")
    callback = FreezingCallback(num_intervals=6, percentile=percentile, cache=cache)
    trainer = trained(tmp_path / "cached", callback, **settings)
    assert callback.freezer is not None
    assert losses(trainer) == pytest.approx(losses(expected), rel=1e-4)
    assert cache.problem == ""
    assert cache.hits >= 4
    assert cache.ahead >= 4  # read ahead of need, through accelerate's loader
    cache.close()


def test_a_resumed_training_goes_on(plain: tuple[Any, FreezingCallback, Path], tmp_path: Path) -> None:
    trainer, callback, folder = plain
    checkpoint = folder / "checkpoint-14"
    assert json.loads((checkpoint / "trainer_state.json").read_text())["global_step"] == 14
    again = FreezingCallback(num_intervals=6, resume=checkpoint / "freezing.pt")
    resumed = trained(tmp_path, again, resume=str(checkpoint))
    assert callback.freezer is not None
    assert again.freezer is not None
    assert again.freezer.events == callback.freezer.events
    for (name, one), other in zip(trainer.model.named_parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other), name


def test_a_state_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        trained(tmp_path, FreezingCallback(resume=tmp_path / "freezing.pt"))
    with pytest.raises(UsageError, match="at least 2"):
        FreezingCallback(num_intervals=1)
