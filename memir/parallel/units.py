"""Parameters in units: each layer with what belongs to it, and the rest in the root, as fully_shard is called by its users.

`for layer in model.layers: fully_shard(layer)`, then `fully_shard(model)`, as torchtitan and accelerate do: a parameter
belongs to the layer whose module holds it, and to the root otherwise (torch/distributed/fsdp/_fully_shard/_fsdp_init.py,
`_get_managed_states`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from memir.errors import InconclusiveError
from memir.ir.core import Kind, Storage
from memir.ir.names import full_name
from memir.rewrite.cut import layers_of
from memir.rewrite.flow import Flow

ROOT = -1


@dataclass(frozen=True, slots=True)
class Unit:
    """Parameters that are gathered and reduced together: `layer` from 0, or ROOT; storages in the order of declaration."""

    layer: int
    path: str  # of the module, "" for the root
    parameters: tuple[Storage, ...]


def units_of(flow: Flow) -> tuple[Unit, ...]:
    """The root's unit first, then the layers in order; a unit without parameters is not there.

    A flat program's storage of a parameter goes by the module's full name. InconclusiveError where a parameter is used in a
    layer that does not hold it, UsageError (of layers_of) where there are no layers.
    """
    layers = layers_of(flow)
    inside = re.compile(rf"(?:.*\.)?{re.escape(layers.path)}\.(\d+)\.")
    members: dict[int, list[Storage]] = {ROOT: [], **{k: [] for k in range(layers.depth)}}
    for storage in flow.program.storages:
        if storage.kind != Kind.PARAMETER:
            continue
        name = full_name(storage.name)
        match = inside.match(name)
        layer = int(match.group(1)) if match else ROOT
        members[layer if layer in members else ROOT].append(storage)
    parameters = {s.name: layer for layer, group in members.items() for s in group}
    for position, layer in layers.of.items():
        for name in flow.reads(position):
            owner = parameters.get(name, layer)
            if owner not in (layer, ROOT):
                raise InconclusiveError(f"layer {layer} uses a parameter of layer {owner}", where=full_name(name))
    return tuple(
        Unit(layer, "" if layer == ROOT else f"{layers.path}.{layer}", tuple(group))
        for layer, group in members.items()
        if group
    )
