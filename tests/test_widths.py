"""Sizes over widths: what is told from numbers at several widths, what stays a number, and that a fresh trace agrees."""

from __future__ import annotations

from pathlib import Path

import pytest

import memir
from memir.api import program_of, wide_step
from memir.derivation.derive import Derivation
from memir.derivation.step import WideStep, shown
from memir.errors import UsageError
from memir.frontend.widths.coefficients import Coefficients, NotGeneralError
from memir.frontend.widths.fields import find_widths, fresh, points
from memir.ir.size import Size, ceil_div, floor_div

ROOT = Path(__file__).resolve().parents[1]
GPT = str(ROOT / "examples" / "gpt.py")
SMALL = {"n_layer": 6, "n_embd": 128, "n_head": 4, "vocab_size": 1000, "block_size": 256}
LLAMA = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
}
h, f, k, g, d, B, S = (Size.of(name) for name in ("h", "f", "k", "g", "d", "B", "S"))


@pytest.fixture(scope="module")
def coefficients() -> Coefficients:
    widths = find_widths(LLAMA, memir.Recipe())
    return Coefficients(widths.factors(), [widths.target, *points(widths, 4)])


@pytest.mark.parametrize(
    "size",
    [
        2 * h * f,
        6 * h,
        k * g * d,
        (k * g + 2 * k) * d,  # query, key and value in one matrix
        floor_div(d, 2),
        k * g * 512 + 16384 * k * g * ceil_div(d, 32),  # the workspace of flash attention's backward
        3 * h + 7,
        Size.of(12),
    ],
    ids=str,
)
def test_a_number_is_told_by_its_values(coefficients: Coefficients, size: Size) -> None:
    values = tuple(size.evaluate(point) for point in coefficients.points)
    assert coefficients.of(values) is size


