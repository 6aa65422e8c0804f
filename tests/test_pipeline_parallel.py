"""pipeline-parallel on a small program: what each stage has, the order of schedules, and what is refused."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from memir.analysis.liveness import timeline
from memir.errors import InconclusiveError, MemirError, UsageError
from memir.ir.core import Kind, Op, Program
from memir.ir.parser import parse
from memir.ir.size import Size
from memir.ir.verify import verify
from memir.parallel.every_stage import num_stages, of_each_stage
from memir.parallel.schedules import Action, actions
from memir.parallel.split import balanced, given
from memir.passes.pipeline_parallel import PipelineParallel
from memir.pipeline import Pipeline

GOLDEN = Path(__file__).parent / "golden" / "pipeline_parallel" / "first.memir"


@pytest.fixture(scope="module")
def tiny() -> Program:
    """Two layers between an embedding and a head; SGD."""
    text = GOLDEN.read_text()
    return parse(text[text.index("memir 1") : text.index("# ---")])


def test_degree_one_is_the_identity(tiny: Program) -> None:
    assert PipelineParallel(degree=1, stage=5).run(tiny) is tiny


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_stages_conserve_what_is_resident(tiny: Program, schedule: Any) -> None:
    """Parameters and gradients of all stages are those of the whole model."""
    ranks = [PipelineParallel(2, stage, schedule, 3).run(tiny) for stage in range(2)]
    for kind in (Kind.PARAMETER, Kind.GRADIENT):
        whole = {s.name: s.nbytes for s in tiny.storages if s.kind == kind}
        parts = [{s.name: s.nbytes for s in program.storages if s.kind == kind} for program in ranks]
        assert not parts[0].keys() & parts[1].keys()
        assert parts[0] | parts[1] == whole


@pytest.mark.parametrize("microbatches", [2, 3, 5])
def test_one_forward_one_backward_holds_as_many_as_stages_are_left(tiny: Program, microbatches: int) -> None:
    """Stage p of P holds min(P - p, M) micro-batches (arXiv 2104.04473, section 2.2.1): here their first activations."""
    for stage, name in ((0, "embedding"), (1, "mm_2")):
        program = PipelineParallel(2, stage, "1f1b", microbatches, outputs=False).run(tiny)
        verify(program)
        own = {s.name for s in program.storages if s.name.rpartition("/")[2] == name}
        assert len(own) == microbatches
        alive: set[str] = set()
        most = 0
        for _, op in program.ops():
            alive |= {r.storage for r in op.results if r.storage in own}
            most = max(most, len(alive))
            alive -= set(op.frees)
        assert most == min(2 - stage, microbatches) if stage == 0 else most <= 2


def test_more_microbatches_do_not_raise_the_peak_of_1f1b_beyond_what_waits(tiny: Program) -> None:
    """Each further one brings its inputs and its receive buffer; GPipe keeps its activations too."""
    env = {"B": 2, "S": 8}

    def peak(schedule: Any, many: int) -> int:
        return timeline(PipelineParallel(2, 0, schedule, many, outputs=False).run(tiny)).evaluate(env).peak

    waiting = 8 * 16 + 16 * 16  # ids, and the gradient that comes back
    assert [b - a for a, b in pairwise(peak("1f1b", m) for m in (3, 4, 5, 6))] == [waiting] * 3
    assert peak("gpipe", 6) - peak("gpipe", 5) > waiting


@pytest.mark.parametrize(
    ("depth", "stages", "cuts"), [(4, 2, (2,)), (32, 4, (8, 17, 25)), (6, 4, (1, 3, 5)), (2, 4, (0, 1, 2))]
)
def test_balanced_as_torchtitan(depth: int, stages: int, cuts: tuple[int, ...]) -> None:
    assert balanced(depth, stages) == cuts


@pytest.mark.parametrize(
    ("cuts", "message"), [((1,), "at= has 1"), ((2, 2), "without layers"), ((-1, 3), "without"), ((1, 5), "without")]
)
def test_impossible_cuts(cuts: tuple[int, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        given(cuts, 4, 3)
    with pytest.raises(UsageError, match="do not fill"):
        balanced(1, 4)


def test_schedules_run_every_micro_batch_once_forward_before_backward() -> None:
    for schedule, degree, a_rank, many in (("gpipe", 3, 1, 4), ("1f1b", 3, 1, 4), ("interleaved-1f1b", 2, 3, 4)):
        for rank in range(degree):
            order = actions(schedule, rank, degree, a_rank, many)  # type: ignore[arg-type]
            assert Counter(order).most_common(1)[0][1] == 1
            assert len(order) == 2 * a_rank * many
            for action in order:
                if action.kind == "B":
                    assert order.index(Action("F", action.stage, action.micro)) < order.index(action)


def test_schedules_are_those_of_pytorch() -> None:
    """The compute actions of torch.distributed.pipelining's own classes."""
    from torch.distributed.pipelining import schedules as torchs

    def listed(theirs: Any) -> list[tuple[str, int, int]]:
        kinds = {torchs.FORWARD: "F", torchs.FULL_BACKWARD: "B", torchs.BACKWARD_INPUT: "I", torchs.BACKWARD_WEIGHT: "W"}
        return [
            (kinds[a.computation_type], a.stage_index, a.microbatch_index)
            for a in theirs
            if a is not None and a.computation_type in kinds
        ]

    for degree, many in ((2, 2), (2, 5), (4, 4), (4, 9)):
        single = torchs.Schedule1F1B.__new__(torchs.Schedule1F1B)
        single._num_stages, single._n_microbatches = degree, many
        theirs = single._get_pipeline_order()
        assert theirs is not None
        for rank in range(degree):
            kinds = [a.kind for a in actions("1f1b", rank, degree, 1, many)]
            assert kinds == [kind for kind, _, _ in listed(theirs[rank])]  # its numbers begin at 1 on the last rank
    for degree, a_rank, many in ((2, 2, 2), (2, 2, 6), (4, 2, 8), (4, 3, 4), (2, 3, 3)):
        several = torchs.ScheduleInterleaved1F1B.__new__(torchs.ScheduleInterleaved1F1B)
        several.n_local_stages, several.pp_group_size, several._n_microbatches = a_rank, degree, many
        several.microbatches_per_round = many // max(1, many // degree)
        for rank in range(degree):
            mine = [(a.kind, a.stage, a.micro) for a in actions("interleaved-1f1b", rank, degree, a_rank, many)]
            assert mine == listed(several._calculate_single_rank_operations(rank))
    for degree, a_rank, many in ((2, 2, 2), (2, 2, 6), (4, 2, 8), (4, 3, 4), (2, 3, 3)):
        bubbles = torchs.ScheduleInterleavedZeroBubble.__new__(torchs.ScheduleInterleavedZeroBubble)
        bubbles.n_local_stages, bubbles.pp_group_size, bubbles._n_microbatches = a_rank, degree, many
        bubbles.microbatches_per_round = many // max(1, many // degree)
        for rank in range(degree):
            mine = [(a.kind, a.stage, a.micro) for a in actions("zero-bubble", rank, degree, a_rank, many)]
            assert mine == listed(bubbles._calculate_single_rank_operations(rank))
    for degree, many in ((2, 2), (2, 3), (2, 8), (4, 4), (4, 7), (4, 10)):
        v = torchs.ScheduleZBVZeroBubble.__new__(torchs.ScheduleZBVZeroBubble)
        v.pp_group_size, v.num_stages, v._n_microbatches = degree, 2 * degree, many
        for rank in range(degree):
            mine = [(a.kind, a.stage, a.micro) for a in actions("zbv", rank, degree, 2, many)]
            assert mine == listed(v._calculate_single_rank_operations(rank))


