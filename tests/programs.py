"""Small programs for the tests of analyses and outputs: two written by hand, and a Hypothesis strategy for random ones."""

from __future__ import annotations

from hypothesis import strategies as st

from memir.ir.core import Kind, Op, Phase, Program, Storage, Value
from memir.ir.parser import parse
from memir.ir.size import Size, ceil_div, floor_div, max_of, min_of

B, S = Size.of("B"), Size.of("S")

STEP = """memir 1
program @step
dim B, S
domain S <= 1024
storage $ids : 8*B*S input live_in live_out
storage $w : 1000 parameter live_in live_out
storage $m : 2000 optimizer_state of $w live_in live_out
storage $h : 64*B*S activation
storage $t : 16*B*S temporary
storage $logits : 400*B*S activation
storage $dlogits : 400*B*S temporary
storage $dh : 64*B*S temporary
storage $g : 1000 gradient of $w
storage $root : 30000 temporary
value %ids: i64[B, S] in $ids
value %w: f32[250] in $w
value %m: f32[500] in $m
phase forward
  %t: f32[B, S, 4] in $t = aten.embedding(%w, %ids) at @wte from model.py:10
  %h: f32[B, S, 16] in $h = aten.mm(%t, %w) saves $h drops $h frees $t at @layers.0.up from model.py:20
  %logits: f32[B, S, 100] in $logits = aten.mm(%h, %w) saves $logits scratch 4096 at @head from model.py:30
phase backward
  %dlogits: f32[B, S, 100] in $dlogits = aten._log_softmax_backward_data(%logits) frees $logits at @head from model.py:31
  %dh: f32[B, S, 16] in $dh = aten.mm(%dlogits, %w) frees $dlogits at @head from model.py:30
  %g: f32[250] in $g = aten.mm(%dh, %h) frees $dh, $h at @layers.0.up from model.py:20
phase optimizer
  %root: f32[7500] in $root = aten._foreach_sqrt(%m, %g)
  memir.free() frees $root
  memir.free() frees $g
"""


def step() -> Program:
    """A tiny training step whose numbers can be checked by hand."""
    return parse(STEP)


def sizes() -> st.SearchStrategy[Size]:
    """Bytes as polynomials in B and S, some with generators; never negative for B, S >= 1."""
    number = st.integers(1, 5000)
    plain = st.sampled_from([Size.of(1), B, S, B * S, B * S * S, B * B * S, S * (S + 1), B * S - B])
    generated = st.sampled_from(
        [
            ceil_div(S, 64),
            ceil_div(B * S, 7),
            floor_div(S + 5, 3),
            min_of(S, 100),
            max_of(B, S),
            B * min_of(S, 40),
            ceil_div(S, B),
        ]
    )
    term = st.builds(lambda c, f: f * c, number, st.one_of(plain, plain, plain, generated))
    return st.builds(lambda a, b: a + b, term, st.one_of(st.just(Size.of(0)), term))


@st.composite
def programs(draw: st.DrawFn, max_ops: int = 14, size: st.SearchStrategy[Size] | None = None) -> Program:
    """Valid flat programs with three phases, live-in and live-out storages, aliases, host storages, frees, scratch."""
    pick = sizes() if size is None else size
    kinds = st.sampled_from(sorted(Kind))
    storages: list[Storage] = []
    alive: list[str] = []
    for i in range(draw(st.integers(0, 3))):
        stays = draw(st.booleans())
        storages.append(Storage(f"in{i}", draw(pick), draw(kinds), live_in=True, live_out=stays))
        alive.append(f"in{i}")
    values = tuple(_value(f"v{s.name}", s.name) for s in storages)
    of = {v.name: v.storage for v in values}
    ops: list[Op] = []
    for i in range(draw(st.integers(0, max_ops))):
        operands = tuple(draw(st.lists(st.sampled_from(sorted(of)), max_size=2))) if of else ()
        results = []
        for j in range(draw(st.integers(0, 2))):
            name = f"s{i}_{j}"
            if alive and draw(st.integers(0, 3)) == 0:
                name = draw(st.sampled_from(alive))
            else:
                device = "host" if draw(st.integers(0, 9)) == 0 else "gpu"
                storages.append(Storage(name, draw(pick), draw(kinds), device, live_out=draw(st.integers(0, 4)) == 0))
                alive.append(name)
            results.append(_value(f"v{i}_{j}", name))
        of.update((v.name, v.storage) for v in results)
        stay = {s.name for s in storages if s.live_out}
        frees = tuple(name for name in alive if name not in stay and draw(st.integers(0, 2)) == 0)
        alive = [name for name in alive if name not in frees]
        of = {name: storage for name, storage in of.items() if storage not in frees}
        scratch = draw(pick) if draw(st.integers(0, 4)) == 0 else Size.of(0)
        ops.append(
            Op(f"test.op{i}", operands, tuple(results), frees, scratch=scratch, path=f"layers.{i % 2}", source=f"m.py:{i}")
        )
    first, second = sorted((draw(st.integers(0, len(ops))), draw(st.integers(0, len(ops)))))
    parts = (("forward", ops[:first]), ("backward", ops[first:second]), ("optimizer", ops[second:]))
    phases = tuple(Phase(name, tuple(part)) for name, part in parts)
    domain = draw(st.sampled_from([(), ("S <= 300",), ("B >= 2", "S >= 64"), ("S <= 128", "B <= 16")]))
    return Program("random", ("B", "S"), domain, (), tuple(storages), values, phases)


def _value(name: str, storage: str) -> Value:
    return Value(name, "u8", (), (), Size.of(0), storage)


def points(program: Program) -> st.SearchStrategy[dict[str, int]]:
    """Values of B and S within the domain of a program that `programs` made."""
    low = {"B": 2 if "B >= 2" in program.domain else 1, "S": 64 if "S >= 64" in program.domain else 1}
    high = {"B": 16 if "B <= 16" in program.domain else 5000, "S": 5000}
    high["S"] = next((int(c.split()[-1]) for c in program.domain if c.startswith("S <=")), high["S"])
    near = {name: st.integers(low[name], min(low[name] + 8, high[name])) for name in low}
    return st.fixed_dictionaries({name: st.one_of(near[name], st.integers(low[name], high[name])) for name in low})
