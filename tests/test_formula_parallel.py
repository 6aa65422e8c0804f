"""`memir formula --parallel`: over widths and degrees that are symbols equal to the passes on a fresh trace at other widths."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from click.testing import CliRunner

import memir
from memir.api import TracedProgram, program_of, wide_step
from memir.cli import main
from memir.derivation.derive import Derivation, Quantity
from memir.derivation.solve_degree import smallest, to_smallest_degree
from memir.derivation.step import MEANINGS, WideStep, shown
from memir.errors import UsageError
from memir.one_rank import of_one_rank
from memir.one_rank_widths import on_ranks, with_degrees
from memir.pipeline import Pipeline


@dataclass(frozen=True)
class Case:
    """A model at widths of its own, and the same at others, at which a fresh trace is made."""

    target: str
    own: dict[str, int]
    other: dict[str, int]
    point: dict[str, int]  # the symbols there
    batch: int = 2
    seq: int = 48


def llama(
    hidden: int, wide: int, heads: int, keys: int, vocabulary: int, head: int, layers: int, positions: int
) -> dict[str, int]:
    """The configuration of a Llama."""
    sizes = {"hidden_size": hidden, "intermediate_size": wide, "num_attention_heads": heads, "num_key_value_heads": keys}
    return sizes | {
        "vocab_size": vocabulary,
        "head_dim": head,
        "num_hidden_layers": layers,
        "max_position_embeddings": positions,
    }


def gpt(hidden: int, heads: int, vocabulary: int, layers: int, positions: int) -> dict[str, int]:
    """The configuration of a GPT-2."""
    sizes = {"n_embd": hidden, "n_head": heads, "vocab_size": vocabulary, "n_layer": layers, "n_positions": positions}
    return sizes | {"bos_token_id": 1, "eos_token_id": 1}


LLAMA = Case(
    "llama-3-8b",
    llama(64, 96, 8, 4, 200, 8, 8, 128),
    llama(120, 252, 24, 12, 348, 16, 10, 132),
    {"h": 120, "f": 252, "a": 24, "k": 12, "V": 348, "d": 16, "L": 10, "P": 132},
)
GPT2 = Case("gpt2", gpt(64, 4, 200, 8, 64), gpt(192, 12, 228, 9, 72), {"h": 192, "a": 12, "d": 16, "V": 228, "L": 9, "P": 72})


@pytest.fixture(scope="module", params=[LLAMA, GPT2], ids=["llama", "gpt"])
def traced(request: pytest.FixtureRequest) -> tuple[Case, WideStep, TracedProgram]:
    case: Case = request.param
    wide = wide_step(case.target, batch=2, seq=32, sets=case.own)
    fresh = program_of(case.target, batch=case.batch, seq=case.seq, sets=case.other, cache=False)
    return case, wide, fresh


def ranked(step: WideStep, parallel: str) -> WideStep:
    """The step of a rank, as `wide_step` makes it."""
    found = on_ranks(Pipeline.parse(parallel), step.program, step.env, MEANINGS)
    degrees = {symbol: number for symbol, _, number in found.degrees}
    return replace(step, program=found.program, degrees=found.degrees, env={**step.env, **degrees})


@pytest.mark.parametrize(
    ("parallel", "degrees"),
    [
        ("fsdp{degree=N}", [{"N": 3}, {"N": 8}]),
        ("fsdp{degree=4}", [{}]),
        ("tensor-parallel{degree=t}", [{"t": 2}, {"t": 4}]),
        ("tensor-parallel{degree=2}", [{}]),
        ("tensor-parallel{degree=2 loss}", [{}]),
    ],
)
def test_over_widths_and_degrees_equals_the_passes_on_a_fresh_trace(
    parallel: str, degrees: list[dict[str, int]], traced: tuple[Case, WideStep, TracedProgram]
) -> None:
    case, wide, fresh = traced
    step = ranked(wide, parallel)
    over = shown(step, step.available())  # head sizes apart from h/a where the code allows it
    quantities = {name: Derivation(over, everywhere=True).quantity(name).every for name in ("peak", "steady")}
    for degree in degrees:
        passes = Pipeline.parse(with_degrees(parallel, degree))
        numbers = memir.peak(of_one_rank(fresh.program, None, fresh.dims, passes).program)
        point = {"B": case.batch, "S": case.seq, **case.point, **degree}
        expected = {"peak": numbers.evaluate({**fresh.env, "B": case.batch, "S": case.seq})[0]}
        expected["steady"] = numbers.resident.evaluate({**fresh.env, "B": case.batch, "S": case.seq})
        for name, sizes in quantities.items():
            assert max(size.evaluate(point) for size in sizes) == expected[name], (name, degree)


def test_the_smallest_degree_that_fits(traced: tuple[Case, WideStep, TracedProgram]) -> None:
    _, wide, _ = traced
    quantity: Quantity = Derivation(shown(ranked(wide, "tensor-parallel{degree=t}")), everywhere=True).quantity("peak")
    at = {t: max(size.evaluate({**quantity.shown.env, "t": t}) for size in quantity.every) for t in (2, 4)}
    assert smallest(quantity, "t", at[2])[0] == 2
    assert smallest(quantity, "t", at[2] - 1) == (4, at[4], (2, at[2]))
    assert smallest(quantity, "t", 1)[0] is None
    text, fits = to_smallest_degree(quantity, "t", at[4], "little")
    assert fits
    assert "t = ceil(c1 / (M - c0))" in text


def test_a_degree_that_does_not_divide_and_one_with_another_meaning(traced: tuple[Case, WideStep, TracedProgram]) -> None:
    _, wide, _ = traced
    with pytest.raises(UsageError, match="do not divide by degree 3"):
        ranked(wide, "tensor-parallel{degree=3}")
    with pytest.raises(UsageError, match="the degree V has the name of vocabulary"):
        ranked(wide, "fsdp{degree=V}")


def test_check_takes_a_degree() -> None:
    words = ["--parallel", "fsdp{degree=N}", "--of", "peak,states", "--check", "B=2,S=32,f=136,N=6"]
    sets = [word for name, value in LLAMA.own.items() for word in ("--set", f"{name}={value}")]
    done = CliRunner().invoke(main, ["formula", "llama-3-8b", "-b", "2", "-s", "32", *sets, *words])
    assert done.exit_code == 0, done.stderr
    assert done.stdout.count("+0") == 2


def test_a_hidden_size_without_the_heads() -> None:
    """The heads are a number then, and the head size is no h/a."""
    words = ["--symbols", "B,S,L,h,f,V", "--of", "peak", "--check", "B=2,S=64,h=2048"]
    done = CliRunner().invoke(main, ["formula", "llama-3-8b", "-b", "2", "-s", "64", *words])
    assert done.exit_code == 0, done.stderr
    assert done.stdout.count("+0") == 1
