"""Which stretches of a flat program's forward a checkpointing policy wraps, and what it keeps of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection

from memir.errors import InconclusiveError, UsageError
from memir.ir.core import Op
from memir.rewrite.cut import layers_of
from memir.rewrite.flow import Flow, in_place
from memir.rewrite.frames import Stretch

# What torchtitan's selective policy keeps: results that cost much to compute or that may not be computed twice
# (torchtitan/distributed/activation_checkpoint.py, `_get_default_save_ops`: torch's compute_intensive_ops and a few more).
TORCHTITAN = (
    "aten.mm",
    "aten.bmm",
    "aten.addmm",
    "aten.convolution",
    "aten._scaled_mm",
    "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_cudnn_attention",
    "aten._scaled_dot_product_attention_math",
    "aten._scaled_dot_product_fused_attention_overrideable",
    "aten._flash_attention_forward",
    "aten._efficient_attention_forward",
    "aten.linear",
    "aten.max",
    "aten.topk",
)
_HALVED = ("aten.mm", "aten.linear")  # of which torchtitan keeps the first, the third, ...


def every_layer(flow: Flow, every: int = 1) -> list[Stretch]:
    """Each `every`-th layer of each forward, counted from 1 as torchtitan's `_apply_layer_sac` does: 2 leaves out the first."""
    if flow.segments:
        raise UsageError(
            f"program {flow.program.name} is checkpointed already",
            hint="trace it without checkpointing:  --checkpoint none",
        )
    if not flow.group:
        raise UsageError(f"program {flow.program.name} has no backward: there is nothing to compute again")
    try:
        layers = layers_of(flow)
    except UsageError as error:
        raise UsageError("the model has no list of layers: there is nothing to checkpoint", where=error.where) from error
    inside: dict[tuple[str, int], list[int]] = defaultdict(list)
    for position, op in enumerate(flow.ops):
        layer = layers.of.get(position)
        if layer is not None and flow.phase[position].endswith("forward") and _within(op.path, f"{layers.path}.{layer}"):
            inside[flow.phase[position], layer].append(position)
    stretches = []
    for (_, layer), positions in inside.items():
        if (layer + 1) % every == 0:
            whole = range(positions[0], positions[-1] + 1)
            path = f"{layers.path}.{layer}"
            if any(not flow.ops[p].opcode.startswith("memir.") for p in set(whole) - set(positions)):
                raise InconclusiveError("other operators run between those of one layer", where=f"@{path}")
            stretches.append(Stretch(tuple(whole), path=path))
    return stretches


def selective(flow: Flow, stretches: list[Stretch], save: Collection[str]) -> list[Stretch]:
    """The stretches with the results kept of the operators in `save`; of none given, of those that torchtitan keeps."""
    known = {
        flow.ops[p].opcode for stretch in stretches for p in stretch.positions if not flow.ops[p].opcode.startswith("memir.")
    }
    for opcode in save:
        if opcode not in known:
            hint = f"operators of the layers: {', '.join(sorted(known))}"
            raise UsageError(f"save={opcode}: no layer has this operator", hint=hint)
    chosen = []
    for stretch in stretches:
        kept = set()
        times: dict[str, int] = defaultdict(int)
        for position in stretch.positions:
            op = flow.ops[position]
            if op.opcode not in (save or TORCHTITAN):
                continue
            times[op.opcode] += 1
            if save or op.opcode not in _HALVED or times[op.opcode] % 2:
                kept.add(position)
        _check(flow, stretch, kept)
        chosen.append(Stretch(stretch.positions, frozenset(kept), stretch.path))
    return chosen


def _check(flow: Flow, stretch: Stretch, kept: Collection[int]) -> None:
    storages: dict[str, Op] = {}
    for position in stretch.positions:
        op = flow.ops[position]
        if position in kept:
            if any(flow.born.get(r.storage) != position for r in op.results):
                raise UsageError(
                    f"{op.opcode} makes a view or writes in place: there is no result to keep", where=f"@{op.path} {op.source}"
                )
            storages.update((r.storage, op) for r in op.results)
        elif in_place(op.opcode) and (made := storages.get(op.results[0].storage if op.results else "")) is not None:
            raise UsageError(
                f"the result of {made.opcode} is kept and then changed in place by {op.opcode}: PyTorch refuses that",
                where=f"@{op.path} {op.source}",
                hint=f"leave {made.opcode} out of save=",
            )


def _within(path: str, module: str) -> bool:
    return path == module or path.startswith(f"{module}.")
