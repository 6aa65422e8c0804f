"""The programs of all cuts: one over the depth and the cut for the middle, one over the depth for each cut near an end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from memir.errors import InconclusiveError
from memir.ir.core import Program
from memir.ir.domain import Condition
from memir.ir.unroll import has_repeats, unroll
from memir.rewrite.cut import frozen_prefix
from memir.rewrite.depths import CUT, at_end, depth_symbol, lifted, over_cuts
from memir.rewrite.flow import Flow
from memir.rewrite.prune import without_gradients

Env = Mapping[str, int]


def programs(
    program: Program, env: Env, cuts: range, *, depth: int, embeddings: bool, head: bool
) -> Iterator[tuple[Sequence[int], Program]]:
    """(cuts, the program for them) of the step with `depth` layers."""

    def rewrite(cut: int) -> Rewrite:
        return lambda flat, symbols: _rewritten(flat, symbols.get(CUT, cut), embeddings, head)

    done = set()
    if 0 in cuts:
        yield (0,), program if not head else _at(program, env, lambda p: lifted(p, rewrite(0), 5), rewrite(0), 0)
        done.add(0)
    if has_repeats(program):
        general = _general(program, rewrite(0))
        middle = [k for k in cuts if k and general is not None and _holds(general, {**env, CUT: k})]
        if general is not None and middle:
            yield middle, general
            done |= set(middle)
    for cut in cuts:
        if cut not in done:
            yield (cut,), _at(program, env, _maker(rewrite, cut, depth), rewrite(cut), cut)


Rewrite = Callable[[Program, Env], tuple[Program, list[int]]]


def _general(program: Program, rewrite: Rewrite) -> Program | None:
    try:
        return over_cuts(program, rewrite)
    except InconclusiveError:
        return None  # the layers differ: each cut is rewritten by itself


def _maker(rewrite: Callable[[int], Rewrite], cut: int, depth: int) -> Callable[[Program], Program]:
    if cut <= depth - cut:
        return lambda program: lifted(program, rewrite(cut), cut + 5)
    return lambda program: at_end(program, rewrite(cut), depth - cut)


def _at(program: Program, env: Env, make: Callable[[Program], Program], rewrite: Rewrite, cut: int) -> Program:
    """The lifted program where there are Repeats and it holds at `env`; else the flat one with all layers."""
    if has_repeats(program):
        try:
            found = make(program)
            if _holds(found, env):
                return found
        except InconclusiveError:
            pass  # the layers differ too much to be told by a few
        program = unroll(program, {depth_symbol(program): env[depth_symbol(program)]})
    return rewrite(program, {CUT: cut})[0]


def _holds(program: Program, env: Env) -> bool:
    conditions = [c for text in program.domain if (c := Condition.read(text)) is not None]
    return all(c.holds({s: env[s] for s in c.symbols()}) is not False for c in conditions if c.symbols() <= env.keys())


def _rewritten(flat: Program, cut: int, embeddings: bool, head: bool) -> tuple[Program, list[int]]:
    flow = Flow(flat)
    frozen, no_grad = frozen_prefix(flow, cut, embeddings=embeddings, head=head)
    return without_gradients(flow, frozen, no_grad)
