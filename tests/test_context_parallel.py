"""context-parallel: what is divided, what is refused, and the layers stay folded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from memir.analysis.liveness import timeline
from memir.api import program_of
from memir.errors import InconclusiveError, MemirError, UsageError
from memir.ir.core import Kind, Program
from memir.ir.parser import parse
from memir.ir.printer import to_text
from memir.ir.size import Size
from memir.ir.unroll import bind, unroll
from memir.ir.verify import verify
from memir.parallel.relayout import viewed
from memir.passes.context_parallel import ContextParallel
from memir.recipe import Recipe

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "golden" / "context_parallel" / "ring.memir"


def golden() -> str:
    text = GOLDEN.read_text()
    return text[text.index("memir 1") : text.index("# ---")]


@pytest.fixture(scope="module")
def folded() -> Program:
    target = str(ROOT / "examples" / "llama.py") + ":small"
    recipe = Recipe(target="cpu", dtype="f32")
    return program_of(target, recipe, batch=2, seq=64, sets={"n_layers": "9", "dim": "32"}, cache=False).program


@pytest.mark.parametrize("rank", [0, 1])
def test_lifted(folded: Program, rank: int) -> None:
    """Over the depth L, and at depths that no sample had, the same as on the layers written out."""
    env = {"B": 2, "S": 64}
    one = ContextParallel(2, rank)
    lifted = one.run(folded)
    verify(lifted)
    assert "L" in lifted.dims
    assert parse(to_text(lifted)) == lifted
    for depth in (5, 13):
        flat = one.run(unroll(folded, {"L": depth}))
        assert timeline(unroll(lifted, {"L": depth})).evaluate(env) == timeline(flat).evaluate(env)


def test_a_rank_has_its_part_of_the_sequence_and_all_parameters(folded: Program) -> None:
    rank = ContextParallel(4, 1).run(folded)
    for kind in (Kind.PARAMETER, Kind.GRADIENT, Kind.OPTIMIZER_STATE, Kind.BUFFER):
        assert [s.nbytes for s in rank.storages if s.kind == kind] == [s.nbytes for s in folded.storages if s.kind == kind]
    whole, part = ({s.name: s.nbytes for s in p.storages if s.kind == Kind.INPUT} for p in (folded, rank))
    for name, nbytes in whole.items():
        assert part[name].evaluate({"B": 2, "S": 64}) * 4 == nbytes.evaluate({"B": 2, "S": 64})
    assert "S % 8 == 0" in rank.domain
    assert "S % 4 == 0" in ContextParallel(4, 1, balance=False).run(folded).domain


def test_degree_one_is_the_identity(folded: Program) -> None:
    assert ContextParallel(1, 7).run(folded) is folded


def test_all_ranks_are_alike_without_balance() -> None:
    """But those that causality gives nothing to compute make zeros in the place of gradients."""
    program = parse(golden())
    env = {"B": 2, "S": 64}
    first, last = (timeline(ContextParallel(2, rank, balance=False).run(program)).evaluate(env) for rank in (0, 1))
    assert first.start == last.start
    assert first.peak <= last.peak


@pytest.mark.parametrize(
    ("change", "options", "kind", "message"),
    [
        (("", ""), {"degree": 2, "rank": 2}, UsageError, "rank 2 of 2"),
        (("", ""), {"degree": -1}, UsageError, "degree -1"),
        (("_flash_attention(%q, %k, %v)", "_flash_attention(%q, %k, %v, %x)"), {"degree": 2}, UsageError, "takes no mask"),
        (("_scaled_dot_product_flash_attention(", "_attention("), {"degree": 2}, UsageError, "calls no attention kernel"),
    ],
    ids=["rank", "degree", "mask", "no kernel"],
)
def test_refused(change: tuple[str, str], options: dict[str, Any], kind: type[MemirError], message: str) -> None:
    text = golden()
    if "no attention" in message:
        text = text.replace("_scaled_dot_product_flash_attention_backward", "_attention_backward")
    with pytest.raises(kind, match=message):
        ContextParallel(**options).run(parse(text.replace(*change) if change[0] else text))


def test_a_sequence_that_is_a_number() -> None:
    with pytest.raises(InconclusiveError, match="sequence is a number"):
        ContextParallel(2).run(bind(parse(golden()), {"S": 64}))


def test_twice() -> None:
    once = ContextParallel(2).run(parse(golden()))
    with pytest.raises(UsageError, match="has this axis already"):
        ContextParallel(2).run(replace(once))


@pytest.mark.parametrize(
    ("shape", "strides", "wanted"),
    [
        ((2, 3, 4), (12, 4, 1), (6, 4)),
        ((2, 3, 4), (12, 4, 1), (24,)),
        ((2, 3, 4), (4, 8, 1), (6, 4)),
        ((2, 3, 4), (4, 8, 1), (2, 3, 2, 2)),
        ((2, 3, 4), (24, 8, 2), (6, 4)),
        ((2, 3, 4), (24, 8, 2), (24,)),
        ((6, 4), (1, 6), (2, 3, 4)),
        ((6, 4), (1, 6), (24,)),
        ((2, 5, 3, 4), (60, 4, 20, 1), (2, 5, 12)),
        ((2, 5, 3, 4), (60, 12, 4, 1), (10, 12)),
    ],
)
def test_viewed_as_pytorch(shape: tuple[int, ...], strides: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    import torch

    tensor = torch.empty(200).as_strided(shape, strides)
    try:
        theirs = tensor.view(wanted).stride()
    except RuntimeError:
        theirs = None
    mine = viewed(*(tuple(map(Size.of, numbers)) for numbers in (shape, strides, wanted)))
    assert (mine if mine is None else tuple(size.constant for size in mine)) == theirs