def test_a_split_backward_makes_the_same_gradients_and_keeps_the_gradients_of_inputs(tiny: Program) -> None:
    """Of a stage's two parts: all parameters' gradients once a micro-batch, and what went back stays until the next step."""
    options: dict[str, Any] = {"degree": 2, "stage": 1, "microbatches": 2, "a_rank": 1}
    whole = PipelineParallel(**options, schedule="interleaved-1f1b").run(tiny)
    split = PipelineParallel(**options, schedule="zero-bubble").run(tiny)
    verify(split)

    def computed(program: Program) -> Counter[str]:
        return Counter(op.opcode for _, op in program.ops() if not op.opcode.startswith("memir."))

    assert computed(whole) == computed(split)
    assert {p.name.rpartition(".")[0].rpartition(".")[2] for p in split.phases if p.name.endswith("backward")} == {
        "input",
        "weight",
    }
    env = {"B": 2, "S": 8}
    sent = 2 * 16 * 16  # two micro-batches' gradients of [B, S, 4]
    assert timeline(split).evaluate(env).start - timeline(whole).evaluate(env).start == sent


def test_every_stage_of_a_pipeline() -> None:
    passes = Pipeline.parse("bind{B=2},pipeline-parallel{degree=3 microbatches=6}").passes
    assert num_stages(passes) == 3
    assert [Pipeline(p).spec() for p in of_each_stage(passes)] == [
        "bind{B=2},pipeline-parallel{degree=3 microbatches=6}",
        "bind{B=2},pipeline-parallel{degree=3 stage=1 microbatches=6}",
        "bind{B=2},pipeline-parallel{degree=3 stage=2 microbatches=6}",
    ]
    assert of_each_stage(passes[:1]) == (passes[:1],)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"degree": 0}, UsageError, "degree 0"),
        ({"degree": 2, "stage": 2}, UsageError, "stage 2 of 2"),
        ({"degree": 2, "microbatches": 1}, UsageError, "do not fill 2 stages"),
        ({"degree": 2, "schedule": "interleaved-1f1b", "microbatches": 5, "at": (0, 1, 2)}, UsageError, "equal rounds"),
        ({"degree": 8}, UsageError, "do not fill 8 stages"),
        ({"degree": 2, "schedule": "zbv", "tied": "copy"}, InconclusiveError, "first and the last stage on one rank"),
    ],
    ids=str,
)
def test_refused(tiny: Program, options: dict[str, Any], kind: type[MemirError], message: str) -> None:
    with pytest.raises(kind, match=message):
        PipelineParallel(**options).run(tiny)


