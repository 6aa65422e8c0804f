"""`memir sweep TARGET -b 1,2,4,8 -s 512:8192:512`: many peaks from few traces, or the largest batch or sequence that fits."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from memir.cli.options import Request, cache_option, output_option, progress, step_options, write
from memir.cli.parallel import NAMES, parallel_option
from memir.errors import EXIT_INCONCLUSIVE, EXIT_NO, EXIT_OK, UsageError

if TYPE_CHECKING:
    from memir.sweep.pool import Step, Trace


@click.command()
@step_options
@cache_option
@parallel_option
def _single(request: Request) -> Request:
    """One recipe; the options of the sweep are its options, with lists for their values."""
    return request


AXES = ("batch", "seq")
SPECS = ("lora", "quantize")  # a comma separates parts of one value
# options without lists
SINGLE = ("model", "sets", "inputs", "trust_remote_code", "cache", "fold", "recipe_keep_outputs", "recipe_function", *NAMES)


def _default(param: click.Parameter) -> str | None:
    """The default of an option as it is typed, None where it has none."""
    return str(param.default) if isinstance(param.default, str | int | float) else None


def _listed(param: click.Parameter) -> click.Parameter:
    """The option for several values."""
    if param.name in (*AXES, *SINGLE) or not isinstance(param, click.Option):
        return param
    declared = [*param.opts, param.name or ""]
    choices = "|".join(map(str, param.type.choices)) if isinstance(param.type, click.Choice) else param.metavar or "VALUE"
    if param.name in SPECS:
        text = f"{param.help} Repeat it for several; none is the model as it is."
        return click.Option(declared, multiple=True, metavar="SPEC", help=text)
    return click.Option(
        declared, metavar=f"{choices},...", default=_default(param), show_default=param.show_default, help=param.help
    )


def _step_lists(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of a step, each with a list of values where it has values to choose from."""
    for param in reversed(_single.params):
        if param.name in AXES:
            continue
        command.__dict__.setdefault("__click_params__", []).append(_listed(param))
    return command


@click.command("sweep")
@click.option("-b", "--batch", metavar="LIST", help="Sequences in a batch, B: 1,2,4 or 8:64:8.  [default: 1]")
@click.option(
    "-s",
    "--seq",
    metavar="LIST",
    help="Tokens in a sequence, S: 512:8192:512.  [default: 2048, or the model's limit if smaller]",
)
@click.option("--gpu", metavar="NAME|MEMORY", help="What has to fit: h100, 80GiB (see memir gpus).")
@click.option("--max-batch", is_flag=True, help="Solve for the largest batch that fits --gpu, at each S.")
@click.option("--max-seq", is_flag=True, help="Solve for the longest sequence that fits --gpu, at each B.")
@click.option("--format", "form", type=click.Choice(("text", "csv", "json")), default="text", show_default=True)
@click.option(
    "--max-traces", type=click.IntRange(min=1), metavar="N", help="Traces a recipe, where one does not do.  [default: 8]"
)
@_step_lists
@output_option
def command(
    batch: str | None,
    seq: str | None,
    gpu: str | None,
    max_batch: bool,
    max_seq: bool,
    form: str,
    max_traces: int | None,
    output: Path | None,
    **words: Any,
) -> int:
    """Say what one training step of TARGET takes at its peak, for every batch, sequence length and recipe of some lists.

    Options with several values, separated by commas, give a recipe for each combination. A recipe is traced once; B and S are
    numbers put into its formula.

    Exit code 1: nothing fits --gpu. Exit code 3: a cell is not known, or not proved; its reason is in its row.
    """
    from memir.api import installed_torch, on_gpu
    from memir.cuda.verdict import room
    from memir.hardware import parse_gpu
    from memir.sweep.axes import parse_axis
    from memir.sweep.pool import MAX_TRACES
    from memir.sweep.run import solve, sweep
    from memir.sweep.screen import to_text
    from memir.sweep.tables import to_csv, to_json

    _check(batch, seq, gpu, max_batch, max_seq)
    requests = _requests(words)
    memory = None if gpu is None else parse_gpu(gpu)
    if memory is not None and memory.card is not None:
        requests = [replace(request, recipe=on_gpu(request.recipe, memory)) for request in requests]
        trains = any(request.recipe.mode == "train" for request in requests)
        memory = room(memory, trains=trains, torch=installed_torch())
    batches = None if batch is None else parse_axis(batch, "--batch")
    seqs = None if seq is None else parse_axis(seq, "--seq")
    limit = max_traces or MAX_TRACES
    with progress() as stage:
        traces = {request.recipe: _tracer(request, stage) for request in requests}
        if memory is not None and (max_batch or max_seq):
            table = solve(traces, "B" if max_batch else "S", seqs if max_batch else batches, memory, limit)
        else:
            table = sweep(traces, batches or (1,), seqs, memory, limit)
    text = {"text": to_text, "csv": to_csv}[form](table) if form != "json" else to_json(table, requests[0].model)
    write(text, output)
    if not table.is_proven:
        return EXIT_INCONCLUSIVE
    return EXIT_NO if table.fits_nowhere else EXIT_OK


