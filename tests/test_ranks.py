"""Steps on several real CPU ranks: what is added up by hand, determinism, and what is said when a rank fails."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from memir.errors import InconclusiveError, ParseError, UsageError
from memir.frontend.parallel import parse_methods
from memir.frontend.parallel.method import world_size
from memir.recipe import Recipe
from memir.runtime.ranks import real_ranks
from memir.runtime.real import RealStep, measure_in_child

TARGET = "examples/llama.py:small"
RECIPE = Recipe(target="cpu", dtype="f32")


def test_the_methods_text_gives_the_mesh() -> None:
    methods = parse_methods("fsdp{degree=4 replicate=2},tensor-parallel{degree=2 sequence}")
    assert [axis.name for method in methods for axis in method.axes()] == ["replicate", "shard", "tensor"]
    assert world_size(methods) == 16
    with pytest.raises(ParseError, match="no option 'degre'"):
        parse_methods("fsdp{degre=4}")
    with pytest.raises(UsageError, match="no method 'fsdp3'"):
        parse_methods("fsdp3{degree=4}")


def test_fsdp_halves_what_lives_across_steps_and_is_the_same_on_every_rank() -> None:
    alone = measure_in_child(RealStep(TARGET, RECIPE, 2, 64))
    first, second = real_ranks(TARGET, RECIPE, 2, 64, method="fsdp{degree=2}")
    assert [(e.delta, e.total, e.ops) for e in first.timeline] == [(e.delta, e.total, e.ops) for e in second.timeline]
    assert first.at_start == first.at_end
    replicated = 2 * 8192 * 32 * 4 + 2 * 2 * 64 * 8  # rotary tables, ids and targets
    scalars = 4 * 21  # Adam's step of each of the 21 parameters, whole on every rank
    assert abs((alone.at_start - replicated) - 2 * (first.at_start - replicated)) == scalars


def test_a_world_that_is_not_the_methods_is_refused() -> None:
    with pytest.raises(UsageError, match="the method has 2 ranks, not 4"):
        real_ranks(TARGET, RECIPE, 2, 64, method="fsdp{degree=2}", world=4)
    with pytest.raises(UsageError, match="ranks run on the CPU"):
        real_ranks(TARGET, Recipe(), 2, 64, method="fsdp{degree=2}")


def test_what_a_rank_says_of_the_input_is_the_users() -> None:
    with pytest.raises(UsageError, match="n_heads=8 is not divisible by degree 3"):
        real_ranks(TARGET, RECIPE, 2, 64, method="tensor-parallel{degree=3}")


def test_a_rank_that_dies_is_told_with_its_stderr_and_none_is_left() -> None:
    with pytest.raises(InconclusiveError, match=r"rank \d of 2 ended without a result") as caught:
        real_ranks(TARGET, RECIPE, 2, 64, method="fsdp{degree=2 param-dtype=f8}")
    assert "KeyError: 'f8'" in caught.value.where
    assert not _children()


def test_the_time_limit_ends_all_ranks() -> None:
    with pytest.raises(InconclusiveError, match=r"not finished after 0\.1 seconds"):
        real_ranks(TARGET, RECIPE, 2, 64, method="fsdp{degree=2}", time_limit=0.1)
    assert not _children()


def _children() -> list[str]:
    """Commands of this process's children that run ranks."""
    listed = subprocess.run(["ps", "-o", "args=", "--ppid", str(os.getpid())], capture_output=True, text=True, check=False)
    return [line for line in listed.stdout.splitlines() if "rank_child" in line]


def test_the_module_can_be_started_as_a_process() -> None:
    done = subprocess.run([sys.executable, "-m", "memir.runtime.rank_child"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "IndexError" in done.stderr