def test_again_and_accumulated(tiny: Program) -> None:
    once = PipelineParallel(2, 0).run(tiny)
    with pytest.raises(UsageError, match="has this axis already"):
        PipelineParallel(2, 0).run(once)
    text = GOLDEN.read_text()
    body = text[text.index("memir 1") : text.index("# ---")]
    accumulated = body.replace("phase forward", "phase micro0.forward").replace("phase backward", "phase micro0.backward")
    with pytest.raises(UsageError, match="one micro-batch"):
        PipelineParallel(2, 0).run(parse(accumulated))


def test_a_layer_that_reads_more_than_the_hidden_state(tiny: Program) -> None:
    """The second layer adds the embedding's output: a pipeline would have to pass it on too."""
    text = GOLDEN.read_text()
    body = text[text.index("memir 1") : text.index("# ---")]
    skip = body.replace(
        "%mm_1: f32[B*S, 4] in $mm_1 = aten.mm(%view_1,", "%mm_1: f32[B*S, 4] in $mm_1 = aten.addmm(%view, %view_1,"
    )
    with pytest.raises(InconclusiveError, match="more of those before it than one hidden state"):
        PipelineParallel(2, 0).run(parse(skip))


def test_a_parameter_of_two_stages(tiny: Program) -> None:
    text = GOLDEN.read_text()
    body = text[text.index("memir 1") : text.index("# ---")]
    tied = body.replace("aten.mm(%view_2, %head)", "aten.mm(%view_2, %tokens.weight)")
    with pytest.raises(UsageError, match="two stages use one parameter"):
        PipelineParallel(2, 0).run(parse(tied))


def test_a_v_passes_tensors_between_its_stages_without_messages(tiny: Program) -> None:
    """Rank 1 of 2 has the stages 1 and 2: what goes between them stays until the next step's takes its place."""
    program = PipelineParallel(2, 1, "zbv", 2).run(tiny)
    verify(program)
    phases = {p.name: [op.opcode for op in p.ops if isinstance(op, Op)] for p in program.phases}
    assert "c10d.send" not in phases["stage1.micro0.forward"]
    assert "c10d.recv_" not in phases["stage2.micro0.forward"]
    assert "c10d.recv_" in phases["stage1.micro0.forward"]
    assert "c10d.send" in phases["stage2.micro0.forward"]
    kept = [s for s in program.storages if s.live_out and s.kind == Kind.ACTIVATION]
    assert len(kept) == 2 * 3  # of each micro-batch: the hidden state, its gradient, and the gradient that stage 1 sent back


def test_a_stage_without_anything_to_train(tiny: Program) -> None:
    frozen = Pipeline.parse("freeze{cut=1}").run(tiny)
    with pytest.raises(InconclusiveError, match="nothing is trained on stage 0"):
        PipelineParallel(2, 0).run(frozen)
    verify(PipelineParallel(2, 1).run(frozen))


@pytest.mark.parametrize(
    ("schedule", "copies"), [("1f1b", "fsdp"), ("interleaved-1f1b", "data-parallel"), ("zero-bubble", "data-parallel")]
)
def test_copies_that_are_not_described(tiny: Program, schedule: str, copies: str) -> None:
    with pytest.raises(InconclusiveError, match="around a pipeline"):
        Pipeline.parse(f"pipeline-parallel{{degree=2 schedule={schedule}}},{copies}{{degree=2}}").run(tiny)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_copies_of_a_stage_have_a_bucket_as_large_as_its_gradients(tiny: Program, schedule: str) -> None:
    stage = Pipeline.parse(f"pipeline-parallel{{degree=2 stage=1 schedule={schedule}}}").run(tiny)
    copy = Pipeline.parse("data-parallel{degree=2}").run(stage)
    verify(copy)
    held = [sum((s.nbytes for s in p.storages if s.live_in), start=Size()) for p in (stage, copy)]
    gradients = sum((s.nbytes for s in stage.storages if s.kind == Kind.PARAMETER), start=Size())
    assert held[1] - held[0] == gradients
