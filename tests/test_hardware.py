"""The table of GPUs: what must hold of every card, figures of public sources, and what `--gpu` takes and refuses."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memir.errors import UsageError
from memir.hardware import Card, Gpu, cards, find_card, parse_gpu
from memir.hardware.parse import _spelling

ARCHITECTURES = {"7.0", "7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "12.0"}  # CUDA C++ Programming Guide, compute capabilities


@pytest.mark.parametrize("card", cards(), ids=lambda card: card.key)
def test_what_holds_of_every_card(card: Card) -> None:
    assert card.compute in ARCHITECTURES
    assert 0.9 * card.nominal < card.capacity < card.nominal
    assert card.capacity_source
    assert card.source
    assert 20 <= card.sms <= 200
    assert card.fp16 >= card.fp32
    assert card.bandwidth > card.pcie
    assert card.nvlink is None or card.nvlink > card.pcie
    if card.capability < (8, 0):  # Volta's and Turing's tensor cores multiply 16-bit floats only
        assert (card.bf16, card.tf32, card.fp8) == (None, None, None)
        return
    assert card.bf16 == card.fp16
    assert card.tf32 is not None
    assert card.fp32 <= card.tf32 <= card.bf16
    assert (card.fp8 is None) == (card.capability < (8, 9))
    assert card.fp8 is None or card.fp8 >= card.bf16


def test_the_figures_of_one_architecture_differ_by_clock_only() -> None:
    """FLOP a cycle of each SM are the architecture's, so what a card does per SM lies within the range of its clocks."""
    for compute in ARCHITECTURES:
        rates = [card.fp32 / card.sms for card in cards() if card.compute == compute]
        assert max(rates) < 1.5 * min(rates), compute


def test_there_are_thirty_cards_and_each_name_is_one_card() -> None:
    assert len(cards()) >= 30
    names = [_spelling(name) for card in cards() for name in (card.key, *card.aliases)]
    assert [name for name, count in Counter(names).items() if count > 1] == []
    spelled = {_spelling(card.name): card for card in cards()}
    assert len(spelled) == len(cards())


@pytest.mark.parametrize(
    ("key", "mib", "sms"),
    [  # lines of torch.cuda.get_device_properties(0) in public repositories and issues: total_memory, multi_processor_count
        ("v100-sxm2-16gb", 16130, 80),
        ("v100-pcie-32gb", 32510, 80),
        ("t4", 14930, 40),
        ("rtx-2080-ti", 11019, 68),
        ("rtx-3060", 11931, 28),
        ("rtx-3090-ti", 24114, 84),
        ("a10g", 22587, 80),
        ("a40", 45416, 84),
        ("a100-pcie-40gb", 40326, 108),
        ("rtx-a6000", 48676, 84),
        ("rtx-a5000", 24114, 64),
        ("rtx-4080", 16049, 76),
        ("h100-sxm5-80gb", 81082, 132),
        ("h100-pcie", 81008, 114),
        ("b200", 182631, 148),
    ],
)
def test_capacities_are_those_of_the_driver(key: str, mib: int, sms: int) -> None:
    card = find_card(key)
    assert card is not None
    assert (card.capacity, card.sms) == (mib * 2**20, sms)


def test_a_capacity_that_was_published_in_bytes() -> None:
    card = find_card("rtx 6000 ada")
    assert card is not None
    assert card.capacity // 2**20 == 50_865_307_648 // 2**20


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("a100-80gb", "a100-sxm4-80gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm4-80gb"),
        ("rtx-4090", "rtx-4090"),
        ("RTX 4090", "rtx-4090"),
        ("rtx4090", "rtx-4090"),
        ("4090", "rtx-4090"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("h100", "h100-sxm5-80gb"),
        ("H100_NVL", "h100-nvl"),
        ("Tesla T4", "t4"),
        (" a6000 ", "rtx-a6000"),
    ],
)
def test_names_as_people_type_them(text: str, key: str) -> None:
    found = parse_gpu(text)
    assert found.card is not None
    assert found.card.key == key
    assert (found.name, found.nbytes) == (text.strip(), found.card.capacity)


def test_an_amount_is_no_card() -> None:
    assert parse_gpu("80GiB") == Gpu("80GiB", 80 * 2**30, None)


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("a100", "no known GPU", "nearest: a100-sxm4-40gb, a100-pcie-40gb, a100-sxm4-80gb, a100-pcie-80gb;"),
        ("rtx-4900", "no known GPU", "rtx-4090"),
        ("foo", "no known GPU", "memir gpus"),
        ("80GB", "10^9 or 2^30", "--gpu 80GiB"),
        ("2TiB", "more than the memory of any GPU", "--gpu 80GiB"),
        ("0GiB", "no memory at all", ""),
    ],
)
def test_what_is_refused_and_what_is_said(text: str, message: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_gpu(text)
    assert message in caught.value.message
    assert hint in (caught.value.hint or "")


@given(st.text(max_size=12))
def test_any_text_is_a_gpu_or_a_usage_error(text: str) -> None:
    with suppress(UsageError):
        assert parse_gpu(text).nbytes > 0
