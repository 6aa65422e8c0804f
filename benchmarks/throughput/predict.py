"""What memir's cost model says of a case: the operators of the traced step, and what FSDP communicates of the parameters."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from benchmarks.throughput.cases import H100, H100_BANDWIDTH, H100_POWER, Case
from memir.analysis.cost.collectives import collective_seconds
from memir.analysis.cost.device import Device, device
from memir.analysis.cost.operators import Spent
from memir.analysis.cost.parts import Parts, parts
from memir.analysis.cost.step import Exchange, StepTime, step_time
from memir.analysis.flops import Work, work_of
from memir.api import TracedProgram, program_of
from memir.hardware import Card, find_card
from memir.hardware.links import Cluster, inter_link, intra_link
from memir.ir.core import Kind
from memir.ir.declarations import member_count
from memir.pipeline import Pipeline
from memir.recipe import Recipe

PER_NODE = 8
HALF, SINGLE = 2, 4  # bytes of an element


@dataclass(frozen=True, slots=True)
class Row:
    """Tokens per second and GPU, measured and predicted, and where the predicted step's seconds are."""

    name: str
    gpu: str
    judged: bool
    measured: float
    predicted: float
    products: float
    attention: float
    memory: float
    optimizer: float
    communicated: float
    exposed: float

    @property
    def factor(self) -> float:
        """Predicted over measured."""
        return self.predicted / self.measured


@cache
def _step(
    preset: str, recipe: Recipe, passes: str, sets: tuple[tuple[str, str], ...]
) -> tuple[TracedProgram, tuple[Work, ...]]:
    traced = program_of(preset, recipe, batch=2, seq=2048, sets=dict(sets))
    return traced, tuple(work_of(Pipeline.parse(passes).run(traced.program)))


def predict(case: Case) -> Row:
    """The case's row; its step is traced, or read from memir's cache."""
    traced, works = _step(case.preset, case.recipe, case.passes, tuple(case.sets.items()))
    card = find_card(case.gpu)
    assert card is not None
    gpu = device(card, power=H100_POWER, bandwidth=H100_BANDWIDTH) if case.gpu == H100 else device(card)
    layers = traced.subject.num_layers or 1
    sharded = case.num_gpus > 1
    computing = _computing(case, works, gpu, layers)
    if case.gpu == H100:  # the traced step has bf16 parameters, gradients and states; the run has them in fp32
        computing = replace(computing, optimizer=computing.optimizer * (SINGLE / HALF))
    if sharded:
        computing = replace(computing, optimizer=computing.optimizer * (1 / case.num_gpus))
    exchange = _exchange(case, traced, card, layers) if sharded else Exchange()
    time = step_time(computing, exchange)
    return _row(case, computing, time)


def _computing(case: Case, works: tuple[Work, ...], gpu: Device, layers: int) -> Parts:
    """With context parallelism a rank has its part of the tokens, and of the whole sequence's attention."""
    env = {"B": case.batch, "S": case.seq // case.context, "L": layers}
    found = parts(works, env, gpu, layers)
    if case.context == 1:
        return found
    whole = parts(works, {**env, "S": case.seq}, gpu, layers)

    def own(part: Spent, long: Spent) -> Spent:
        return replace(part, attention=long.attention / case.context)

    return replace(
        found,
        layer_forward=own(found.layer_forward, whole.layer_forward),
        layer_backward=own(found.layer_backward, whole.layer_backward),
    )


def _exchange(case: Case, traced: TracedProgram, card: Card, layers: int) -> Exchange:
    cluster = Cluster(case.num_gpus, PER_NODE, intra_link(card), inter_link("ib-400"))
    inner, outer, adapters = _elements(traced)
    reduced = SINGLE if case.gpu == H100 else HALF
    ranks = case.num_gpus

    def seconds(kind: str, nbytes: int) -> float:
        return collective_seconds(kind, nbytes, ranks, 1, cluster)

    trained = (inner, outer) if case.trained else (adapters * 2, 0)  # adapters are in fp32
    inside = 0.0
    if case.context > 1:  # keys and values of the whole sequence are gathered in each layer: 8 heads of 128 in bf16, twice
        kept = 2 * case.batch * case.seq * 8 * 128 * HALF
        inside = layers * collective_seconds("all_gather", kept, case.context, 1, cluster)
    return Exchange(
        gather_layer=seconds("all_gather", inner * HALF // layers),
        gather_root=seconds("all_gather", outer * HALF),
        reduce_layer=seconds("reduce_scatter", trained[0] * reduced // layers),
        reduce_root=seconds("reduce_scatter", trained[1] * reduced),
        inside_forward=inside,
        inside_backward=3 * inside,  # gathered for the recomputation and for backward, whose gradients are reduced
        one_stream=case.gpu != H100,
    )


def _elements(traced: TracedProgram) -> tuple[int, int, int]:
    """Parameters in the layers and outside of them, without adapters; and those of the adapters."""
    found = [0, 0, 0]
    for storage in traced.program.storages:
        if storage.kind != Kind.PARAMETER:
            continue
        adapter = "lora_" in storage.name
        count = member_count(storage.name).evaluate(traced.env) * storage.nbytes.evaluate(traced.env)
        found[2 if adapter else 0 if ".*." in storage.name else 1] += count // (SINGLE if adapter else HALF)
    return found[0], found[1], found[2]


def _row(case: Case, computing: Parts, time: StepTime) -> Row:
    both = computing.forward + computing.backward
    tokens = case.batch * case.seq // case.context
    return Row(
        case.name,
        case.gpu,
        case.judged,
        case.measured,
        round(tokens / time.seconds, 1),
        round(both.product, 3),
        round(both.attention, 3),
        round(both.memory + both.launch, 3),
        round(time.optimizer, 3),
        round(time.communicating, 3),
        round(time.exposed, 3),
    )
