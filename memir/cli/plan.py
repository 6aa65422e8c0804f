"""`memir plan TARGET --gpus 8 --gpu a100-80gb`: the fastest distributed method among those that fit."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from memir.cli.options import Request, cache_option, output_option, progress, step_options, write
from memir.errors import EXIT_INCONCLUSIVE, EXIT_NO, EXIT_OK, InconclusiveError, UsageError
from memir.recipe import Lora, Quantize, Recipe

if TYPE_CHECKING:
    from memir.api import TracedProgram
    from memir.ir.core import Program
    from memir.planner.search import Evaluated

FORMS = ("torchrun", "accelerate", "deepspeed", "torchtitan")
CHECKPOINTS = ("none", "selective", "full")
TUNES = ("full", "lora", "qlora", "freeze")
ROWS = 10


_TUNE = "What is trained; lora and qlora take r=16 unless --lora or --quantize say more; freeze takes --cut."


@click.command("plan")
@step_options
@cache_option
@click.option("--gpus", type=click.IntRange(min=1), required=True, metavar="N", help="GPUs in all.")
@click.option("--gpu", required=True, metavar="NAME", help="Their kind: a100-80gb, h100 (see memir gpus).")
@click.option("--nodes", type=click.IntRange(min=1), default=1, show_default=True, metavar="N", help="Nodes they stand in.")
@click.option("--intra-node", metavar="LINK", help="nvlink or pcie.  [default: nvlink where the card has it]")
@click.option("--inter-node", metavar="NET", default="ib-400", show_default=True, help="Each GPU's port: ib-400, roce-200.")
@click.option("--global-batch", type=click.IntRange(min=1), required=True, metavar="N", help="Sequences in a step of all GPUs.")
@click.option(
    "--objective",
    type=click.Choice(("time", "cost", "gpus")),
    default="time",
    show_default=True,
    help="Fastest step; least GPU time for a token; fewest GPUs.",
)
@click.option("--tune", type=click.Choice(TUNES), default="full", show_default=True, help=_TUNE)
@click.option("--cut", type=click.IntRange(min=1), metavar="K", help="With --tune freeze: leading layers that are frozen.")
@click.option("--methods", metavar="LIST", help="Only these: fsdp,ddp,tp,...  [default: all]")
@click.option("--checkpoints", metavar="LIST", default=",".join(CHECKPOINTS), show_default=True, help="Checkpointing to try.")
@click.option(
    "--margin",
    type=click.FloatRange(0, 90),
    default=5.0,
    show_default=True,
    metavar="PERCENT",
    help="Memory to keep free: fragmentation, NCCL, what differs between ranks.",
)
@click.option("--exact", is_flag=True, help="Trace the winner with PyTorch's own FSDP2 and DTensor too, and print its peak.")
@click.option("--emit", type=click.Choice(FORMS), help="Write the winner as a configuration instead.")
@click.option("--format", "form", type=click.Choice(("text", "json")), default="text", show_default=True)
@output_option
def command(
    request: Request,
    gpus: int,
    gpu: str,
    nodes: int,
    intra_node: str | None,
    inter_node: str,
    global_batch: int,
    objective: str,
    tune: str,
    cut: int | None,
    methods: str | None,
    checkpoints: str,
    margin: float,
    exact: bool,
    emit: str | None,
    form: str,
    output: Path | None,
) -> int:
    """Say which distributed method, micro-batch and checkpointing trains TARGET fastest on these GPUs.

    Peaks are requested bytes of one rank, from one traced step rewritten by the methods' passes; speeds are predictions of the
    cost model (docs/cost-model.md). Exit code 1: nothing fits. Exit code 3: no method's program can be made.
    """
    from memir.analysis.cost.device import device
    from memir.analysis.flops import work_of
    from memir.api import installed_torch, on_gpu, program_of
    from memir.cuda.verdict import room
    from memir.hardware import parse_gpu
    from memir.hardware.links import Cluster, inter_link, intra_link
    from memir.planner.answer import answer, at_margin
    from memir.planner.emit import FORMS as WRITERS
    from memir.planner.emit import Setting
    from memir.planner.facts import facts
    from memir.planner.methods import COPIES, INNER, available, chosen
    from memir.planner.screen import Page, to_json, to_text
    from memir.planner.search import Problem, Search
    from memir.planner.variant import SOME, Variants, kind_of
    from memir.recipe import summary

    kind = parse_gpu(gpu)
    if kind.card is None:
        raise UsageError(f"--gpu {gpu}: an amount of memory has no speed", hint="name a card:  --gpu a100-80gb  (memir gpus)")
    if gpus % nodes:
        raise UsageError(f"--gpus {gpus} do not stand in --nodes {nodes} of equally many")
    if request.batch is not None or request.recipe.accumulate != 1:
        raise UsageError(
            "memir plan finds the micro-batch and the accumulation itself", hint="leave out  --batch  and  --accumulate"
        )
    if request.recipe.mode != "train":
        raise UsageError("--mode forward trains nothing", hint="leave out  --mode")
    if (cut is not None) != (tune == "freeze"):
        raise UsageError("--tune freeze and --cut belong together", hint="--tune freeze --cut 8")
    tried = _tried(checkpoints, request.recipe)
    recipe = on_gpu(replace(_tuned(request.recipe, tune), checkpoint="none"), kind)
    cluster = Cluster(gpus, gpus // nodes, intra_link(kind.card, intra_node or ""), inter_link(inter_node))
    copies, inner = chosen(methods, available(COPIES), available(INNER))
    capacity = room(kind, trains=True, torch=installed_torch()).nbytes
    traces: dict[tuple[int, int], TracedProgram] = {}

    def trace(batch: int, accumulate: int) -> tuple[Program, Mapping[str, int]]:
        keywords = {**request.program_keywords(), "batch": batch}
        found = program_of(request.model, replace(recipe, accumulate=accumulate), **keywords)
        traces[batch, accumulate] = found
        program = found.program
        if cut is not None:
            from memir.pipeline import Pipeline

            program = Pipeline.parse(f"freeze{{cut={cut}}}").run(program)
        return program, found.dims

    with progress() as stage:
        share = 0.0

        def step(done: float) -> None:
            nonlocal share
            share = done

        def say(text: str) -> None:
            stage(f"[{'#' * int(20 * share):<20}] {text}")

        variants = Variants(trace, say)
        program, fixed = variants.step(SOME, 1)
        seq = traces[SOME, 1].point["S"]
        env = {name: {"B": SOME, "S": seq, **fixed}[name] for name in program.dims}
        works = work_of(program)
        layers = traces[SOME, 1].subject.num_layers or 1
        problem = Problem(
            facts=facts(program, works, env, layers),
            device=device(kind.card),
            cluster=cluster,
            seq=seq,
            global_batch=global_batch,
            capacity=at_margin(capacity, margin),
            checkpoints=tried,
            objective=objective,
            experts=any(work.shape.form in ("groups", "weights") for work in works),
        )
        found = Search(problem, variants, copies, inner, step, offloads=methods is not None).run()
        said = answer(found, problem, variants, ROWS, say)
        traced = _exact(said.winner, request, recipe, seq, cut, say) if exact and said.winner is not None else None
    setting = Setting(request.model, recipe.dtype, seq, global_batch, cluster.per_node, _typed(recipe, gpu))
    if emit is not None and said.winner is not None:
        write(WRITERS[emit](said.winner, setting), output)
        return EXIT_OK
    where = f"{gpus} x {kind.card.key}, {cluster.intra.name}" + (f", {nodes} nodes, {cluster.inter.name}" if nodes > 1 else "")
    used = list(traces.values()) if said.winner is None else [traces[kind_of(*said.winner.candidate.step)]]
    notes = tuple(dict.fromkeys(note for one in used for note in (*one.inconclusive, *one.assumptions)))
    trained = summary(replace(recipe, gpu="")) + ("" if cut is None else f", cut {cut}")
    page = Page(said, setting, trained, kind.card.key, problem.capacity, margin, objective, where, notes, traced)
    write({"text": to_text, "json": to_json}[form](page), output)
    if emit is not None:
        print("nothing fits, so there is no configuration to write", file=sys.stderr)
    if said.winner is not None:
        return EXIT_OK
    return EXIT_INCONCLUSIVE if said.failures or not said.rows else EXIT_NO


def _exact(
    winner: Evaluated, request: Request, recipe: Recipe, seq: int, cut: int | None, say: Callable[[str], None]
) -> int | str:
    """The winner's peak by PyTorch's own code, or why it has none."""
    from memir.api import exact_peak

    if cut is not None:
        return "a frozen prefix is a pass, which PyTorch's own methods do not know of"
    batch, accumulate = winner.candidate.step
    keywords = {**request.keywords(), "batch": batch, "seq": seq, "parallel": winner.candidate.text}
    try:
        return exact_peak(request.model, replace(recipe, accumulate=accumulate), **keywords, progress=say)
    except (UsageError, InconclusiveError) as error:
        return error.message


def _tried(text: str, recipe: Recipe) -> tuple[str, ...]:
    words = tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    for word in words:
        if word not in CHECKPOINTS:
            raise UsageError(f"--checkpoints: {word!r} is no way of checkpointing", hint=f"known: {', '.join(CHECKPOINTS)}")
    if not words:
        raise UsageError("--checkpoints: none is given", hint=f"known: {', '.join(CHECKPOINTS)}")
    return ("full",) if recipe.checkpoint == "full" else words


def _tuned(recipe: Recipe, tune: str) -> Recipe:
    if tune in ("lora", "qlora") and recipe.lora is None:
        recipe = replace(recipe, lora=Lora())
    if tune == "qlora" and recipe.quantize is None:
        recipe = replace(recipe, quantize=Quantize(double=True, keep=True))
    return recipe


def _typed(recipe: Recipe, gpu: str) -> str:
    """The options of the step that are not at their defaults, for `memir analyze`."""
    plain = Recipe()
    names = ("dtype", "amp", "attention", "optimizer", "loss", "loop", "lora", "quantize")
    changed = [name for name in names if getattr(recipe, name) != getattr(plain, name)]
    words = [f"--gpu {gpu}", *(f"--{name.replace('_', '-')} {getattr(recipe, name)}" for name in changed)]
    return " ".join(words)
