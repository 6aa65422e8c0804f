"""The candidates: how the GPUs are divided among methods, micro-batch, accumulation, checkpointing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from memir.planner.methods import Degrees, Method

CHECKPOINTS = {
    "none": "",
    "selective": "activation-checkpoint{policy=selective}",
    "full": "activation-checkpoint",
}
# which methods within a copy are joined, by their keys
COMBINATIONS = ((), ("tp",), ("tp-sp",), ("cp",), ("ep",), ("pp",), ("tp-sp", "pp"), ("tp-sp", "cp"))


@dataclass(frozen=True, slots=True)
class Layout:
    """How a number of GPUs is divided: the methods and their degrees; `copies` None where there is one copy."""

    degrees: Degrees
    inner: tuple[Method, ...]
    copies: Method | None

    @property
    def kind(self) -> str:
        """`fsdp x tp`: the methods without degrees; `one gpu`."""
        names = [*([self.copies.key] if self.copies else []), *(m.key for m in self.inner)]
        return " x ".join(names) or "one gpu"

    @property
    def offloads(self) -> bool:
        """Whether the copies keep what they divide in the host's memory."""
        return self.copies is not None and self.copies.offloads

    @property
    def name(self) -> str:
        """`fsdp 4 x tp 2`."""
        methods = [*([self.copies] if self.copies else []), *self.inner]
        return " x ".join(f"{m.key} {getattr(self.degrees, m.axis)}" for m in methods) or "one gpu"

    def passes(self, microbatches: int) -> str:
        """The text of the passes for one rank; a pipeline's with the number of its micro-batches."""
        found = []
        for method in self.inner:
            text = method.text(getattr(self.degrees, method.axis))
            if method.axis == "tensor" and self.copies is not None and self.copies.pass_name == "fsdp":
                text = text[:-1] + " placed-gradients}"  # DTensor's, as FSDP takes them
            found.append(text[:-1] + f" microbatches={microbatches}}}" if method.axis == "pipeline" else text)
        if self.copies is not None:
            found.append(self.copies.text(self.degrees.copies))
        return ",".join(found)


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to train: `batch` sequences of a micro-batch on a rank, `accumulate` of them in a step."""

    layout: Layout
    checkpoint: str
    batch: int
    accumulate: int

    @property
    def microbatches(self) -> int:
        """Of a pipeline in a step; 0 without one."""
        return self.accumulate if self.layout.degrees.pipeline > 1 else 0

    @property
    def step(self) -> tuple[int, int]:
        """Micro-batch and accumulation of the step that the passes run on; a pipeline's micro-batches are its pass's."""
        return self.batch, 1 if self.microbatches else self.accumulate

    @property
    def text(self) -> str:
        """The text of all passes."""
        return ",".join(filter(None, (CHECKPOINTS[self.checkpoint], self.layout.passes(self.microbatches))))


def layouts(num_gpus: int, per_node: int, copies: Sequence[Method], inner: Sequence[Method], experts: bool) -> Iterator[Layout]:
    """Every way to use exactly `num_gpus`; what waits in every layer (tensor, context) stays within a node."""
    by_key = {method.key: method for method in inner}
    for keys in COMBINATIONS:
        if any(key not in by_key for key in keys):
            continue
        methods = tuple(by_key[key] for key in keys)
        if any(method.needs_experts for method in methods) and not experts:
            continue
        for degrees in _degrees(num_gpus, per_node, methods):
            if degrees.copies == 1:
                yield Layout(degrees, methods, None)
                continue
            for method in copies:
                yield Layout(degrees, methods, method)


def _degrees(num_gpus: int, per_node: int, methods: Sequence[Method]) -> Iterator[Degrees]:
    def fill(rest: Sequence[Method], degrees: Degrees) -> Iterator[Degrees]:
        if not rest:
            if num_gpus % degrees.ranks == 0:
                yield replace(degrees, copies=num_gpus // degrees.ranks)
            return
        axis = rest[0].axis
        for degree in divisors(num_gpus)[1:]:
            found = replace(degrees, **{axis: degree})
            if found.ranks <= num_gpus and (axis == "pipeline" or found.tensor * found.context * found.expert <= per_node):
                yield from fill(rest[1:], found)

    yield from fill(methods, Degrees())


def batches(layout: Layout, global_batch: int) -> list[tuple[int, int]]:
    """(micro-batch, accumulation) pairs that make the global batch; none where the copies do not divide it.

    A pipeline has as many micro-batches as stages at least.
    """
    share, rest = divmod(global_batch, layout.degrees.copies)
    if rest or share < 1:
        return []
    return [(batch, share // batch) for batch in divisors(share) if share // batch >= layout.degrees.pipeline]


def divisors(number: int) -> list[int]:
    """In rising order."""
    return [d for d in range(1, number + 1) if number % d == 0]
