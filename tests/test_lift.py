"""A rewrite lifted over the depth and the cut is, at every depth and cut of its domain, the rewrite of that flat program."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memir.analysis.frames import frames_of, frames_through
from memir.analysis.liveness import timeline
from memir.analysis.peak import peak
from memir.api import program_of
from memir.errors import InconclusiveError, UsageError
from memir.ir.core import Op, Phase, Program
from memir.ir.parser import parse
from memir.ir.size import Size
from memir.ir.unroll import bind, has_repeats, unroll
from memir.ir.verify import verify
from memir.passes.activation_checkpoint import ActivationCheckpoint
from memir.passes.freeze import Freeze
from memir.recipe import Recipe
from memir.rewrite.cut import frozen_prefix
from memir.rewrite.depths import CUT, at_end, depth_symbol, depths_and_cuts, lifted, over_cuts, stride
from memir.rewrite.flow import Flow
from memir.rewrite.lift import Env, LiftError, lift
from memir.rewrite.prune import without_gradients

EXAMPLE = str(Path(__file__).resolve().parents[1] / "examples" / "gpt.py")
GOLDEN = Path(__file__).parent / "golden" / "freeze" / "depth_cut_2.memir"
AT = {"B": 3, "S": 5}


@cache
def deep() -> Program:
    """The golden tests' program of L layers."""
    return parse(GOLDEN.read_text(encoding="utf-8"))


@cache
def traced() -> Program:
    """A model that was traced and folded: foreach lists, clipping's stack, tied embeddings, first and last layer peeled."""
    small = {"n_layer": "12", "n_embd": "32", "n_head": "2", "vocab_size": "96", "block_size": "64"}
    program = program_of(EXAMPLE, Recipe(clip=1.0), batch=2, seq=16, sets=small, cache=False).program
    assert has_repeats(program)
    return program


def cut_at(program: Program, env: Env) -> tuple[Program, list[int]]:
    """The flat program cut at env["k"]."""
    flow = Flow(program)
    return without_gradients(flow, *frozen_prefix(flow, env[CUT], embeddings=True, head=False))


@cache
def by_depth_and_cut(name: str) -> Program:
    return over_cuts(deep() if name == "deep" else traced(), cut_at)


def events(program: Program) -> list[tuple[object, ...]]:
    """What it does to memory: live bytes before it; each operator with what it allocates, its scratch, what dies."""
    nbytes = {s.name: s.nbytes.text() for s in program.storages}
    live = {s.name for s in program.storages if s.live_in}
    rows: list[tuple[object, ...]] = [("start", sorted(nbytes[name] for name in live))]
    for phase, op in program.ops():
        made = [v.storage for v in op.results if v.storage not in live]
        live |= set(made)
        live -= set(op.frees)
        dead = sorted(nbytes[name] for name in op.frees)
        shapes = tuple(tuple(map(str, v.shape)) for v in op.results)
        rows.append(
            (phase.name, op.opcode, op.path, len(op.operands), shapes, [nbytes[m] for m in made], op.scratch.text(), dead)
        )
    return rows


def check(name: str, depth: int, cut: int) -> None:
    whole = deep() if name == "deep" else traced()
    flat, _ = cut_at(unroll(whole, {"L": depth}), {CUT: cut})
    lifted_there = unroll(by_depth_and_cut(name), {"L": depth, CUT: cut})
    verify(lifted_there)
    assert events(lifted_there) == events(flat)


@settings(max_examples=30)
@given(st.integers(2, 14), st.integers(2, 16))
def test_every_depth_and_cut(cut: int, more: int) -> None:
    check("deep", cut + more, cut)


@pytest.mark.parametrize(("depth", "cut"), [(7, 3), (12, 4), (12, 9), (15, 5)])
def test_a_traced_model(depth: int, cut: int) -> None:
    check("traced", depth, cut)


@pytest.mark.parametrize("name", ["deep", "traced"])
def test_the_program_over_depths_and_cuts_is_valid(name: str) -> None:
    program = by_depth_and_cut(name)
    verify(program)
    assert program.dims[-2:] == ("L", CUT)


@pytest.mark.parametrize("name", ["deep", "traced"])
def test_the_peak_over_cuts_is_the_flat_peak_at_every_cut(name: str) -> None:
    """One formula in k, evaluated at every cut of its domain, against the rewrite of all layers at that cut."""
    depth = 10
    at = AT if name == "deep" else {"B": 2, "S": 16}
    folded = bind(by_depth_and_cut(name), {"L": depth})
    formula = peak(folded)
    whole = unroll(deep() if name == "deep" else traced(), {"L": depth})
    cuts = [cut for cut in range(1, depth) if _holds(by_depth_and_cut(name), depth, cut)]
    assert set(range(3, depth - 2)) <= set(cuts)  # a traced program has its first and last layer apart
    for cut in cuts:
        flat, _ = cut_at(whole, {CUT: cut})
        assert formula.evaluate({**at, CUT: cut})[0] == timeline(flat).evaluate(at).peak


@pytest.mark.parametrize("name", ["deep", "traced"])
def test_the_samples_are_the_frames_of_the_lifted_program(name: str) -> None:
    whole = deep() if name == "deep" else traced()
    found = lift(whole, cut_at, depths_and_cuts(whole, 0))
    _, through = frames_through(found.program, found.samples, found.axes)
    _, line = frames_of(found.program)
    at = AT if name == "deep" else {"B": 2, "S": 16}
    for depth, cut in ((9, 3), (14, 9)):
        assert through.evaluate({**at, "L": depth, CUT: cut}) == line.evaluate({**at, "L": depth, CUT: cut})


