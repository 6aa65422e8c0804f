"""What loading a model for 4-bit training leaves in the allocator: the same weights, in blocks that are larger than they are.

The allocator leaves up to 1 MiB of a large block unsplit, and that counts as allocated. While a checkpoint is quantized each
weight comes to the GPU in 16 bits and its packed form goes into whatever block is free then, so some of these are too large: 0
to 30 MiB in all for models of 1 to 7 B. What happens, in order:

1. One block of the weights' size is allocated and freed (`caching_allocator_warmup`, transformers/modeling_utils.py): half
   a byte for each element that will be packed, two for the others, scales not counted.
2. The tensors, by name (`convert_and_load_state_dict_in_model`, core_model_loading.py): at most four threads read ahead
   (`GLOBAL_WORKERS`). Each takes the next tensor, allocates it on the GPU in 16 bits, and fills it. The main thread takes the
   finished ones in their order. For one that is quantized it allocates scales, packed weights and the table of values
   (bitsandbytes/backends/cuda/ops.py, `quantize_4bit`; functional.py, `get_4bit_type`), then the 16-bit tensor dies.
3. `prepare_model_for_kbit_training` (peft/utils/other.py) makes what is not packed fp32, a parameter at a time.
4. Adapters and buffers follow.

Which of the tensors in flight is finished first is not known, and two runs of one program differ in it. Here each is as likely
as another, drawn from a seed; the main thread only launches kernels and is taken to need no time. transformers 5.17 quantizes
in one thread (`workers=0`).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from memir.allocator.schedule import Schedule
from memir.allocator.simulator import Allocator
from memir.ir.core import Kind
from memir.ir.dtypes import ITEMSIZE
from memir.ir.names import split

HALF = 2  # bytes of an element while it is loaded
WORKERS = 4
DRAWS = 33


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor of the checkpoint. `storages` are what becomes of it: scales, packed weights and table, or the parameter."""

    key: tuple[tuple[bool, int, str], ...]  # its name, to sort by
    elements: int
    storages: tuple[str, ...]

    @property
    def packed(self) -> bool:
        """Whether it is quantized."""
        return len(self.storages) > 1


@dataclass(frozen=True, slots=True)
class Loading:
    """One course of a load. Called with a schedule and an empty allocator it gives the addresses of what was loaded."""

    workers: int = WORKERS
    seed: int = 0

    def __call__(self, plan: Schedule, allocator: Allocator) -> dict[str, int]:
        """Loads what the schedule has before its first step; adapters, buffers and the batch are left to it."""
        tensors = weights(plan)
        allocator.free(allocator.malloc(sum(w.elements // 2 if w.packed else w.elements * HALF for w in tensors)))
        placed: dict[str, int] = {}
        for weight, block in self._arrivals(tensors, allocator):
            if weight.packed:
                placed.update({name: allocator.malloc(plan.sizes[name]) for name in weight.storages})
                allocator.free(block)
            else:
                placed[weight.storages[0]] = block
        elements = {w.storages[0]: w.elements for w in tensors if not w.packed}
        for name in plan.before:  # prepare_model_for_kbit_training
            if name in elements and plan.sizes[name] != elements[name] * HALF:
                wide = allocator.malloc(plan.sizes[name])
                allocator.free(placed[name])
                placed[name] = wide
        return placed

    def _arrivals(self, tensors: tuple[Weight, ...], allocator: Allocator) -> Iterator[tuple[Weight, int]]:
        """Each tensor in order, with its 16-bit block, once it is there and those before it are."""
        rng = random.Random(self.seed)
        blocks: list[int] = []  # of the tensors that were begun
        flying: list[int] = []  # of these, by number, the ones that are not finished
        for number, weight in enumerate(tensors):
            while number in flying or number >= len(blocks):
                while len(flying) < max(1, self.workers) and len(blocks) < len(tensors):
                    if not self.workers and len(blocks) > number:
                        break
                    flying.append(len(blocks))
                    blocks.append(allocator.malloc(tensors[len(blocks)].elements * HALF))
                flying.remove(rng.choice(flying))
            yield weight, blocks[number]


def typical(plan: Schedule, workers: int = WORKERS) -> tuple[Loading, int, int]:
    """Of 33 courses drawn by chance, the one with the median of the bytes allocated after it; the least and the most of all."""
    found = sorted((_allocated(plan, one), one.seed, one) for one in (Loading(workers, seed) for seed in range(DRAWS)))
    return found[len(found) // 2][-1], found[0][0], found[-1][0]


def _allocated(plan: Schedule, loading: Loading) -> int:
    allocator = Allocator(record=False)
    loading(plan, allocator)
    return allocator.allocated


def weights(plan: Schedule) -> tuple[Weight, ...]:
    """The checkpoint's tensors in the order of loading; adapters, and buffers that no checkpoint has, are none of them."""
    dtypes = {value.storage: value.dtype for value in plan.program.values}
    names = {_name(storage): storage for storage in plan.before}
    found = []
    for name, storage in names.items():
        if plan.storages[storage].kind is not Kind.PARAMETER or ".lora_" in name:
            continue
        module, _, leaf = name.rpartition(".")
        scales = names.get(f"{module}.absmax")
        key = _key(name.replace(".base_layer.", "."))
        if leaf == "weight" and scales is not None:
            found.append(Weight(key, plan.sizes[storage] * 2, (scales, storage, names[f"{module}.code"])))
        else:
            found.append(Weight(key, plan.sizes[storage] // ITEMSIZE[dtypes[storage]], (storage,)))
    return tuple(sorted(found, key=lambda weight: weight.key))


def _name(storage: str) -> str:
    """`layers.*.q.weight[3]` as the model names it, `layers.3.q.weight`."""
    base, indices = split(storage)
    for index in indices:
        base = base.replace("*", index.text, 1)
    return base


def _key(name: str) -> tuple[tuple[bool, int, str], ...]:
    """Numbers by their value and before words (dot_natural_key of core_model_loading.py)."""
    return tuple((not part.isdigit(), int(part) if part.isdigit() else 0, part) for part in name.split("."))