def _check(batch: str | None, seq: str | None, gpu: str | None, max_batch: bool, max_seq: bool) -> None:
    if max_batch and max_seq:
        raise UsageError("--max-batch and --max-seq: one of the two is solved for", hint="leave one out")
    flag = "--max-batch" if max_batch else "--max-seq"
    if (max_batch or max_seq) and gpu is None:
        raise UsageError(f"{flag} needs the memory that has to suffice", hint=f"write  {flag} --gpu 80GiB")
    if max_batch and batch is not None:
        raise UsageError("--max-batch finds B", hint="leave out  -b")
    if max_seq and seq is not None:
        raise UsageError("--max-seq finds S", hint="leave out  -s")


def _requests(words: dict[str, Any]) -> list[Request]:
    """A request for each combination of the lists' values, in the order they were typed."""
    from memir.sweep.axes import parse_words

    fixed: list[str] = [words["model"]]
    axes: list[list[list[str]]] = []
    for param in _single.params:
        if param.name in ("model", *AXES):
            continue
        value, flag = words[param.name or ""], param.opts[-1]
        if value is None:
            continue
        if param.name in SPECS:
            axes.append([[] if spec.strip() == "none" else [flag, spec] for spec in value or ("none",)])
        elif param.name == "sets":
            fixed += [word for text in value for word in (flag, text)]
        elif isinstance(param, click.Option) and param.is_flag:
            fixed += [flag] if value is (param.name not in ("cache", "fold")) else []  # --no-cache makes it False
        elif param.name in SINGLE:
            fixed += [flag, str(value)]
        else:
            axes.append([[flag, word] for word in parse_words(value, flag)])
    name = click.get_current_context().command_path
    found = []
    for combination in itertools.product(*axes):
        with _single.make_context(name, [*itertools.chain(*combination), *fixed]) as context:
            found.append(_single.invoke(context))
    return found


def _tracer(request: Request, stage: Callable[[str], None]) -> Trace:
    """Traces of a request at any B and S."""
    from memir.api import program_of
    from memir.sweep.pool import Step

    def trace(batch: int, seq: int | None) -> Step:
        keywords = replace(request, batch=batch, seq=seq).program_keywords()
        traced = program_of(request.model, request.recipe, **keywords, progress=stage)
        return Step(
            program=traced.program,
            general=traced.general,
            fixed=traced.dims,
            seq=traced.point["S"],
            name=traced.subject.name,
            max_seq=traced.subject.max_seq,
            versions=traced.subject.versions,
            assumptions=traced.assumptions,
            inconclusive=traced.inconclusive,
        )

    return trace
