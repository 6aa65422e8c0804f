"""The verifier accepts what keeps the rules and rejects what does not; tests/golden/verify has a case for every rule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from memir.errors import EXIT_INTERNAL, UsageError, VerifyError
from memir.ir.core import Kind, Op, Phase, Program, Repeat, Storage, Value
from memir.ir.dtypes import FROM_TORCH, ITEMSIZE, TO_TORCH
from memir.ir.layout import contiguous, reach
from memir.ir.parser import parse
from memir.ir.size import ZERO, Size
from memir.ir.source import read_program
from memir.ir.verify import verify
from tests.strategies import flat_programs, programs, repeated_programs

HEAD = "memir 1\nprogram @p\n"


@given(programs)
def test_programs_that_keep_the_rules_are_accepted(program: Program) -> None:
    verify(program)


def _mutants(program: Program) -> Iterator[tuple[str, Program]]:
    """Programs with one thing taken away or put twice."""
    for k, storage in enumerate(program.storages):
        yield "undeclared", replace(program, storages=program.storages[:k] + program.storages[k + 1 :])
        yield "twice", replace(program, storages=(*program.storages, storage))
        if storage.live_in and storage.nbytes is not ZERO:
            once = replace(storage, live_out=False)
            yield "unsteady", replace(program, storages=(*program.storages[:k], once, *program.storages[k + 1 :]))
    for p, phase in enumerate(program.phases):
        for k, op in enumerate(phase.ops):
            assert isinstance(op, Op)
            for change in _broken(op):
                ops = (*phase.ops[:k], change, *phase.ops[k + 1 :])
                yield "op", replace(program, phases=(*program.phases[:p], Phase(phase.name, ops), *program.phases[p + 1 :]))


def _broken(op: Op) -> Iterator[Op]:
    if op.frees:
        yield replace(op, frees=op.frees[1:])
        yield replace(op, frees=(*op.frees, op.frees[0]))
    if op.results:
        yield replace(op, results=(*op.results, op.results[0]))
    if op.opcode != "memir.free":
        yield replace(op, operands=(*op.operands, "nobody"))
    yield replace(op, forward_of="nobody")
    yield replace(op, saves=(*op.saves, "nobody"))
    yield replace(op, drops=(*op.drops, "nobody"))


@given(flat_programs(), st.data())
def test_programs_that_break_a_rule_are_not(program: Program, data: st.DataObject) -> None:
    mutants = list(_mutants(program))
    assume(mutants)
    _, mutant = data.draw(st.sampled_from(mutants))
    with pytest.raises(VerifyError) as caught:
        verify(mutant)
    assert caught.value.exit_code == EXIT_INTERNAL
    assert caught.value.message


@given(repeated_programs(), st.data())
def test_a_fault_in_a_repeat_is_found(program: Program, data: st.DataObject) -> None:
    def damage(ops: tuple[Op | Repeat, ...]) -> tuple[Op | Repeat, ...]:
        place = data.draw(st.integers(0, len(ops) - 1))
        op = ops[place]
        broken = replace(op, body=damage(op.body)) if isinstance(op, Repeat) else data.draw(st.sampled_from(list(_broken(op))))
        return (*ops[:place], broken, *ops[place + 1 :])

    number = data.draw(st.integers(0, len(program.phases) - 1))
    phase = program.phases[number]
    changed = (*program.phases[:number], Phase(phase.name, damage(phase.ops)), *program.phases[number + 1 :])
    with pytest.raises(VerifyError) as caught:
        verify(replace(program, phases=changed))
    assert caught.value.place


def test_at_most_five_operators_are_shown() -> None:
    ops = tuple(Op(f"aten.f{k}") for k in range(20))
    ops = (*ops[:9], Op("aten.bad", ("x",)), *ops[10:])
    with pytest.raises(VerifyError) as caught:
        verify(Program("p", (), (), (), (), (), (Phase("f", ops),)))
    lines = caught.value.where.splitlines()
    assert lines[0] == "phase f, operator 10"
    assert [line.split()[-1] for line in lines[1:]] == ["aten.f7()", "aten.f8()", "aten.bad(%x)", "aten.f10()", "aten.f11()"]
    assert lines[3].startswith("> 10 ")
    assert caught.value.place == ("op", 9)


def test_a_text_program_is_a_matter_of_usage_with_its_line() -> None:
    text = f"{HEAD}phase f\n  repeat i < 3\n    aten.f(%x)\n"
    with pytest.raises(UsageError) as caught:
        read_program(text, "x.memir")
    assert caught.value.where.startswith("x.memir:5\n")
    assert read_program(text, "x.memir", verify=False) == parse(text)


@pytest.mark.parametrize(
    ("nbytes", "value", "domain", "fits"),
    [
        ("4*B*S", "f32[B, S]", "", True),
        ("4*B*S", "f32[S, B] strides[1, S]", "", True),
        ("4*B*S", "f32[B, 7] strides[S, 0] offset S - 1", "", True),
        ("4*B*S", "f32[B, S] strides[S, 1] offset 1", "", False),
        ("4*B*S", "f32[B, S - 1] strides[S, 1] offset 1", "", True),
        ("4*B*S - 4", "f32[B, S]", "", False),
        ("512*ceil(B*S/128)", "f32[B, S]", "", True),
        ("4*B", "f32[0, S]", "", True),
        ("4*B*S", "f32[B, S, S]", "", False),
        ("4*B*S", "f32[B, S, S]", "S <= 1", True),
        ("4096", "f32[S]", "S <= 1024", True),
        ("4096", "f32[S]", "S <= 1025", False),
        ("4096", "f32[S]", "S is small", True),
        ("4*floor(S/64)*64", "f32[S]", "S % 64 == 0", True),
        ("4*floor(S/64)*64", "f32[S]", "", False),
        ("2*B*S*t^-1", "bf16[B*t^-1, S]", "", True),
        ("2*B*S*t^-1", "bf16[B, S]", "t divides B", False),
        ("4", "f32[]", "", True),
        ("3", "f32[]", "", False),
    ],
)
def test_extents(nbytes: str, value: str, domain: str, fits: bool) -> None:
    text = f"{HEAD}dim B, S, t\n" + (f"domain {domain}\n" if domain else "")
    program = parse(f"{text}storage $a : {nbytes} buffer live_in live_out\nvalue %a: {value} in $a\n")
    if fits:
        verify(program)
    else:
        with pytest.raises(VerifyError, match="reaches to byte"):
            verify(program)


def test_a_domain_that_no_iteration_count_satisfies_is_said() -> None:
    with pytest.raises(VerifyError, match="no small values of L"):
        verify(parse(f"{HEAD}dim L\ndomain L <= 0\nphase f\n  repeat i < L\n    aten.f()\n"))


def test_the_domain_chooses_the_iteration_counts() -> None:
    """Only with L=4 is there an $h[3]: a program that is right for any other number is wrong here."""
    text = f"{HEAD}dim L\ndomain L == 4\nstorage $h[L] : 4 activation\nphase f\n"
    text += "  repeat i < L\n    %h[i]: f32[] in $h[i] = aten.f()\n"
    frees = "  repeat i < L\n    memir.free() frees $h[i]\n"
    verify(parse(text + frees))
    with pytest.raises(VerifyError, match=r"frees \$h\[4\], which is not declared"):
        verify(parse(text + frees.replace("$h[i]", "$h[i+1]")))


def test_an_unknown_kind_is_rejected() -> None:
    storage = Storage("a", Size.of(4), "weights", live_in=True, live_out=True)  # type: ignore[arg-type]
    with pytest.raises(VerifyError, match="unknown kind, weights"):
        verify(Program("p", (), (), (), (storage,), (), ()))


def test_negative_sizes_are_rejected() -> None:
    storage = Storage("a", Size.of(-4), Kind.BUFFER, live_in=True, live_out=True)
    with pytest.raises(VerifyError, match="negative size"):
        verify(Program("p", (), (), (), (storage,), (), ()))
    with pytest.raises(VerifyError, match="scratch of -B bytes is negative"):
        verify(Program("p", ("B",), (), (), (), (), (Phase("f", (Op("aten.f", scratch=-Size.of("B")),)),)))


def test_symbols_and_axes_are_unique_identifiers() -> None:
    empty = Program("p", (), (), (), (), (), ())
    for broken, message in (
        (replace(empty, dims=("B", "B")), "declared twice"),
        (replace(empty, dims=("a b",)), "not an identifier"),
        (replace(empty, mesh=(("d", Size.of(2)), ("d", Size.of(2)))), "declared twice"),
        (replace(empty, mesh=(("d", Size.of("t")),)), "over t"),
    ):
        with pytest.raises(VerifyError, match=message):
            verify(broken)


def test_the_table_of_dtypes_is_torchs() -> None:
    torch = pytest.importorskip("torch")
    for name, torch_name in TO_TORCH.items():
        if hasattr(torch, torch_name):  # an older torch lacks the newest
            assert getattr(torch, torch_name).itemsize == ITEMSIZE[name], name
    floats = {str(v).removeprefix("torch.") for v in vars(torch).values() if isinstance(v, torch.dtype)}
    assert {"bfloat16", "float16", "float32", "int64", "bool", "float8_e4m3fn"} <= floats & FROM_TORCH.keys()


def test_reach_is_torchs() -> None:
    torch = pytest.importorskip("torch")
    base = torch.empty(4, 6, 8)
    for view in (base, base.transpose(0, 2), base[1:3, ::2, 3], base[2, 3].expand(5, 8), base[:, :0]):
        shape, strides = (tuple(map(Size.of, t)) for t in (view.shape, view.stride()))
        needed = reach(shape, strides, Size.of(view.storage_offset()))
        last = view.storage_offset() + sum((n - 1) * s for n, s in zip(view.shape, view.stride(), strict=True)) + 1
        assert needed is (Size.of(last) if view.numel() else ZERO)
        assert needed.constant <= base.numel()
    assert contiguous(tuple(map(Size.of, base.shape))) == tuple(map(Size.of, base.stride()))


def test_a_value_with_more_strides_than_extents_is_rejected() -> None:
    value = Value("a", "f32", (), (Size.of(1),), ZERO, "a")
    storage = Storage("a", Size.of(4), Kind.BUFFER, live_in=True, live_out=True)
    with pytest.raises(VerifyError, match="0 extents and 1 strides"):
        verify(Program("p", (), (), (), (storage,), (value,), ()))
