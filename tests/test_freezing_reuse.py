"""Training from cached activations: bit for bit the training without them, and never where it would not be."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memir.errors import InconclusiveError
from memir.freezing import ActivationCache, FrozenPrefix
from memir.runtime.freezing.samples import arguments_of, samples_of
from tests.decoders import Decoder, decoder, ids
from tests.test_freezing_prefix import hugging_face

Batch = dict[str, Tensor]


def padded(numbers: list[int]) -> Batch:
    """Samples of 4 to 9 tokens, right padded to the longest of the batch."""
    rows = [ids(1, 4 + n % 6, seed=n)[0] for n in numbers]
    length = max(map(len, rows))
    mask = torch.stack([(torch.arange(length) < len(row)).long() for row in rows])
    tokens = torch.stack([nn.functional.pad(row, (0, length - len(row))) for row in rows])
    return {"ids": tokens, "targets": tokens, "mask": mask}


def epochs(count: int) -> list[list[list[int]]]:
    """Eight samples in batches of two, shuffled anew in each epoch."""
    dealt = []
    for epoch in range(count):
        order = list(range(8))
        random.Random(epoch).shuffle(order)
        dealt.append([order[at : at + 2] for at in range(0, 8, 2)])
    return dealt


def train(
    model: nn.Module,
    cache: ActivationCache | None,
    cuts: dict[int, int],
    make: Callable[[list[int]], Batch] = padded,
    num_epochs: int = 4,
    around: Callable[[], Any] = nullcontext,
) -> list[float]:
    """The loss of each step; `cuts` says from which epoch on which cut holds, `around` what forward passes run in."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    prefix = FrozenPrefix(model, optimizer, cache)
    prefix.observe(**make([0, 1]))
    losses = []
    model.train()
    for epoch, dealt in enumerate(epochs(num_epochs)):
        prefix.set_cut(max([cut for at, cut in cuts.items() if at <= epoch], default=0))
        for batch in prefix.batches(make(numbers) for numbers in dealt):
            with around():
                out = model(**batch)
            loss = out if isinstance(out, Tensor) else out.loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        if cache is not None:
            cache.flush()
    return losses


@pytest.mark.parametrize("on_disk", [True, False])
def test_the_same_training_as_without_a_cache(tmp_path: Path, on_disk: bool) -> None:
    """With dropout in the layers that train, and a mask: to the last bit, weights too."""
    plain, cached = decoder(dropout=0.2), decoder(dropout=0.2)
    cache = ActivationCache(tmp_path if on_disk else None)
    expected = train(plain, None, {1: 2})
    assert train(cached, cache, {1: 2}) == expected
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), cached.parameters(), strict=True))
    assert (cache.problem, cache.full, cache.hits, cache.misses, cache.samples) == ("", "", 8, 4, 8)
    tokens = sum(4 + n % 6 for n in range(8))
    assert cache.nbytes == tokens * 16 * 4  # without padding
    cache.close()


@pytest.mark.parametrize("shared", [False, True])
def test_under_autocast_the_same_too(shared: bool) -> None:
    """Autocast keeps casts of weights; those that were made without gradients must not reach the layers that train."""

    def run(cache: ActivationCache | None, cuts: dict[int, int]) -> tuple[list[float], Decoder]:
        model = decoder()
        if shared:
            model.layers[3].mlp = model.layers[0].mlp
        return train(model, cache, cuts, num_epochs=2, around=lambda: torch.autocast("cpu", torch.bfloat16)), model

    cache = ActivationCache()
    (expected, plain), (found, cached) = run(None, {0: 2}), run(cache, {0: 2})
    assert found == expected
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), cached.parameters(), strict=True))
    assert not torch.equal(cached.layers[3].mlp[0].weight, decoder().layers[0 if shared else 3].mlp[0].weight)  # it trains
    assert (cache.hits > 0) == (not shared)
    cache.close()


def test_a_grown_cut_begins_from_the_earlier_activations(tmp_path: Path) -> None:
    plain, cached = decoder(), decoder()
    cache = ActivationCache(tmp_path)
    assert train(cached, cache, {1: 2, 2: 3, 4: 4}, num_epochs=6) == train(plain, None, {1: 2, 2: 3, 4: 4}, num_epochs=6)
    assert cache.misses == 4  # only while the first cut's were written
    cache.close()


def test_cached_layers_are_passed_over_and_others_are_not() -> None:
    model = decoder()
    calls = [0] * 4
    for number, layer in enumerate(model.layers):
        layer.mlp.register_forward_hook(lambda *_, number=number: calls.__setitem__(number, calls[number] + 1))
    cache = ActivationCache()
    train(model, cache, {0: 2}, num_epochs=1)
    before = list(calls)
    prefix_was_written = cache.hits == 0
    model(**padded([0, 1])).backward()
    assert prefix_was_written
    assert [a - b for a, b in zip(calls, before, strict=True)] == [0, 0, 1, 1]
    before = list(calls)
    model.eval()
    model(**padded([0, 1]))
    model.train()
    model(**padded([0, 9]))  # 9 was never seen
    assert [a - b for a, b in zip(calls, before, strict=True)] == [2, 2, 2, 2]
    cache.close()


@pytest.mark.parametrize("kind", ["llama", "gpt2", "opt", "mixtral"])
def test_hugging_face_models(kind: str, tmp_path: Path) -> None:
    def make(numbers: list[int]) -> Batch:
        batch = padded(numbers)
        return {
            "input_ids": batch["ids"],
            "labels": batch["ids"].masked_fill(batch["mask"] == 0, -100),
            "attention_mask": batch["mask"],
        }

    def model() -> nn.Module:
        return hugging_face(kind, tie_word_embeddings=False)

    cache = ActivationCache(tmp_path)
    expected = train(model(), None, {0: 2}, make, num_epochs=2)
    assert train(model(), cache, {0: 2}, make, num_epochs=2) == pytest.approx(expected, rel=1e-5)  # kernels by batch shape
    assert (cache.problem, cache.hits) == ("", 4)
    cache.close()


