"""DistributedDataParallel as a pass: folded equals unrolled, nothing is lost, buckets are the reducer's."""

from __future__ import annotations

from pathlib import Path

import pytest

from memir.analysis.liveness import timeline
from memir.ir.core import Kind, Program
from memir.ir.parser import parse
from memir.ir.size import ZERO, Size
from memir.ir.unroll import bind, unroll
from memir.ir.verify import verify
from memir.parallel.buckets import assigned
from memir.pipeline import Pipeline

DEEP = Path(__file__).parent / "golden" / "data_parallel" / "depth.memir"
TINY = Path(__file__).parent / "golden" / "data_parallel" / "buckets.memir"
OPTIONS = ("", " gradient-as-bucket-view", " broadcast-buffers=false", " hook=allreduce")


def held(program: Program, kind: Kind) -> Size:
    """Bytes of a kind that live from step to step, or are made in it."""
    return sum((s.nbytes for s in program.storages if s.kind == kind), start=ZERO)


@pytest.mark.parametrize("options", OPTIONS)
def test_folded_is_unrolled(options: str) -> None:
    folded = parse(DEEP.read_text())
    passes = Pipeline.parse(f"data-parallel{{degree=4{options}}}")
    new = passes.run(folded)
    verify(new)
    env = {"B": 2, "S": 8, "L": 9}
    one = timeline(new).evaluate(env)
    flat = timeline(passes.run(unroll(bind(folded, {"L": 9})))).evaluate({"B": 2, "S": 8})
    assert (one.start, one.peak, one.after[-1]) == (flat.start, flat.peak, flat.after[-1])


def test_every_rank_has_all_parameters_and_a_bucket_as_large() -> None:
    before = parse(TINY.read_text())
    after = Pipeline.parse("data-parallel{degree=4}").run(before)
    for kind in (Kind.PARAMETER, Kind.GRADIENT, Kind.OPTIMIZER_STATE):
        assert held(after, kind) == held(before, kind)
    assert held(after, Kind.COLLECTIVE) == held(before, Kind.GRADIENT)
    view = Pipeline.parse("data-parallel{degree=4 gradient-as-bucket-view}").run(before)
    resident = sum((s.nbytes for s in view.storages if s.kind == Kind.GRADIENT and s.live_in), start=ZERO)
    assert resident == held(before, Kind.GRADIENT)
    assert after.mesh == view.mesh == (("data-parallel", Size.of(4)),)


def test_buckets_are_full_when_they_reach_their_limit_and_each_dtype_has_its_own() -> None:
    sizes = [("f32", 4), ("bf16", 2), ("f32", 4), ("f32", 8), ("bf16", 2), ("f32", 1)]
    found = assigned([(dtype, Size.of(n)) for dtype, n in sizes], (6, 8))
    assert found == [[0, 2], [3], [1, 4], [5]]
