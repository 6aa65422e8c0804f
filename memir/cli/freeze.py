"""`memir freeze TARGET`: every cut of frozen leading layers, what it takes, and which is the best."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from memir.cli.options import Request, cache_option, output_option, progress, step_options, write
from memir.errors import EXIT_INCONCLUSIVE, EXIT_NO, EXIT_OK, UsageError

if TYPE_CHECKING:
    from memir.analysis.cost import Machine
    from memir.cuts.pareto import Choice
    from memir.hardware import Card


@click.command("freeze")
@step_options
@cache_option
@click.option("--gpu", metavar="NAME|MEMORY", help="What has to fit, and whose speed is taken: h100, 80GiB (see memir gpus).")
@click.option(
    "--cache",
    "where",
    type=click.Choice(("none", "disk", "host")),
    default="none",
    show_default=True,
    help="Keep the frozen layers' output there.",
)
@click.option("--bandwidth", type=float, metavar="GB/S", help="Of that storage.  [default: disk 3, host 25]")
@click.option("--samples", type=click.IntRange(min=1), metavar="N", help="Samples in the data set, for the cache's bytes.")
@click.option("--tokens", type=click.IntRange(min=1), metavar="N", help="Mean tokens of a packed sample.  [default: S, padded]")
@click.option(
    "--objective",
    type=click.Choice(("memory", "time", "cost")),
    default="memory",
    show_default=True,
    help="What the best cut is best in; cost: GPU-hours, where --gpus are given back as the cut grows.",
)
@click.option(
    "--schedule", metavar="CUTS", help="Cuts over a run: 0@0,4@0.3,8@0.6; or AutoFreeze's own growth: autofreeze[:TESTS]."
)
@click.option("--gpus", type=click.IntRange(min=1), default=1, show_default=True, metavar="N", help="GPUs of the run.")
@click.option("--pareto", "choose", is_flag=True, help="The choices of cut, batch, checkpointing and cache that none beats.")
@click.option("--head", is_flag=True, help="Freeze what runs after the layers, too.")
@click.option("--train-embeddings", is_flag=True, help="Freeze layers only, not what runs before them.")
@click.option("--format", "form", type=click.Choice(("text", "json", "csv")), default="text", show_default=True)
@output_option
def command(
    request: Request,
    gpu: str | None,
    where: str,
    bandwidth: float | None,
    samples: int | None,
    tokens: int | None,
    objective: str,
    schedule: str | None,
    gpus: int,
    choose: bool,
    head: bool,
    train_embeddings: bool,
    form: str,
    output: Path | None,
) -> int:
    """Say for every number of frozen leading layers of TARGET what is left to train, the peak, the operations, the speed-up.

    The frozen layers run without gradients. Bytes are requested bytes. Exit code 1: no cut fits --gpu. Exit code 3: the step is
    not proved; the reason is printed.
    """
    from memir.api import installed_torch, on_gpu, program_of
    from memir.cuda.verdict import room
    from memir.cuts import plan
    from memir.cuts.answers import answers
    from memir.cuts.cache import boundary, cache_plan
    from memir.cuts.pareto import choices, pareto
    from memir.cuts.plan import flat_sample
    from memir.cuts.schedule import autofreeze, parse, run
    from memir.cuts.screen import Page, to_csv, to_json, to_text
    from memir.hardware import parse_gpu
    from memir.recipe import summary

    if where == "none" and (bandwidth or samples or tokens):
        raise UsageError("--bandwidth, --samples and --tokens are for a cache", hint="add  --cache disk  or  --cache host")
    if objective == "cost" and gpus == 1:
        raise UsageError("--objective cost gives GPUs back: say how many there are", hint="add  --gpus 4")
    if choose and gpu is None:
        raise UsageError("--pareto chooses what fits a GPU", hint="name one:  --gpu 24GiB")
    if request.recipe.mode != "train":
        raise UsageError("--mode forward trains nothing, so there is nothing to freeze", hint="leave out  --mode")
    memory = None if gpu is None else parse_gpu(gpu)
    recipe = request.recipe if memory is None else on_gpu(request.recipe, memory)
    machine = None if memory is None or memory.card is None else _machine(memory.card)
    budget = None if memory is None else room(memory, trains=True, torch=installed_torch()).nbytes
    with progress() as stage:
        step = program_of(request.model, recipe, **request.program_keywords(), progress=stage)
        stage("rewriting the step for every cut")
        found = plan(step.program, step.env, machine, embeddings=not train_embeddings, head=head)
        stage("solving")
        said = answers(found, budget, objective, step.subject.max_seq, gpus=gpus, cached=where != "none")
        cache = None
        if where != "none":
            size = boundary(flat_sample(step.program), 2)
            speed = None if bandwidth is None else bandwidth * 1e9
            cache = cache_plan(found, where, speed, samples, tokens, step.env, size)
        lasts = None
        if schedule:
            own = schedule.partition(":")[0] == "autofreeze"
            last = found.cuts[-1].cut
            entries = autofreeze(schedule, found.depth, last) if own else parse(schedule, last)
            lasts = run(found, entries, gpus, where != "none", budget)
        chosen: tuple[Choice, ...] = ()
        if choose and budget is not None:
            ways = choices(found, budget, checkpointed=recipe.checkpoint != "none", cached=where != "none")
            if recipe.checkpoint == "none":
                stage("tracing the step with checkpointing")
                again = replace(recipe, checkpoint="full")
                other = program_of(request.model, again, **request.program_keywords(), progress=stage)
                stage("rewriting the step for every cut")
                second = plan(other.program, other.env, machine, embeddings=not train_embeddings, head=head)
                ways += choices(second, budget, checkpointed=True, cached=where != "none")
            stage("choosing")
            chosen = pareto(ways)
    notes = (*step.assumptions, *step.inconclusive)
    if recipe.checkpoint == "full":
        notes += (
            "transformers' gradient_checkpointing_enable() makes the embeddings' outputs require gradients: call "
            "disable_input_require_grads() after it, or freezing saves no activations",
        )
    name = "" if memory is None else memory.name
    page = Page(
        step.subject.name, summary(recipe), found, said, objective, budget, name, machine.name if machine else "", cache, lasts,
        gpus, notes, chosen,
    )  # fmt: skip
    write({"text": to_text, "csv": to_csv, "json": to_json}[form](page), output)
    if step.inconclusive:
        return EXIT_INCONCLUSIVE
    return EXIT_NO if budget is not None and said.fits is None else EXIT_OK


def _machine(card: Card) -> Machine:
    """The card's datasheet as a roofline."""
    from memir.analysis.cost import Machine

    rates = [("f16", card.fp16), ("bf16", card.bf16 or card.fp16), ("f32", card.fp32)]
    return Machine(card.name, tuple(rates), card.bandwidth)