def problem_of(model: nn.Module, make: Callable[[list[int]], Batch], caplog: pytest.LogCaptureFixture) -> str:
    """Trains two epochs with a cache that must turn itself off: the losses are those without one."""
    import copy

    caplog.set_level(logging.WARNING, "memir.freezing")
    cache = ActivationCache()
    expected = train(copy.deepcopy(model), None, {0: 2}, make, num_epochs=2)
    assert train(model, cache, {0: 2}, make, num_epochs=2) == expected
    assert [record.getMessage() for record in caplog.records] == [
        f"the activation cache is off, frozen layers are computed again from here on: {cache.problem}"
    ]
    assert cache.hits == 0
    cache.close()
    return cache.problem


def test_a_tied_embedding_trains_on_so_nothing_may_be_cached(caplog: pytest.LogCaptureFixture) -> None:
    assert "head.weight still trains through what follows" in problem_of(decoder(tied=True), padded, caplog)


def test_dropout_that_is_no_module_makes_activations_random(caplog: pytest.LogCaptureFixture) -> None:
    said = problem_of(decoder(functional_dropout=0.5), padded, caplog)
    assert "other activations for the same batch" in said


def test_left_padding_makes_activations_depend_on_the_batch(caplog: pytest.LogCaptureFixture) -> None:
    def left(numbers: list[int]) -> Batch:
        return {name: tensor.flip(1) for name, tensor in padded(numbers).items()}

    assert "padded in front" in problem_of(decoder(), left, caplog)


def test_layers_that_hand_on_more_than_hidden_states(caplog: pytest.LogCaptureFixture) -> None:
    class Residual(Decoder):
        """Every layer's result goes into the logits, past the layers that follow."""

        def forward(self, ids: Tensor, targets: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
            x = self.tokens(ids)
            total = torch.zeros_like(x)
            for layer in self.layers:
                x = layer(x)
                total = total + x
            return nn.functional.cross_entropy(self.head(total).flatten(0, 1), ids.flatten())

    torch.manual_seed(0)
    assert "the outputs change when the frozen layers are passed over" in problem_of(Residual(), padded, caplog)


def test_layers_that_return_more(caplog: pytest.LogCaptureFixture) -> None:
    model = decoder()

    class WithExtra(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            x = self.layer(x)
            return x, x.mean()

    class Summed(Decoder):
        def forward(self, ids: Tensor, targets: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
            x = self.tokens(ids)
            for layer in self.layers:
                x, _ = layer(x)
            return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())

    model.__class__ = Summed
    model.layers = nn.ModuleList(WithExtra(layer) for layer in model.layers)
    assert "layer 0 returns more than hidden states" in problem_of(model, padded, caplog)


def test_another_models_folder_and_one_that_went_away(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(decoder(), cache := ActivationCache(tmp_path), {0: 2}, num_epochs=1)
    cache.close()
    other = decoder()
    with torch.no_grad():
        other.layers[0].mlp[0].weight[0, 0] += 1e-6
    again = ActivationCache(tmp_path)
    losses = train(other, again, {0: 2}, num_epochs=2)
    assert len(losses) == 8
    assert "of another model, or of this one with other frozen weights" in again.problem
    again.close()
    gone = ActivationCache(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    (tmp_path / "gone").write_text("a file")
    assert len(train(decoder(), gone, {0: 2}, num_epochs=2)) == 8
    assert "activations cannot be written" in gone.problem
    gone.close()


def test_the_same_run_started_again_reads_what_it_wrote(tmp_path: Path) -> None:
    for expected_hits in (0, 4):
        cache = ActivationCache(tmp_path)
        train(decoder(), cache, {0: 2}, num_epochs=1)
        assert (cache.problem, cache.hits) == ("", expected_hits)
        cache.close()


# -- what tells a sample


def test_a_sample_is_its_tokens() -> None:
    one, two = samples_of(padded([0, 5])), samples_of(padded([5, 1]))
    assert one.keys[1] == two.keys[0] != one.keys[0]
    assert one.lengths == (4, 9)
    other = padded([0, 5])
    other["ids"][0, 3] += 1
    assert samples_of(other).keys[0] != one.keys[0]
    assert samples_of(other).keys[1] == one.keys[1]


def test_positions_belong_to_a_sample_and_labels_do_not() -> None:
    x = ids()
    plain = samples_of({"input_ids": x})
    assert samples_of({"input_ids": x, "labels": x + 1, "num_items_in_batch": torch.tensor(9)}) == plain
    moved = samples_of({"input_ids": x, "position_ids": torch.arange(7)[None] + 1})
    assert not set(moved.keys) & set(plain.keys)


@pytest.mark.parametrize(
    "arguments", [{}, {"inputs_embeds": torch.zeros(2, 3, 4)}, {"mask": torch.ones(2, 3, dtype=torch.bool)}]
)
def test_without_tokens_there_is_no_sample(arguments: dict[str, Any]) -> None:
    with pytest.raises(InconclusiveError, match="no token ids"):
        samples_of(arguments)


def test_arguments_by_the_names_of_forward() -> None:
    x, y = ids(), ids(seed=1)
    assert list(arguments_of(decoder(), (x, y), {"mask": x})) == ["ids", "targets", "mask"]
    with pytest.raises(InconclusiveError, match="no call of Decoder"):
        arguments_of(decoder(), (x,), {"labels": y})
