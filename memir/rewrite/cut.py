"""Which parameters a cut or a pattern freezes, read off where the forward uses them.

The layer list is the list of modules in which most forward operators run (`layers.0`, `layers.1`, ...). What runs before the
first layer is the embedding, what runs after the last one is the head: place decides, not names. A parameter is frozen when all
operators that use it are on the frozen side, so a table that the head shares (tied embeddings) stays trainable.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import dataclass

from memir.errors import UsageError
from memir.ir.core import Kind
from memir.ir.names import full_name
from memir.rewrite.flow import Flow

NUMBERED = re.compile(r"((?:[^.\d][^.]*\.)*?[^.\d][^.]*)\.(\d+)(?:\.|$)")
EMBEDDING = -1  # the place before the first layer


@dataclass(frozen=True, slots=True)
class Layers:
    """The layers of a flat program's forward: `path` of the list, how many, and each forward operator's layer.

    `of[position]` is -1 (EMBEDDING) before the first layer and `depth` after the last.
    """

    path: str
    depth: int
    of: dict[int, int]


def layers_of(flow: Flow) -> Layers:
    """Reads the layers off the operators' module paths. UsageError where no list of modules is numbered from 0."""
    found: dict[str, Counter[int]] = defaultdict(Counter)
    for position, op in enumerate(flow.ops):
        match = NUMBERED.match(op.path) if flow.is_forward(position) else None
        if match:
            found[match.group(1)][int(match.group(2))] += 1
    lists = {path: numbers for path, numbers in found.items() if set(numbers) == set(range(len(numbers)))}
    if not lists:
        where = f"program @{flow.program.name}"
        raise UsageError("the model has no list of layers, so there is nothing to cut", where=where)
    path = max(lists, key=lambda p: (sum(lists[p].values()), p))
    depth = len(lists[path])
    of: dict[int, int] = {}
    number = re.compile(rf"{re.escape(path)}\.(\d+)(?:\.|$)")
    for phase in dict.fromkeys(p for p in flow.phase if p.endswith("forward")):
        inside = [p for p in range(len(flow.ops)) if flow.phase[p] == phase]
        layered = {p: int(m.group(1)) for p in inside if (m := number.match(flow.ops[p].path))}
        last, current = max(layered), EMBEDDING
        for p in inside:
            current = layered.get(p, depth if p > last else current)
            of[p] = current
    for p, op in enumerate(flow.ops):
        if flow.repeated[p] and op.forward_of is not None:
            of[p] = of[flow.made[op.forward_of]]
    return Layers(path, depth, of)


def users(flow: Flow, layers: Layers) -> dict[str, set[int]]:
    """Each parameter's storage -> the layers whose forward reads it (-1: before the first, `depth`: after the last)."""
    parameters = {s.name for s in flow.program.storages if s.kind == Kind.PARAMETER}
    used: dict[str, set[int]] = defaultdict(set)
    for position, layer in layers.of.items():
        for name in flow.reads(position) & parameters:
            used[name].add(layer)
    return used


class Prefix:
    """The layers of a flat program, of which a prefix is to be frozen."""

    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self.layers = layers_of(flow)
        self.users = users(flow, self.layers)

    def frozen(self, cut: int, *, embeddings: bool, head: bool) -> tuple[set[str], set[int]]:
        """(frozen parameters' storages, positions of the forward operators that run under no_grad).

        Cut 0 freezes no layer, and the embedding neither. UsageError for a cut that the model has not, and where nothing would
        be left to train.
        """
        layers = self.layers
        if not 0 <= cut <= layers.depth:
            raise UsageError(f"cut {cut}: {layers.path} has {layers.depth} layers", hint=f"a cut is 0 to {layers.depth}")
        sides = set(range(cut)) | ({EMBEDDING} if embeddings and cut else set()) | ({layers.depth} if head else set())
        frozen = {name for name, places in self.users.items() if places <= sides}
        if not (trained(self.flow) - frozen):
            raise UsageError(f"cut {cut}: nothing is left to train", where=f"program @{self.flow.program.name}")
        prefix = sides - {layers.depth}
        no_grad = {p for p, layer in layers.of.items() if layer in prefix} if EMBEDDING in sides else set()
        return frozen, no_grad


def frozen_prefix(flow: Flow, cut: int, *, embeddings: bool, head: bool) -> tuple[set[str], set[int]]:
    """What a cut freezes of a flat program, see `Prefix.frozen`."""
    return Prefix(flow).frozen(cut, embeddings=embeddings, head=head)


def matching(flow: Flow, pattern: str) -> set[str]:
    """The parameters' storages whose name has a match of the regular expression `pattern`.

    A name is the module's path and the parameter's own name, `layers.3.norm.weight`. UsageError where the pattern is none,
    matches nothing, or everything that is trained.
    """
    try:
        expression = re.compile(pattern)
    except re.error as error:
        raise UsageError(f"pattern {pattern!r} is no regular expression: {error}") from None
    names = {s.name: full_name(s.name) for s in flow.program.storages if s.kind == Kind.PARAMETER}
    found = {name for name, full in names.items() if expression.search(full)}
    if not found:
        some = ", ".join(sorted(names.values())[:4])
        raise UsageError(f"pattern {pattern!r} matches no parameter", hint=f"parameters are called {some}, ...")
    if not trained(flow) - found:
        raise UsageError(f"pattern {pattern!r} freezes everything: nothing is left to train")
    return found


def trained(flow: Flow) -> set[str]:
    """The parameters that have a gradient in this step."""
    return {s.of for s in flow.program.storages if s.of is not None and s.kind == Kind.GRADIENT}
