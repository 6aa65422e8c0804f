"""ZeRO's flat partitions: trained parameters in groups, each flattened, padded and cut into one part a rank.

The names are those of deepspeed/runtime/zero/stage_1_and_2.py: a group is a parameter group of the optimizer, flat in the order
of the model; a partition begins and ends where it happens to, within a parameter as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from memir.errors import InconclusiveError
from memir.ir.core import Value
from memir.ir.layout import product
from memir.ir.size import Size

_ALIGNMENT = 2  # elements a rank: `nccl_start_alignment_factor`


@dataclass(frozen=True, slots=True)
class Piece:
    """What a partition has of a parameter: elements of it, and whether that is all of it."""

    parameter: str  # its storage
    numel: int
    whole: bool


@dataclass(frozen=True, slots=True)
class Group:
    """Parameters of one flat buffer, in its order: storages and elements."""

    parameters: tuple[tuple[str, int], ...]
    dtype: str
    degree: int

    @property
    def numel(self) -> int:
        """Elements without padding."""
        return sum(n for _, n in self.parameters)

    @property
    def padded(self) -> int:
        """Elements with padding: a multiple of twice the ranks (`flatten_dense_tensors_aligned`)."""
        step = _ALIGNMENT * self.degree
        return -(-self.numel // step) * step

    @property
    def partition(self) -> int:
        """Elements of each rank's part."""
        return self.padded // self.degree

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """What the rank's part is made of, in order, without padding."""
        low, high = rank * self.partition, (rank + 1) * self.partition
        found, start = [], 0
        for name, numel in self.parameters:
            inside = min(start + numel, high) - max(start, low)
            if inside > 0:
                found.append(Piece(name, inside, inside == numel))
            start += numel
        return tuple(found)

    def ranks_of(self, parameter: str) -> tuple[tuple[int, int], ...]:
        """(rank, elements) of the parts that have some of the parameter, in order."""
        start = 0
        for name, numel in self.parameters:
            if name == parameter:
                first, last = start // self.partition, (start + numel - 1) // self.partition
                ends = [(r, min(start + numel, (r + 1) * self.partition)) for r in range(first, last + 1)]
                return tuple((r, end - max(start, r * self.partition)) for r, end in ends)
            start += numel
        raise KeyError(parameter)


def round_robin(parameters: Sequence[tuple[str, int]], degree: int) -> tuple[tuple[str, int], ...]:
    """Every `degree`-th parameter together, so that neighbours belong to different ranks (`_round_robin_reorder`)."""
    return tuple(p for rank in range(degree) for p in parameters[rank::degree])


def number_of(tensor: Value) -> int:
    """Elements of a parameter. InconclusiveError where they are no number: partitions end at numbers."""
    numel = product(tensor.shape)
    if not numel.is_constant:
        raise InconclusiveError(f"a parameter has {numel} elements: ZeRO's partitions need numbers", where=tensor.name)
    return numel.constant


def flat_groups(names: Sequence[Sequence[str]], tensors: Mapping[str, Value], degree: int, *, robin: bool) -> tuple[Group, ...]:
    """The groups of the optimizer's parameter groups. InconclusiveError where one has several dtypes."""
    found = []
    for members in names:
        dtypes = sorted({tensors[n].dtype for n in members})
        if len(dtypes) > 1:
            raise InconclusiveError(f"trained parameters of one group are {' and '.join(dtypes)}: DeepSpeed flattens one dtype")
        parameters = [(n, number_of(tensors[n])) for n in members]
        ordered = round_robin(parameters, degree) if robin else tuple(parameters)
        found.append(Group(ordered, dtypes[0], degree))
    return tuple(found)


def elements(numel: int) -> tuple[Size, ...]:
    """The shape of a flat tensor."""
    return (Size.of(numel),)
