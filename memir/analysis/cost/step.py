"""How long a step takes on one rank: the computing in parts, what is communicated, and the schedule that joins them.

| schedule | source |
|---|---|
| fully sharded: a layer's parameters are gathered while the layer before computes, and again in backward; its gradients are reduced while the next one computes | torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py; FSDP paper, arXiv 2304.11277, section 3.3 |
| replicated: gradients in buckets, each reduced when it is full | torch/nn/parallel/distributed.py; DDP paper, arXiv 2006.15704, section 3.2 |
| in a layer (tensor, context and expert parallel): computing waits | Megatron-LM, arXiv 1909.08053, section 3 |
| pipelines: (p - 1)/m of the time more, /v for v chunks on a rank, a third with backward split for weights | Megatron-LM, arXiv 2104.04473, section 2.2; zero bubble, arXiv 2401.10241, section 3 (ZB-H1) |
"""  # noqa: E501 (a table)

from __future__ import annotations

from dataclasses import dataclass, replace

from memir.analysis.cost.overlap import COMPUTE, Ran, Task, simulate
from memir.analysis.cost.parts import Parts

GATHER, REDUCE = "gather", "reduce"
_ENOUGH = 6  # layers that are simulated; more of them go on alike


@dataclass(frozen=True, slots=True)
class Exchange:
    """Seconds of each collective of a rank; 0 where a method has none.

    `gather_layer`, `gather_root`: parameters, before they are used in forward, and with `again` in backward. `reduce_layer`,
    `reduce_root`: gradients, when they are made. `inside_forward`, `inside_backward`: in all layers, where computing waits.
    `after`: parameters that are gathered when the optimizer has stepped, which nothing hides. `one_stream`: gathers and
    reductions share a communicator, as in FSDP1 and in DeepSpeed.
    """

    gather_layer: float = 0.0
    gather_root: float = 0.0
    again: bool = True
    reduce_layer: float = 0.0
    reduce_root: float = 0.0
    inside_forward: float = 0.0
    inside_backward: float = 0.0
    after: float = 0.0
    one_stream: bool = False

    def __add__(self, other: Exchange) -> Exchange:
        """Both, as of methods on different axes."""
        return Exchange(
            self.gather_layer + other.gather_layer,
            self.gather_root + other.gather_root,
            self.again and other.again,
            self.reduce_layer + other.reduce_layer,
            self.reduce_root + other.reduce_root,
            self.inside_forward + other.inside_forward,
            self.inside_backward + other.inside_backward,
            self.after + other.after,
            self.one_stream or other.one_stream,
        )


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step: all of it; what is computed; communicated; of that what nothing hides; idle in a pipeline; the
    optimizer; to and from the host."""

    seconds: float
    computing: float
    communicating: float
    exposed: float
    bubble: float
    optimizer: float
    host: float

    @property
    def limit(self) -> str:
        """What takes most beyond computing, or computing where nothing takes a tenth."""
        found = max(
            (self.exposed, "communication"), (self.bubble, "pipeline bubble"), (self.host, "host transfers"),
            (self.optimizer, "optimizer"),
        )  # fmt: skip
        return found[1] if found[0] > 0.1 * self.seconds else "compute"


def microbatch_tasks(computing: Parts, exchange: Exchange, *, reduce: bool) -> list[Task]:
    """Forward and backward of one micro-batch as tasks; with `reduce` gradients are reduced in it."""
    layers = max(1, computing.layers)
    tasks: list[Task] = []
    reduction = GATHER if exchange.one_stream else REDUCE

    def add(stream: str, seconds: float, *needs: int) -> int:
        """A task's position; -1 for a collective that there is not."""
        if stream != COMPUTE and not seconds:
            return -1
        tasks.append(Task(stream, seconds, tuple(n for n in needs if n >= 0)))
        return len(tasks) - 1

    root = add(GATHER, exchange.gather_root)
    here = add(COMPUTE, computing.before_forward.total, root)
    last_use = [here, here]  # the gathered layers that still hold their place: at most two are in flight
    each, waits = computing.layer_forward.total / layers, exchange.inside_forward / layers
    for _ in range(layers):
        gathered = add(GATHER, exchange.gather_layer, last_use[-2])
        here = add(COMPUTE, each, gathered)
        if waits:
            here = add(COMPUTE, 0.0, add("inside", waits, here))
        last_use.append(here)
    here = add(COMPUTE, computing.after_forward.total + computing.after_backward.total)
    each, waits = computing.layer_backward.total / layers, exchange.inside_backward / layers
    last_use = [here, here]
    for _ in range(layers):
        gathered = add(GATHER, exchange.gather_layer if exchange.again else 0.0, last_use[-2])
        here = add(COMPUTE, each, gathered)
        if waits:
            here = add(COMPUTE, 0.0, add("inside", waits, here))
        last_use.append(here)
        if reduce:
            add(reduction, exchange.reduce_layer, here)
    here = add(COMPUTE, computing.before_backward.total)
    if reduce:
        add(reduction, exchange.reduce_root, here)
    return tasks


