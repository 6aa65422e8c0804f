"""Guards become conditions, and sizes lose what holds for every B and S from 2 on."""

from __future__ import annotations

import pytest
import sympy
import torch
from torch import nn

from memir.frontend.domains import conditions_of
from memir.frontend.fake import make_mode, move_to_fake
from memir.frontend.symbols import _decided

B, S = sympy.symbols("B S", integer=True, positive=True)


@pytest.mark.parametrize(
    ("guards", "conditions"),
    [
        ([], ("B >= 2", "S >= 2")),
        ([S <= 1024, S <= 512], ("B >= 2", "S >= 2", "S <= 512")),
        ([sympy.Ne(S - 1, 1)], ("B >= 2", "S >= 3")),
        ([sympy.Ne(S, 2), sympy.Ne(S, 3)], ("B >= 2", "S >= 4")),
        ([sympy.Ne(B * (S - 1), B)], ("B >= 2", "S >= 3")),
        ([sympy.Ne(sympy.Mod(B, B * (S - 1), evaluate=False), 0), sympy.Ne(S, 2)], ("B >= 2", "S >= 3")),
        ([sympy.Ne(sympy.Mod(B, B * (S - 1), evaluate=False), 0)], ("B >= 2", "S >= 2", "B % (B*S - B) != 0")),
        ([sympy.Ne(S, 7)], ("B >= 2", "S >= 2", "S != 7")),
        ([sympy.Ne(B * S, 1), sympy.Ne(S, 0)], ("B >= 2", "S >= 2")),
        ([sympy.Ne(B * S - 12, 0)], ("B >= 2", "S >= 2", "B*S != 12")),
        ([sympy.Eq(sympy.Mod(S, 64), 0)], ("B >= 2", "S >= 2", "S % 64 == 0")),
    ],
)
def test_conditions_without_what_always_holds(guards: list[sympy.Basic], conditions: tuple[str, ...]) -> None:
    found = conditions_of(guards, {"B": 2, "S": 2})
    assert found == conditions
    for b in range(2, 9):  # nothing that was excluded is let in, and nothing else is shut out
        for s in range(2, 70):
            held = all(bool(g.subs({B: b, S: s})) for g in guards)
            assert held == all(_holds(text, b, s) for text in found), (b, s)


def _holds(text: str, b: int, s: int) -> bool:
    from memir.ir.domain import Condition

    condition = Condition.read(text)
    assert condition is not None
    return bool(condition.holds({"B": b, "S": s}))


def test_a_maximum_that_is_decided() -> None:
    assert _decided(sympy.Max(1, S - 1, evaluate=False)) == S - 1
    assert _decided(sympy.Max(S, B, evaluate=False)) == sympy.Max(S, B)
    assert _decided(sympy.Max(1, S - 3, evaluate=False)) == sympy.Max(1, S - 3)


def test_tensors_under_several_names_stay_one() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
            self.b.weight = self.a.weight
            self.register_buffer("table", torch.zeros(8))
            self.original = self.table
            self.again = nn.Identity()
            self.again.register_buffer("table", self.table)
            self.parts = [torch.zeros(3), torch.zeros(3)]
            self.kept = {"first": self.parts[0]}

    with torch.device("meta"):
        model = Model()
    fake = make_mode()
    move_to_fake(model, fake)
    assert model.b.weight is model.a.weight
    assert model.original is model.table
    assert model.again.table is model.table
    assert model.kept["first"] is model.parts[0] is not model.parts[1]
    assert {t.device.type for t in (model.a.weight, model.table, *model.parts)} == {"cpu"}