def test_what_is_no_polynomial_is_refused(coefficients: Coefficients) -> None:
    values = tuple(point["h"] ** 2 % 1009 + point["f"] // 7 for point in coefficients.points)
    with pytest.raises(NotGeneralError, match="no polynomial in the widths"):
        coefficients.of(values)


def test_sizes_over_batch_and_sequence_keep_their_form(coefficients: Coefficients) -> None:
    size = 2 * B * S * h + 4 * B * k * g * ceil_div(S, 128) + 8 * B
    assert coefficients.size(tuple(size.substitute(point) for point in coefficients.points)) is size


def test_fields_that_the_code_ties_stay_tied() -> None:
    tied = find_widths({"n_embd": 768, "n_head": 12, "vocab_size": 50257, "n_positions": 1024}, memir.Recipe())
    assert dict(tied.symbols)["h"] is Size.of("a") * Size.of("d")
    assert tied.sets({"a": 5, "d": 56, "V": 60000, "P": 2000})["n_embd"] == "280"
    grouped = find_widths(LLAMA, memir.Recipe())
    assert dict(grouped.symbols)["a"] is k * g
    as_many = find_widths({**LLAMA, "num_key_value_heads": 32}, memir.Recipe())
    assert as_many.sizes({**as_many.target, "a": 7})["k"] == 7
    both = find_widths({"dim": 64, "hidden_dim": 256, "n_heads": 4}, memir.Recipe())
    assert dict(both.fields) == {"dim": "h", "hidden_dim": "f", "n_heads": "a"}


def test_random_points_lie_within_the_limits_of_the_target() -> None:
    widths = find_widths(LLAMA, memir.Recipe())
    for seed in range(50):
        point = fresh(widths, seed)
        values = widths.sizes(point)
        assert values["h"] % values["a"] == values["a"] % values["k"] == point["d"] % 8 == 0
        assert 64 < point["d"] <= 128
        assert values["V"] > 128256  # tokens that the configuration names exist


@pytest.fixture(scope="module")
def small() -> WideStep:
    return wide_step(GPT, sets=SMALL, seed=3)


def test_every_width_of_a_file_is_a_symbol(small: WideStep) -> None:
    over = shown(small)
    assert tuple(over.env) == ("B", "S", "L", "h", "V", "a", "P")
    assert over.ties == (("d", "h/a"),)
    assert small.numbers == ()
    assert {"8*a divides h", "h <= 64*a", "S <= P"} <= set(over.program.domain)


@pytest.mark.parametrize(
    ("widths", "batch", "seq"),
    [
        ({"n_embd": 240, "n_head": 5, "vocab_size": 1777, "block_size": 300, "n_layer": 7}, 3, 77),
        ({"n_embd": 48, "n_head": 3, "vocab_size": 2011, "block_size": 999, "n_layer": 5}, 4, 130),
    ],
)
def test_a_fresh_trace_at_other_widths_is_the_formula_to_the_byte(
    small: WideStep, widths: dict[str, int], batch: int, seq: int
) -> None:
    derivation = Derivation(shown(small), everywhere=True)
    symbols = {name: symbol for name, symbol in small.fields if name}
    env = {"B": batch, "S": seq, **{symbols[name]: value for name, value in widths.items()}}
    traced = program_of(GPT, sets=widths, batch=batch, seq=seq, cache=False)
    numbers = memir.peak(traced.program)
    at = {name: env[name] for name in traced.program.dims}
    assert max(size.evaluate(env) for size in derivation.quantity("peak").every) == numbers.evaluate(at)[0]
    assert max(size.evaluate(env) for size in derivation.quantity("steady").every) == numbers.resident.evaluate(at)
    for name, envelope in numbers.phases:
        every = derivation.quantity(f"phase:{name}").every
        assert max(size.evaluate(env) for size in every) == envelope.evaluate(at)[0]


def test_symbols_that_are_not_asked_for_become_numbers(small: WideStep) -> None:
    everything = Derivation(shown(small)).quantity("layer").parts[0].size
    some = Derivation(shown(small, ("B", "S", "h", "a"))).quantity("layer").parts[0].size
    assert some is everything  # a layer has no vocabulary
    numbers = Derivation(shown(small, ("B", "S"))).quantity("layer").parts[0].size
    assert numbers is everything.substitute({"h": 128, "a": 4})
    heads = Derivation(shown(small, ("B", "S", "a", "d"))).quantity("layer").parts[0].size
    assert heads is everything.substitute({"h": Size.of("a") * Size.of("d")})


def test_a_symbol_that_there_is_not(small: WideStep) -> None:
    with pytest.raises(UsageError, match="the step has no symbol E"):
        shown(small, ("B", "S", "E"))


ROUNDED = """
import torch
from torch import nn
import torch.nn.functional as F


class Block(nn.Module):
    def __init__(self, n_embd):
        super().__init__()
        inner = 64 * round(n_embd * 8 / 3 / 64)
        self.up = nn.Linear(n_embd, inner, bias=False)
        self.down = nn.Linear(inner, n_embd, bias=False)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    def __init__(self, n_embd=192, vocab_size=500, n_layer=6):
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, n_embd)
        self.layers = nn.ModuleList(Block(n_embd) for _ in range(n_layer))
        self.head = nn.Linear(n_embd, vocab_size)

    def forward(self, idx, targets):
        x = self.tokens(idx)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())
"""


def test_a_width_that_code_rounds_stays_a_number_and_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(ROUNDED)
    step = wide_step(str(tmp_path / "model.py"), seq=64)
    (reason,) = step.numbers
    assert reason.startswith("h = 192: a size is no polynomial in the widths")
    assert tuple(shown(step).env) == ("B", "S", "L", "V")
    assert Derivation(shown(step)).quantity("parameters").value == 2 * step.num_parameters


def test_what_a_factory_does_not_take_is_a_number_or_follows() -> None:
    step = wide_step("examples/llama.py:small", batch=2, seq=16, sets={"n_layers": 6})
    assert any("n_kv_heads is no option of the model" in text for text in step.numbers)
    (part,) = Derivation(shown(step)).quantity("parameters").parts
    narrow = program_of("examples/llama.py:small", batch=2, seq=16, sets={"n_layers": 5, "dim": 128}, cache=False)
    env = {"B": 2, "S": 16, "L": 5, "d": 16}
    assert part.size.evaluate(env) == 2 * (narrow.subject.num_parameters or 0)
