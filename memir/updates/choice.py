"""Which optimizer: what a step of it depends on besides the parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from memir.updates.tape import Member, Tape


@dataclass(frozen=True, slots=True)
class Choice:
    """The form ("foreach", "fused", "for-loop"), whether gradients are decayed with the parameters, and momentum."""

    form: str
    on_cuda: bool
    decays: bool = False  # weight_decay is not 0
    momentum: bool = False  # SGD, RMSprop: it is not 0

    @property
    def host_steps(self) -> bool:
        """Whether step counters are scalars in host memory (torch/optim/adam.py, `_init_group`: unless fused)."""
        return self.on_cuda and self.form != "fused"


@dataclass(frozen=True, slots=True)
class Update:
    """An optimizer: `states` makes what it keeps of a parameter, `step` runs one step over one group of parameters."""

    source: str  # the file it is in
    states: Callable[[Tape, Member, Choice], None]
    step: Callable[[Tape, Sequence[Member], Choice], None]
    forms: tuple[str, ...] = ("foreach", "fused", "for-loop")  # it has
    decays: bool = False  # by default


def by_dtype(members: Sequence[Member]) -> list[list[Member]]:
    """The lists that foreach and fused forms work on (torch/utils/_foreach_utils.py, `_group_tensors_by_device_and_dtype`)."""
    groups: dict[str, list[Member]] = {}
    for member in members:
        groups.setdefault(member.dtype, []).append(member)
    return list(groups.values())
