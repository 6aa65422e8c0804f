"""Whether a step fits a GPU: what it takes, beside what there is."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from memir.cuda.context import Held, context, workspaces
from memir.cuda.nccl import nccl_buffers
from memir.cuda.platform import platform
from memir.hardware import Gpu
from memir.ir.core import Op

FITS, TIGHT, DOES_NOT = "fits", "tight", "does not fit"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the GPU has and what the step takes there, in bytes.

    `reserved` is what the allocator holds, where it is known; until then allocated bytes decide, which are never more. The
    context is a range, since sources differ, and so are NCCL's buffers, where there are several ranks. For an amount of memory
    instead of a card there are none of these: it is what a step's tensors may take.
    """

    gpu: str  # as it was named
    card: str  # the driver's name of the card; empty for an amount
    compute: str  # compute capability whose kernels are taken; empty for an amount
    capacity: int
    allocated: int  # the step's own tensors at their peak, rounded as the allocator rounds
    workspaces: tuple[Held, ...] = ()
    context: tuple[int, int] = (0, 0)
    nccl: tuple[int, int] = (0, 0)
    reserved: int | None = None
    decided: str = ""  # the answer where the allocator was played; empty: by the bytes
    failure: str = ""  # where memory runs out, and what PyTorch would print

    @property
    def needed(self) -> tuple[int, int]:
        """The least and the most bytes that the process takes."""
        held = self.reserved
        if held is None:
            held = self.allocated + sum(term.nbytes for term in self.workspaces)
        low, high = self.outside
        return held + low, held + high

    @property
    def outside(self) -> tuple[int, int]:
        """The least and the most bytes outside of the allocator."""
        return self.context[0] + self.nccl[0], self.context[1] + self.nccl[1]

    @property
    def after_giving_back(self) -> bool:
        """Whether it fits although more would be reserved than there is: cached blocks are given back first."""
        return self.answer == FITS and self.needed[1] > self.capacity

    @property
    def failure_in_short(self) -> str:
        """The failure without PyTorch's advice."""
        return self.failure.partition(" If ")[0]

    @property
    def answer(self) -> str:
        """ "fits", "does not fit", or "tight" where it depends on what is outside of the allocator."""
        if self.decided:
            return self.decided
        low, high = self.needed
        return FITS if high <= self.capacity else DOES_NOT if low > self.capacity else TIGHT


def judge(gpu: Gpu, ops: Iterable[Op], allocated: int, *, trains: bool, torch: str, axes: int = 0) -> Verdict:
    """The verdict for a step with these operators and `allocated` bytes at its peak, under a version of PyTorch.

    `axes`: of the mesh, each of which has a communicator.
    """
    bare = Verdict(gpu.name, "", "", gpu.nbytes, allocated)
    if gpu.card is None:
        return bare
    held = workspaces(platform(gpu.card.compute, torch), ops, trains=trains)
    return replace(
        bare,
        card=gpu.card.name,
        compute=gpu.card.compute,
        workspaces=held,
        context=context(gpu.card),
        nccl=nccl_buffers(axes),
    )


def room(gpu: Gpu, *, trains: bool, torch: str) -> Gpu:
    """The same GPU with the bytes that a step's tensors may surely take: a card's capacity less workspaces and context."""
    if gpu.card is None:
        return gpu
    held = workspaces(platform(gpu.card.compute, torch), [Op("aten.addmm")], trains=trains)
    return replace(gpu, nbytes=gpu.nbytes - sum(term.nbytes for term in held) - context(gpu.card)[1])
