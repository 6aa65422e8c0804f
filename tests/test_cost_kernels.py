"""Single kernels and collectives: the cost model beside public measurements that are not training runs."""

from __future__ import annotations

import pytest

from memir.analysis.cost.attention import attention_seconds
from memir.analysis.cost.collectives import KINDS, collective_seconds
from memir.analysis.cost.device import LAUNCH, device
from memir.analysis.cost.product import product_seconds
from memir.errors import UsageError
from memir.hardware import Card, cards, find_card
from memir.hardware.achieved import achieved
from memir.hardware.links import Cluster, inter_link, intra_link

# TFLOP/s of cuBLASLt in fp16, Azure/AI-benchmarking-guide, Azure_Results/ND_A100_v4_results.md; the last two shapes are odd in
# one extent and long with a narrow result
PRODUCTS = [
    (1024, 1024, 1024, 119.4, 0.09),
    (2048, 2048, 2048, 221.8, 0.03),
    (4096, 4096, 4096, 228.0, 0.09),
    (8192, 8192, 8192, 253.7, 0.03),
    (16384, 16384, 16384, 256.5, 0.03),
    (6144, 12288, 12288, 250.8, 0.03),
    (1024, 2145, 1024, 132.8, 0.35),
    (802816, 192, 768, 157.8, 0.35),
]
# bus bandwidth of all_reduce on 8 A100, GB/s, the same page
REDUCED = [(1 << 28, 213.87), (1 << 29, 221.58), (1 << 30, 228.10), (1 << 33, 231.58)]


def card(name: str) -> Card:
    found = find_card(name)
    assert found is not None
    return found


A100 = card("a100-80gb")
NODE = Cluster(8, 8, intra_link(A100), inter_link("ib-200"))


@pytest.mark.parametrize(("m", "n", "k", "measured", "within"), PRODUCTS)
def test_products_by_shape(m: int, n: int, k: int, measured: float, within: float) -> None:
    seconds = product_seconds(1, m, n, k, "f16", device(A100)) + LAUNCH
    assert 2 * m * n * k / seconds / 1e12 == pytest.approx(measured, rel=within)


@pytest.mark.parametrize(("length", "measured"), [(1024, 143.70), (4096, 156.27)])
def test_causal_attention(length: int, measured: float) -> None:
    """liangan1/GPU_travel, performance/flash-attn: 16,384 tokens, 32 heads of 128."""
    flops = 4 * (16384 // length) * 32 * length * length * 128
    seconds = attention_seconds("forward", "aten._flash", False, flops, length, length, device(A100))
    assert flops / 2 / seconds / 1e12 == pytest.approx(measured, rel=0.01)


@pytest.mark.parametrize(("nbytes", "measured"), REDUCED)
def test_all_reduce_of_large_tensors(nbytes: int, measured: float) -> None:
    seconds = collective_seconds("all_reduce", nbytes, 8, 1, NODE)
    assert 2 * 7 / 8 * nbytes / seconds / 1e9 == pytest.approx(measured, rel=0.08)


@pytest.mark.parametrize("kind", KINDS)
def test_a_collective_takes_longer_for_more_bytes_and_over_the_network(kind: str) -> None:
    two = Cluster(16, 8, NODE.intra, NODE.inter)
    for nbytes in (1, 1000, 10**6, 10**9):
        near = collective_seconds(kind, nbytes, 8, 1, two)
        assert 0 < near < collective_seconds(kind, 2 * nbytes + 1, 8, 1, two) + 1e-12
        assert near < collective_seconds(kind, nbytes, 2 if kind == "send" else 16, 8 if kind == "send" else 1, two)
    assert collective_seconds(kind, 10**6, 1, 1, two) == 0


def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather() -> None:
    parts = sum(collective_seconds(kind, 1 << 32, 8, 1, NODE) for kind in ("reduce_scatter", "all_gather"))
    assert collective_seconds("all_reduce", 1 << 32, 8, 1, NODE) == pytest.approx(parts, rel=0.001)


def test_every_card_reaches_a_part_of_its_datasheet() -> None:
    for one in cards():
        part = achieved(one)
        assert 0 < part.product < 1
        assert 0 < part.stream < 1
        assert 0 < part.flash_causal <= part.flash < 1
        assert all(part.sources)
        slow = device(one, power=0.5)
        assert slow.half == pytest.approx(device(one).half * 0.5 ** (1 / 3))
        assert slow.bandwidth == device(one).bandwidth < one.bandwidth


def test_links_by_name() -> None:
    assert intra_link(A100).bandwidth == pytest.approx(240e9)
    assert intra_link(A100, "pcie").bandwidth == pytest.approx(24e9)
    assert intra_link(card("h100")).bandwidth == pytest.approx(370.8e9)
    assert intra_link(card("v100-16gb")).bandwidth == pytest.approx(120e9)
    assert intra_link(card("l4")).name == "pcie"
    assert inter_link("ib-400").bandwidth == pytest.approx(48e9)
    assert inter_link("RoCE-100").bandwidth == pytest.approx(12e9)
    for wrong in ("ib", "ib-0", "400", "nvlink"):
        with pytest.raises(UsageError):
            inter_link(wrong)
    with pytest.raises(UsageError, match="no NVLink"):
        intra_link(card("l4"), "nvlink")
    with pytest.raises(UsageError, match="no link"):
        intra_link(A100, "ib-400")


def test_nothing_to_multiply_takes_no_time() -> None:
    assert product_seconds(0, 128, 128, 128, "bf16", device(A100)) == 0
