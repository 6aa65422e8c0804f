"""The mesh of a program: named axes and their degrees; every pass of a distributed method adds its own."""

from __future__ import annotations

from memir.errors import InconclusiveError, UsageError
from memir.ir.core import Program
from memir.ir.size import Size

_PIPELINE = "pipeline-parallel"
_EXPERTS = "expert-parallel"
_WHOLE = "data-parallel"
MOST = 2**18  # ranks of an axis
_COPIES = (
    "data-parallel",
    "fsdp",
    "fsdp1",
    "zero-1",
    "zero-2",
    "zero-3",
)  # ranks with batches of their own: all of the model, or its shards


def check_axis(program: Program, name: str, degree: int) -> bool:
    """Whether the axis changes anything: False for degree 1. UsageError for a degree below 1, and an axis that is there.

    InconclusiveError for shards of a pipeline's stages, copies of several stages or of ones with split backwards, and for
    copies of divided experts.
    """
    check_degree(name, degree)
    if degree == 1:
        return False
    if name in _COPIES and axis_of(program, _PIPELINE) is not None and not (name == _WHOLE and _is_one_stage(program)):
        raise InconclusiveError(
            f"{name} around a pipeline is not described: over all micro-batches of a step PyTorch's stages keep the parameters"
            " gathered and the gradients unreduced",
            where=mesh_text(program),
            hint="torch/distributed/pipelining/stage.py, backward_maybe_with_nosync",
        )
    if name in _COPIES and axis_of(program, _EXPERTS) is not None:
        raise InconclusiveError(
            f"{name} over divided experts is not described: experts have copies on other ranks than the rest of the model",
            where=mesh_text(program),
            hint="transformers/distributed/expert_parallel.py, AllToAllEP: efsdp_size",
        )
    if any(axis == name for axis, _ in program.mesh):
        raise UsageError(f"{name}: the program has this axis already", where=mesh_text(program), hint="give it once")
    if name in _COPIES:
        check_copies(program, name)
    return True


def _is_one_stage(program: Program) -> bool:
    """Whether a rank of a pipeline has one stage whose backwards are whole."""
    names = [phase.name.split(".") for phase in program.phases if ".micro" in phase.name]
    return len({name[0] for name in names}) == 1 and all(len(name) == 3 for name in names)


def check_degree(name: str, degree: int, option: str = "degree") -> None:
    """UsageError for what is no number of ranks."""
    if degree < 1:
        raise UsageError(f"{name}: {option} {degree} is not a positive number of ranks", hint=f"{name}{{degree=2}}")
    if degree > MOST:
        raise UsageError(f"{name}: {option} {degree:,} is more ranks than there are GPUs anywhere", hint=f"at most {MOST:,}")


def check_copies(program: Program, name: str) -> None:
    """UsageError where another method has made copies of the model already: what it reduced would be reduced again."""
    there = [axis for axis, _ in program.mesh if axis in _COPIES and axis != name]
    if there:
        message = f"{name}: {there[0]} has made copies of the model already"
        raise UsageError(message, where=mesh_text(program), hint="one of them over all ranks that have a batch of their own")


def check_rank(name: str, rank: int, ranks: int) -> None:
    """UsageError where there is no such rank, counted from 0."""
    if not 0 <= rank < ranks:
        raise UsageError(f"{name}: there is no rank {rank} among {ranks}", hint=f"they are 0 to {ranks - 1}")


def mesh_text(program: Program) -> str:
    """The axes in a line: `tensor-parallel 2 x fsdp 4`; empty for one rank."""
    return " x ".join(f"{axis} {degree}" for axis, degree in program.mesh)


def axis_of(program: Program, name: str) -> Size | None:
    """The degree of an axis, None where there is no such axis."""
    return dict(program.mesh).get(name)


def ranks(program: Program) -> Size:
    """The number of ranks of the whole mesh."""
    total = Size.of(1)
    for _, degree in program.mesh:
        total = total * degree
    return total
