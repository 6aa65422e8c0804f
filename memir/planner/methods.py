"""The table of distributed methods: the pass that makes each one's program, and what each communicates.

A method is one entry; one whose pass is not installed is not listed. Communication is counted from the bytes of the step
(`Facts`): parameters and gradients of layers and of the rest, hidden states, keys and values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from memir import registry
from memir.analysis.cost.collectives import collective_seconds
from memir.analysis.cost.step import Exchange
from memir.errors import UsageError
from memir.hardware.links import Cluster
from memir.planner.facts import Facts


@dataclass(frozen=True, slots=True)
class Degrees:
    """Ranks by method; the innermost are neighbours: tensor, context, expert, then copies, then pipeline stages."""

    copies: int = 1
    tensor: int = 1
    context: int = 1
    expert: int = 1
    pipeline: int = 1

    @property
    def ranks(self) -> int:
        """All of them; experts share the ranks of the copies."""
        return self.copies * self.tensor * self.context * self.pipeline

    @property
    def inner(self) -> int:
        """The distance of two neighbouring copies."""
        return self.tensor * self.context


@dataclass(frozen=True, slots=True)
class Run:
    """A micro-batch on a cluster: what an exchange depends on."""

    facts: Facts
    degrees: Degrees
    batch: int
    seq: int
    recomputes: bool
    cluster: Cluster
    host: float = float("inf")  # bytes a second between a GPU and the host's memory, one direction

    @property
    def tokens(self) -> int:
        """Of one micro-batch on one rank."""
        return self.batch * self.seq // self.degrees.context

    def seconds(self, kind: str, nbytes: float, ranks: int, stride: int) -> float:
        """Of one collective."""
        return collective_seconds(kind, int(nbytes), ranks, stride, self.cluster)


Communicates = Callable[[Run], Exchange]


@dataclass(frozen=True, slots=True)
class Method:
    """One way to use several GPUs. `axis`: the field of Degrees; `options`: of the pass, before its degree.

    `every`: gradients are reduced in every micro-batch. `static`: whether a rank may hold only a part of the parameters, of the
    gradients, of the states, when the optimizer steps. `needs_experts`: only for models that have them. `offloads`: what is
    divided is in the host's memory, and the optimizer runs there; looked at where nothing else fits, or when it is asked for.
    """

    key: str
    label: str
    axis: str
    pass_name: str
    options: str
    communicates: Communicates
    every: bool = True
    static: tuple[bool, bool, bool] = (False, False, False)
    needs_experts: bool = False
    offloads: bool = False

    def text(self, degree: int) -> str:
        """The pass with its options."""
        words = " ".join(filter(None, (self.options, f"degree={degree}")))
        return f"{self.pass_name}{{{words}}}"


def _parts(run: Run, nbytes: int) -> float:
    """Bytes of one layer on a rank of tensor and pipeline parallelism."""
    return nbytes / max(1, run.facts.layers) / run.degrees.tensor


def _replicated(run: Run) -> Exchange:
    ranks, stride = run.degrees.copies * run.degrees.context, run.degrees.tensor
    layer, root = _parts(run, run.facts.layer_gradients), run.facts.root_gradients / run.degrees.tensor
    return Exchange(
        again=False,
        reduce_layer=run.seconds("all_reduce", layer, ranks, stride),
        reduce_root=run.seconds("all_reduce", root, ranks, stride),
    )


def _partitioned_gradients(run: Run) -> float:
    """Seconds in which all gradients go to their owners."""
    ranks, stride = run.degrees.copies * run.degrees.context, run.degrees.tensor
    return run.seconds("reduce_scatter", run.facts.gradients / run.degrees.tensor, ranks, stride)


def _new_parameters(run: Run) -> float:
    """Seconds in which everybody gets the parameters that their owners stepped."""
    ranks, stride = run.degrees.copies * run.degrees.context, run.degrees.tensor
    return run.seconds("all_gather", run.facts.parameters / run.degrees.tensor, ranks, stride)


def _stage1(run: Run) -> Exchange:
    """ZeRO 1: gradients after the last micro-batch; overlap_comm is off by default (deepspeed/runtime/zero/config.py)."""
    return Exchange(again=False, after=_partitioned_gradients(run) + _new_parameters(run), one_stream=True)


def _stage2(run: Run) -> Exchange:
    """ZeRO 2: gradients in every micro-batch, and computing waits, for overlap_comm is off by default."""
    return Exchange(again=False, inside_backward=_partitioned_gradients(run), after=_new_parameters(run), one_stream=True)


def _sharded(run: Run) -> Exchange:
    ranks, stride = run.degrees.copies * run.degrees.context, run.degrees.tensor
    facts, tensor = run.facts, run.degrees.tensor
    return Exchange(
        gather_layer=run.seconds("all_gather", _parts(run, facts.layer_parameters), ranks, stride),
        gather_root=run.seconds("all_gather", facts.root_parameters / tensor, ranks, stride),
        reduce_layer=run.seconds("reduce_scatter", _parts(run, facts.layer_gradients), ranks, stride),
        reduce_root=run.seconds("reduce_scatter", facts.root_gradients / tensor, ranks, stride),
    )


def _kept(run: Run) -> Exchange:
    """FSDP whose layers stay gathered after forward."""
    return replace(_sharded(run), again=False)


def _stage3(run: Run) -> Exchange:
    return replace(_sharded(run), one_stream=True)


def _host_sharded(run: Run) -> Exchange:
    """FSDP2's CPUOffloadPolicy: a shard is copied to the GPU on the stream of its all-gather, before it, and a reduced gradient
    to the host behind its reduction (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py, `foreach_reduce`)."""
    facts, found, ranks = run.facts, _sharded(run), run.degrees.copies * run.degrees.context
    root = run.degrees.tensor * ranks * run.host
    return replace(
        found,
        gather_layer=found.gather_layer + _parts(run, facts.layer_parameters) / ranks / run.host,
        gather_root=found.gather_root + facts.root_parameters / root,
        reduce_layer=found.reduce_layer + _parts(run, facts.layer_gradients) / ranks / run.host,
        reduce_root=found.reduce_root + facts.root_gradients / root,
    )


def _host_stage2(run: Run) -> Exchange:
    """ZeRO 2 with its optimizer on the host: the part's gradients go there in fp32 in every micro-batch, its new weights come
    back (deepspeed/runtime/zero/stage_1_and_2.py, `async_inplace_copy_grad_to_fp32_buffer_from_gpu`)."""
    found, ranks = _stage2(run), run.degrees.copies * run.degrees.context * run.degrees.tensor
    sent, back = (nbytes / ranks / run.host for nbytes in (2 * run.facts.gradients, run.facts.parameters))
    return replace(found, inside_backward=found.inside_backward + sent, after=found.after + back)


def _host_stage3(run: Run) -> Exchange:
    return replace(_host_sharded(run), one_stream=True)


def _tensor(run: Run) -> Exchange:
    """Two all-reduces of the hidden states in a layer's forward, and two in its backward (Megatron-LM, arXiv 1909.08053, 3).

    With sequence parallelism each is a reduce-scatter and an all-gather, which move as much (arXiv 2205.05198, 4.2.2).
    """
    once = 2 * run.seconds("all_reduce", run.tokens * run.facts.hidden, run.degrees.tensor, 1) * run.facts.layers
    return Exchange(inside_forward=once, inside_backward=once * (2 if run.recomputes else 1))


def _context(run: Run) -> Exchange:
    """Keys and values of the whole sequence in each layer, and their gradients back (Llama 3, arXiv 2407.21783, 3.3.2)."""
    nbytes = run.tokens * run.degrees.context * run.facts.kept
    once = run.seconds("all_gather", nbytes, run.degrees.context, run.degrees.tensor) * run.facts.layers
    return Exchange(inside_forward=once, inside_backward=once * (3 if run.recomputes else 2))


def _expert(run: Run) -> Exchange:
    """Tokens to their experts and back, and the same in backward (GShard, arXiv 2006.16668, 3.2)."""
    once = (
        2 * run.seconds("all_to_all", run.tokens * run.facts.routed, run.degrees.expert, run.degrees.inner) * run.facts.layers
    )
    return Exchange(inside_forward=once, inside_backward=once * (2 if run.recomputes else 1))


def _pipeline(run: Run) -> Exchange:
    """The hidden states to the next stage, and their gradients back."""
    stride = run.degrees.inner * run.degrees.copies
    once = run.seconds("send", run.tokens * run.facts.hidden, run.degrees.pipeline, stride)
    return Exchange(inside_forward=once, inside_backward=once)


COPIES = (
    Method("ddp", "DDP", "copies", "data-parallel", "", _replicated, every=False),
    Method("zero-1", "ZeRO 1", "copies", "zero", "stage=1", _stage1, every=False, static=(False, False, True)),
    Method("zero-2", "ZeRO 2", "copies", "zero", "stage=2", _stage2, static=(False, True, True)),
    Method("zero-3", "ZeRO 3", "copies", "zero", "stage=3", _stage3, static=(True, True, True)),
    Method("fsdp", "FSDP", "copies", "fsdp", "", _sharded, static=(True, True, True)),
    Method("fsdp-kept", "FSDP, kept after forward", "copies", "fsdp", "reshard=false", _kept, static=(True, True, True)),
    Method(
        "fsdp-offload", "FSDP on the host", "copies", "fsdp", "offload", _host_sharded, static=(True, True, True), offloads=True
    ),
    Method(
        "zero-2-offload",
        "ZeRO 2, optimizer on the host",
        "copies",
        "zero",
        "stage=2 offload-optimizer",
        _host_stage2,
        static=(False, True, True),
        offloads=True,
    ),
    Method(
        "zero-3-offload",
        "ZeRO 3 on the host",
        "copies",
        "zero",
        "stage=3 offload-optimizer offload-param",
        _host_stage3,
        static=(True, True, True),
        offloads=True,
    ),
)
INNER = (
    Method("tp", "TP", "tensor", "tensor-parallel", "", _tensor, static=(True, True, True)),
    Method("tp-sp", "TP, sequence parallel", "tensor", "tensor-parallel", "sequence loss", _tensor, static=(True, True, True)),
    Method("cp", "CP", "context", "context-parallel", "", _context),
    Method("ep", "EP", "expert", "expert-parallel", "", _expert, static=(True, True, True), needs_experts=True),
    Method("pp", "PP", "pipeline", "pipeline-parallel", "", _pipeline, static=(True, True, True)),
)


def available(methods: tuple[Method, ...]) -> tuple[Method, ...]:
    """Those whose pass is installed."""
    known = registry.passes.table()
    return tuple(method for method in methods if method.pass_name in known)


def chosen(
    text: str | None, copies: tuple[Method, ...], inner: tuple[Method, ...]
) -> tuple[tuple[Method, ...], tuple[Method, ...]]:
    """The methods of `copies` and `inner` that `text` lists, all where it is None. UsageError for one that is not there."""
    if text is None:
        return copies, inner
    wanted = [word.strip() for word in text.split(",") if word.strip()]
    known = {method.key for method in (*copies, *inner)}
    for word in wanted:
        if word not in known:
            raise UsageError(f"--methods: {word!r} is no method", hint=f"known: {', '.join(sorted(known)) or 'none'}")
    return tuple(m for m in copies if m.key in wanted), tuple(m for m in inner if m.key in wanted)