def step_time(
    computing: Parts,
    exchange: Exchange,
    *,
    accumulate: int = 1,
    every: bool = True,
    bubble: float = 0.0,
    host: float = 0.0,
) -> StepTime:
    """The time of a step of `accumulate` micro-batches.

    `every`: gradients are reduced after each of them (sharded gradients), or only after the last one. `bubble`: idle time of a
    pipeline as a part of its micro-batches' time. `host`: seconds of transfers that nothing hides.
    """
    last = _microbatch(computing, exchange, reduce=True)
    others = last if every or accumulate == 1 else _microbatch(computing, exchange, reduce=False)
    return _joined(last, others, accumulate, computing.optimizer.total, exchange.after, bubble, host)


def _microbatch(computing: Parts, exchange: Exchange, *, reduce: bool) -> Ran:
    """One micro-batch. Layers are alike, so many of them are a few of them and as much again for each one more."""
    layers = computing.layers
    if not _communicates(exchange, reduce):
        seconds = computing.forward.total + computing.backward.total
        return Ran(seconds, seconds, 0.0, 0.0)
    if layers <= _ENOUGH:
        return simulate(microbatch_tasks(computing, exchange, reduce=reduce))
    few, more = (
        simulate(microbatch_tasks(_with_layers(computing, count), _with_waits(exchange, count / layers), reduce=reduce))
        for count in (_ENOUGH - 2, _ENOUGH)
    )
    times = (layers - _ENOUGH) / 2

    def grown(small: float, large: float) -> float:
        return large + times * (large - small)

    return Ran(
        grown(few.seconds, more.seconds),
        grown(few.computing, more.computing),
        grown(few.communicating, more.communicating),
        grown(few.exposed, more.exposed),
    )


def _communicates(exchange: Exchange, reduce: bool) -> bool:
    gathers = exchange.gather_layer + exchange.gather_root + exchange.inside_forward + exchange.inside_backward
    return gathers > 0 or (reduce and exchange.reduce_layer + exchange.reduce_root > 0)


def _with_layers(computing: Parts, count: int) -> Parts:
    part = count / computing.layers
    return replace(
        computing, layers=count, layer_forward=computing.layer_forward * part, layer_backward=computing.layer_backward * part
    )


def _with_waits(exchange: Exchange, part: float) -> Exchange:
    return replace(exchange, inside_forward=exchange.inside_forward * part, inside_backward=exchange.inside_backward * part)


def _joined(last: Ran, others: Ran, accumulate: int, optimizer: float, after: float, bubble: float, host: float) -> StepTime:
    more = accumulate - 1
    inner = last.seconds + more * others.seconds
    idle = bubble * inner / accumulate
    return StepTime(
        seconds=inner + idle + optimizer + after + host,
        computing=last.computing + more * others.computing,
        communicating=last.communicating + more * others.communicating + after,
        exposed=last.exposed + more * others.exposed + after,
        bubble=idle,
        optimizer=optimizer,
        host=host,
    )


def bubble_of(stages: int, chunks: int = 1, zero_bubble: bool = False) -> float:
    """Idle time of a pipeline in micro-batches: (p - 1)/v, and a third of it where the backward for weights fills it."""
    return (stages - 1) / chunks / (3 if zero_bubble else 1)
