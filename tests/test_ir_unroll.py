"""Unrolling and binding: both orders give the same program, and what they give verifies."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memir.errors import UsageError
from memir.ir.core import Op, Program, Repeat
from memir.ir.declarations import member_count
from memir.ir.names import full_name, rename, rename_path, split
from memir.ir.parser import parse
from memir.ir.size import ONE, Size
from memir.ir.sizetext import parse_size
from memir.ir.unroll import MAX_OPS, Unrolls, bind, has_repeats, unroll, unroll_located
from memir.ir.verify import verify
from tests.strategies import flat_programs, programs, repeated_programs

HEAD = "memir 1\nprogram @p\n"


def _env(program: Program, number: int) -> dict[str, int]:
    return {"L": number} if "L" in program.dims else {}


@given(repeated_programs(), st.integers(1, 5))
def test_what_is_unrolled_verifies(program: Program, number: int) -> None:
    flat = unroll(program, _env(program, number))
    assert not has_repeats(flat)
    verify(flat)


@given(programs, st.integers(1, 4), st.integers(1, 64))
def test_binding_and_unrolling_commute(program: Program, number: int, batch: int) -> None:
    env = {d: n for d, n in (("B", batch), ("L", number)) if d in program.dims}
    bound = bind(program, env)
    verify(bound)
    assert unroll(bound) == unroll(program, env)
    if "L" in env:
        others = {d: n for d, n in env.items() if d != "L"}
        assert unroll(bind(program, {"L": number}), others) == unroll(program, env)


@given(flat_programs())
def test_a_flat_program_is_left_alone(program: Program) -> None:
    assert unroll(program) == program
    assert bind(program, {}) == program


@given(repeated_programs(), st.integers(1, 4))
def test_live_bytes_do_not_depend_on_the_form(program: Program, number: int) -> None:
    """The bytes declared are the same for the family and for its members."""
    env = _env(program, number)
    folded = sum(s.nbytes.substitute(env) * member_count(s.name).substitute(env).constant for s in program.storages)
    assert folded is sum(s.nbytes for s in unroll(program, env).storages)


@given(repeated_programs(), st.integers(1, 4))
def test_one_program_at_several_numbers_shares_operators_and_is_the_same(program: Program, number: int) -> None:
    unrolls = Unrolls(program)
    for each in (number, number + 1, number):
        assert unrolls.at(_env(program, each)) == unroll_located(program, _env(program, each))


@given(repeated_programs())
def test_a_symbolic_count_stays(program: Program) -> None:
    if "L" in program.dims and len(program.phases) == 2:  # no micro-batches around
        assert unroll(program) == program


@given(repeated_programs(), st.integers(1, 3))
def test_every_operator_knows_its_origin(program: Program, number: int) -> None:
    located = unroll_located(program, _env(program, number))
    flat, origins = located.program, located.ops
    assert [split(s.name)[0] for s in flat.storages] == [split(program.storages[k].name)[0] for k in located.storages]
    assert [split(v.name)[0] for v in flat.values] == [split(program.values[k].name)[0] for k in located.values]

    def textual(ops: tuple[Op | Repeat, ...]) -> list[Op | Repeat]:
        return [x for op in ops for x in ([op] if isinstance(op, Op) else [op, *textual(op.body)])]

    sources = [op for phase in program.phases for op in textual(phase.ops)]
    for (_, op), origin in zip(flat.ops(), origins, strict=True):
        source = sources[origin]
        assert isinstance(source, Op)
        assert (op.opcode, len(op.results)) == (source.opcode, len(source.results))


@pytest.mark.parametrize(
    ("name", "env", "renamed"),
    [
        ("h", {"i": 3}, "h"),
        ("h[i]", {"i": 3}, "h[3]"),
        ("h[i-1]", {"i": 0}, "h[-1]"),
        ("h[L-1-i]", {"i": 0}, "h[L-1]"),
        ("h[L-1-i]", {"L": 4}, "h[3-i]"),
        ("h[m, L-1-i]", {"i": 1, "m": 2, "L": 4}, "h[2,2]"),
        ("h[ m , i ]", {"q": 1}, "h[m,i]"),
        ("h[2-1, 3]", {}, "h[1,3]"),
        ("w[:L]", {"L": 3}, "w[:3]"),
        ("h[ceil(i/2), max(i, 3)]", {"i": 5}, "h[3,5]"),
        ("h[i:j]", {"i": 3}, "h[3:j]"),
        ("h[1:L-1]", {"L": 4}, "h[1:3]"),
        ("h[i][j]", {"i": 3}, "h[i][j]"),
        ("odd [i] name", {"i": 3}, "odd [i] name"),
    ],
)
def test_names(name: str, env: dict[str, int], renamed: str) -> None:
    assert rename(name, env) == renamed


@pytest.mark.parametrize(
    ("name", "full"),
    [
        ("h.*.w[3]", "h.3.w"),
        ("h.2*+1.w[3]", "h.7.w"),
        ("h.2*.w[3]", "h.6.w"),
        ("h.*+1.experts.4.w[0]", "h.1.experts.4.w"),
        ("head.w", "head.w"),
        ("h.*.w[L]", "h.*.w[L]"),
    ],
)
def test_a_family_member_has_the_modules_name(name: str, full: str) -> None:
    assert full_name(name) == full


def test_paths() -> None:
    env = {"i": 2, "m": 1}
    assert rename_path("layers.{i}.experts.{L-1-i}.{x}.{}.{m}", env) == "layers.2.experts.{L-3}.{x}.{}.1"
    assert rename_path("layers.3", env) == "layers.3"


def test_families() -> None:
    assert member_count("w[L]") is Size.of("L")
    assert member_count("kv[:4, L, 3]") is parse_size("4*L")
    assert member_count("w[3]") is member_count("w") is ONE
    assert [i.is_extent for i in split("a[:2, L, 3, ?]")[1]] == [True, True, False, False]


def test_what_cannot_be_unrolled_is_said() -> None:
    loop = parse(
        f"{HEAD}dim B, L\ndomain L <= 8\nphase f\n  repeat i < L - 2\n    aten.f()\n  repeat j < B*B*B\n    aten.g()\n"
    )
    for env, message in (
        ({"Q": 1}, "no symbol Q"),
        ({"L": 9}, "valid only for L <= 8"),
        ({"L": 1}, "executed -1 times"),
        ({"L": 0}, "positive"),
        ({"B": MAX_OPS}, "more than 5,000,000"),
    ):
        with pytest.raises(UsageError, match=message):
            unroll(loop, env)


def test_a_shard_that_is_not_whole_is_said() -> None:
    shard = parse(f"{HEAD}dim B, t\nstorage $a : 4*B*t^-1 buffer live_in live_out\n")
    with pytest.raises(UsageError, match="not a whole number for B=8, t=3"):
        bind(shard, {"B": 8, "t": 3})


def test_repeats_must_be_unrolled_to_be_walked() -> None:
    loop = parse(f"{HEAD}phase f\n  repeat i < 2\n    aten.f()\n")
    with pytest.raises(ValueError, match="unroll it first"):
        list(loop.ops())
