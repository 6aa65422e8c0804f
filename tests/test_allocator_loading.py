"""The load of a quantized checkpoint, played: the order of transformers' loader, and blocks that stay too large."""

from __future__ import annotations

from memir.allocator.loading import Loading, typical, weights
from memir.allocator.replay import simulate
from memir.allocator.schedule import schedule
from memir.allocator.simulator import Allocator
from memir.ir.core import Program
from memir.ir.parser import parse

M = 2**20


def model(layers: dict[str, int], embedding: int = 16 * M) -> Program:
    """An embedding in fp32, packed layers of so many elements each, and an adapter in 2 MiB."""
    stores = [("embed.weight", 4 * embedding, "parameter", f"f32[{embedding}]")]
    for name, count in layers.items():
        stores += [
            (f"{name}.weight", count // 2, "parameter", f"u8[{count // 2}]"),
            (f"{name}.absmax", count // 16, "buffer", f"f32[{count // 64}]"),
            (f"{name}.code", 64, "buffer", "f32[16]"),
        ]
    stores.append((f"{next(iter(layers))}.lora_A.default.weight", 2 * M, "parameter", f"f32[{M // 2}]"))
    lines = ["memir 1", "program @quantized"]
    lines += [f"storage ${name} : {nbytes} {kind} live_in live_out" for name, nbytes, kind, _ in stores]
    lines += [f"storage $x : {M} temporary", *(f"value %{name}: {value} in ${name}" for name, *_, value in stores)]
    operands = ", ".join(f"%{name}" for name, *_ in stores)
    return parse("\n".join((*lines, "phase forward", f"  %x: u8[{M}] in $x = aten.op({operands}) frees $x", "")))


SMALL = model({"layers.0.up": 7 * M // 2, "layers.0.down": 3 * M})


def test_the_checkpoints_tensors_in_the_loaders_order() -> None:
    found = [(weight.storages[-1], weight.elements, weight.packed) for weight in weights(schedule(SMALL, {}))]
    assert found == [
        ("embed.weight", 16 * M, False),
        ("layers.0.down.code", 3 * M, True),
        ("layers.0.up.code", 7 * M // 2, True),
    ]


def test_one_thread_by_hand() -> None:
    """The warm-up asks for 35.25 MiB and leaves a segment of 36. The embedding takes 32 of it.

    `down` in 16 bits, 6 MiB, gets a segment of 20; its packed 1.5 MiB are cut off the 4. `up`, 7 MiB, is of the 20 again; its
    packed 1.75 MiB get the 2.5 that were left, whole. In fp32 the embedding has 64 MiB of its own.
    """
    allocator = Allocator()
    placed = Loading(workers=0)(schedule(SMALL, {}), allocator)
    taken = [event.size for event in allocator.events if event.action == "segment_alloc"]
    assert taken == [36 * M, 20 * M, 2 * M, 64 * M]  # whole 2 MiB; the third is for scales and tables
    packed = (3 * M + 7 * M // 2) // 2
    rest = 36 * M - 32 * M - packed  # of the warm-up's segment: at most 1 MiB, and not split off
    assert rest == 3 * M // 4
    assert allocator.allocated == 64 * M + packed + rest + packed // 8 + 2 * 512
    assert "layers.0.up.lora_A.default.weight" not in placed


def test_threads_leave_more_or_less() -> None:
    """Of a model like TinyLlama, and the same every time."""
    sizes = {"q_proj": 4 * M, "o_proj": 4 * M, "gate_proj": 11 * M, "up_proj": 11 * M, "down_proj": 11 * M}
    plan = schedule(model({f"layers.{n}.{name}": count for n in range(4) for name, count in sizes.items()}), {})
    one, least, most = typical(plan)
    exact = sum(-(-plan.sizes[name] // 512) * 512 for name in one(plan, Allocator()))
    assert exact <= least < most < exact + 20 * M
    assert typical(plan) == (one, least, most)


def test_the_step_follows_on_what_was_loaded() -> None:
    loaded, plain = (simulate(SMALL, {}, load=load, steps=1) for load in (Loading(workers=0), None))
    assert loaded.allocated_end - plain.allocated_end == 3 * M // 4
    assert loaded.rounded_peak == plain.rounded_peak
    assert loaded.reserved_peak > plain.reserved_peak