def _holds(program: Program, depth: int, cut: int) -> bool:
    try:
        unroll(program, {"L": depth, CUT: cut})
    except UsageError:
        return False
    return True


@pytest.mark.parametrize("cut", [1, 2, 3, 4, 6])
def test_the_pass_keeps_the_depth_a_symbol(cut: int) -> None:
    """Small cuts are done as they are, larger ones by way of the symbol k: the same as the flat pass."""
    rewritten = Freeze(cut=cut).run(deep())
    assert "L" in rewritten.dims
    for depth in (cut + 2, cut + 3, cut + 7):
        flat = Freeze(cut=cut).run(unroll(deep(), {"L": depth}))
        assert events(unroll(rewritten, {"L": depth})) == events(flat)


@pytest.mark.parametrize("left", [1, 2])
def test_so_many_layers_left(left: int) -> None:
    """All but the last ones, of any number of layers."""
    rewritten = at_end(deep(), cut_at, left)
    for depth in (left + 4, left + 6, 13):
        flat, _ = cut_at(unroll(deep(), {"L": depth}), {CUT: depth - left})
        assert events(unroll(rewritten, {"L": depth})) == events(flat)


def test_outside_of_its_domain_it_is_refused() -> None:
    with pytest.raises(UsageError, match="the program is valid only for"):
        unroll(by_depth_and_cut("deep"), {"L": 8, CUT: 9})


# -- what cannot be lifted


def test_a_rewrite_that_is_no_line_is_found_out() -> None:
    """Linear in the samples' neighbours and not beyond: the further sample shows it."""

    def squares(program: Program, env: Env) -> tuple[Program, list[int]]:
        return _with_scratch(program, (env["L"] - 7) * (env["L"] - 8)), list(range(_count(program)))

    with pytest.raises(LiftError, match="do not follow a line"):
        lifted(deep(), squares, least=7)


def test_operators_that_come_with_the_depth_are_found_out() -> None:
    def longer(program: Program, env: Env) -> tuple[Program, list[int]]:
        last = program.phases[-1]
        extra = tuple(Op("test.noise") for _ in range(env["L"]))
        changed = replace(program, phases=(*program.phases[:-1], Phase(last.name, (*last.ops, *extra))))
        count = _count(program)
        return changed, [*range(count), *([count - 1] * len(extra))]

    with pytest.raises(LiftError, match="the operators outside of the layers change with their number"):
        lifted(deep(), longer, least=7)


def test_phases_that_change_with_the_depth_are_found_out() -> None:
    def renamed(program: Program, env: Env) -> tuple[Program, list[int]]:
        first = program.phases[0]
        phases = (Phase(f"forward{env['L'] % 2}", first.ops), *program.phases[1:])
        return replace(program, phases=phases), list(range(_count(program)))

    with pytest.raises(LiftError, match="the phases change"):
        lifted(deep(), renamed, least=7)


def test_a_layer_that_is_another_at_every_depth_is_found_out() -> None:
    """The middle layer is frozen: it stands at another place of the Repeat in every sample."""

    def middle(program: Program, env: Env) -> tuple[Program, list[int]]:
        flow = Flow(program)
        return without_gradients(flow, {f"w[{env['L'] // 2}]"})

    with pytest.raises(InconclusiveError):
        lifted(deep(), middle, least=7)


def test_two_numbers_of_layers_are_not_told_apart() -> None:
    text = GOLDEN.read_text(encoding="utf-8").replace("dim B, S, L", "dim B, S, L, M")
    backward = text.index("phase backward")
    two = parse(text[:backward] + text[backward:].replace("repeat i < L", "repeat i < M", 1))
    with pytest.raises(InconclusiveError, match="one number of repetitions that is a symbol, and there are: L, M"):
        depth_symbol(two)


def _count(program: Program) -> int:
    return sum(1 for _ in program.ops())


def _with_scratch(program: Program, nbytes: int) -> Program:
    first = program.phases[0]
    op = first.ops[0]
    assert isinstance(op, Op)
    return replace(
        program, phases=(Phase(first.name, (replace(op, scratch=Size.of(nbytes)), *first.ops[1:])), *program.phases[1:])
    )


def test_layers_in_groups_are_checkpointed_as_one_body() -> None:
    """Layers that alternate (gemma-2): the checkpointed program has the depth as a symbol, and is the flat one's pass."""
    widths = {"hidden_size": "32", "intermediate_size": "64", "num_attention_heads": "4", "num_key_value_heads": "2"}
    sets = widths | {"head_dim": "8", "vocab_size": "96", "sliding_window": "16", "num_hidden_layers": "16"}
    program = program_of("gemma-2-2b", Recipe(), batch=2, seq=32, sets=sets, cache=False).program
    assert stride(program) == 2
    lifted = ActivationCheckpoint().run(program)
    for depth in (10, 16):
        flat = ActivationCheckpoint().run(unroll(program, {"L": depth}))
        assert peak(lifted).evaluate({**AT, "L": depth})[0] == peak(flat).evaluate(AT)[0]
