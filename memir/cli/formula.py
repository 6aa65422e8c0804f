"""`memir formula TARGET`: the memory of a model as mathematics over its widths."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import click

from memir.cli.options import Request, output_option, progress, step_options, write
from memir.cli.parallel import parallel_option
from memir.errors import EXIT_NO, EXIT_OK, UsageError

FORMATS = ("text", "latex", "markdown", "python", "sympy")


@click.command("formula")
@step_options
@parallel_option
@click.argument("other", metavar="[OTHER]", required=False)
@click.option(
    "--symbols",
    metavar="LIST",
    help="What stays a symbol; others become the model's numbers: B,S,L,h,f,V,a,k,d.  [default: all]",
)
@click.option(
    "--of",
    "quantities",
    metavar="LIST",
    default="peak",
    show_default=True,
    help="peak, steady, activations, layer, parameters, gradients, states, logits, phase:NAME; several with commas.",
)
@click.option("--format", "form", type=click.Choice(FORMATS), default="text", show_default=True)
@click.option("--units", type=click.Choice(("bytes", "elements")), default="bytes", show_default=True)
@click.option("--standalone", is_flag=True, help="With --format latex: a whole document.")
@click.option("--check", metavar="LIST", help="The formula beside a fresh concrete analysis: B=4,S=2048, widths too.")
@click.option("--solve", metavar="SYMBOL", help="The largest B, S, L, h, ... whose peak fits --gpu.")
@click.option("--gpu", metavar="NAME|MEMORY", help="With --solve: what has to fit: h100, 80GiB (see memir gpus).")
@click.option("--versus", metavar="OPTIONS", help="Compare with the same under these options: '--attention eager'.")
@click.option("--seed", type=int, default=0, show_default=True, help="Chooses the random widths of the verification.")
@output_option
def command(
    request: Request,
    other: str | None,
    symbols: str | None,
    quantities: str,
    form: str,
    units: str,
    standalone: bool,
    check: str | None,
    solve: str | None,
    gpu: str | None,
    versus: str | None,
    seed: int,
    output: Path | None,
) -> int:
    """Say what one training step of TARGET takes as a formula over batch, sequence, depth and the widths of the model.

    The model's code is traced at several widths; every size is generalized, and the whole verified by a trace at random ones.
    With OTHER: the difference of two models, or of one with and without --lora and the like (see docs/formulas.md).

    Exit code 1: with --check, the formula and the analysis differ; with --solve, nothing fits.
    """
    from memir.api import wide_step
    from memir.derivation.derive import Derivation
    from memir.derivation.step import Shown, shown
    from memir.derivation.write_code import to_python, to_sympy_text
    from memir.derivation.write_latex import to_latex, to_markdown
    from memir.derivation.write_text import to_text

    _check_options(form, standalone, solve, gpu, check, units, compares=other is not None or versus is not None)
    wanted = None if symbols is None else tuple(dict.fromkeys(word.strip() for word in symbols.split(",") if word.strip()))
    names = tuple(dict.fromkeys(word.strip() for word in quantities.split(",") if word.strip()))
    point = None if check is None else _point(check)
    budget = None
    if gpu is not None:
        request, budget = _on_gpu(request, gpu)
    with progress() as stage:

        def over_widths(asked: Request) -> Shown:
            step = wide_step(
                asked.model,
                asked.recipe,
                **asked.keywords(),
                parallel=asked.parallel,
                symbols=wanted,
                seed=seed,
                progress=stage,
            )
            return shown(step, wanted)

        over = over_widths(request)
        stage("deriving")
        at_widths = (set(point or ()) | {solve or "B"}) - {"B", "S"} != set()
        everywhere = form in ("python", "sympy") or at_widths
        derivation = Derivation(over, everywhere=everywhere, elements=units == "elements")
        found = [derivation.quantity(name) for name in names]
        if other is not None or versus is not None:
            from memir.derivation.difference import to_difference

            second = over_widths(_other(request, other or request.model, versus or ""))
            text, code = to_difference(derivation, Derivation(second, elements=units == "elements"), names, units), EXIT_OK
        elif point is not None:
            from memir.cli.formula_check import checked

            text, code = checked(request, over, found, point, stage)
        elif solve is not None:
            from memir.derivation.solve import to_solution

            text, fits = to_solution(over, found[0], solve, budget or 0, str(gpu))
            code = EXIT_OK if fits else EXIT_NO
        else:
            code = EXIT_OK
            if form == "text":
                text = to_text(over, found, units)
            elif form == "latex":
                text = to_latex(over, found, units, standalone)
            elif form == "markdown":
                text = to_markdown(over, found, units)
            else:
                text = to_python(over, found, units) if form == "python" else to_sympy_text(found)
    write(text, output)
    return code


@click.command("formula")
@step_options
@parallel_option
def _single(request: Request) -> Request:
    return request


def _other(request: Request, target: str, options: str) -> Request:
    """The step that is compared with: another target with the same options, or other options."""
    words = shlex.split(options)
    if not words:
        return replace(request, model=target)
    with _single.make_context(click.get_current_context().command_path, [*words, target]) as context:
        found: Request = _single.invoke(context)
    return found


def _on_gpu(request: Request, text: str) -> tuple[Request, int]:
    """The request with that GPU's kernels, and what it leaves to tensors in bytes."""
    from memir.api import installed_torch, on_gpu
    from memir.cuda.verdict import room
    from memir.hardware import parse_gpu

    memory = parse_gpu(text)
    request = replace(request, recipe=on_gpu(request.recipe, memory))
    if memory.card is not None:
        memory = room(memory, trains=request.recipe.mode == "train", torch=installed_torch())
    return request, memory.nbytes


def _check_options(
    form: str, standalone: bool, solve: str | None, gpu: str | None, check: str | None, units: str, compares: bool
) -> None:
    if standalone and form != "latex":
        raise UsageError("--standalone is a document for LaTeX", hint="add  --format latex")
    if solve is not None and gpu is None:
        raise UsageError("--solve needs the memory that has to suffice", hint=f"write  --solve {solve} --gpu 80GiB")
    if gpu is not None and solve is None:
        raise UsageError("--gpu is what --solve fits the step into", hint="add  --solve B")
    if check is not None and solve is not None:
        raise UsageError("--check and --solve: one of the two is answered", hint="leave one out")
    if compares and (check is not None or solve is not None):
        raise UsageError("a comparison with OTHER or --versus takes neither --check nor --solve", hint="leave them out")
    if units == "elements" and (solve is not None or check is not None):
        flag = "--solve" if solve is not None else "--check"
        raise UsageError(f"{flag} is in bytes", hint="leave out  --units elements")


def _point(text: str) -> dict[str, int]:
    """`B=4,S=2048` as numbers."""
    found: dict[str, int] = {}
    for word in filter(None, (w.strip() for w in text.split(","))):
        name, equals, value = (part.strip() for part in word.partition("="))
        if not equals or not value.isdigit() or int(value) < 1:
            raise UsageError(f"--check: {word!r} is not SYMBOL=NUMBER", hint="write  --check B=4,S=2048")
        found[name] = int(value)
    return found
