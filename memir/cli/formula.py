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
@click.option("--freeze", metavar="K|c", help="Freeze K leading layers; c: for every cut, the cut as a symbol.")
@click.option("--format", "form", type=click.Choice(FORMATS), default="text", show_default=True)
@click.option("--units", type=click.Choice(("bytes", "elements")), default="bytes", show_default=True)
@click.option("--standalone", is_flag=True, help="With --format latex: a whole document.")
@click.option("--check", metavar="LIST", help="The formula beside a fresh concrete analysis: B=4,S=2048, widths too.")
@click.option("--solve", metavar="SYMBOL", help="The largest B, S, L, h, ... that fits --gpu; the smallest cut c or degree.")
@click.option("--gpu", metavar="NAME|MEMORY", help="With --solve: what has to fit: h100, 80GiB (see memir gpus).")
@click.option("--versus", metavar="OPTIONS", help="Compare with the same under these options: '--attention eager'.")
@click.option("--seed", type=int, default=0, show_default=True, help="Chooses the random widths of the verification.")
@output_option
def command(
    request: Request,
    other: str | None,
    symbols: str | None,
    quantities: str,
    freeze: str | None,
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
    With --freeze c the first c layers are frozen, and each range of c has a formula; --solve c: the smallest that fits.
    With OTHER: the difference of two models, or of one with and without --lora and the like (see docs/formulas.md).

    Exit code 1: with --check, the formula and the analysis differ; with --solve, nothing fits.
    """
    from memir.api import wide_step
    from memir.derivation.bounds import CUT
    from memir.derivation.cuts import by_cut, in_cases
    from memir.derivation.derive import Derivation
    from memir.derivation.step import Shown, shown
    from memir.derivation.write_code import to_python, to_sympy_text
    from memir.derivation.write_latex import to_latex, to_markdown
    from memir.derivation.write_text import to_text

    compares = other is not None or versus is not None
    _check_options(form, standalone, solve, gpu, check, units, compares=compares)
    solve = CUT if solve == "cut" else solve
    cut = _cut(freeze, solve, compares=compares, parallel=request.parallel)
    wanted = None if symbols is None else tuple(dict.fromkeys(word.strip() for word in symbols.split(",") if word.strip()))
    names = tuple(dict.fromkeys(word.strip() for word in quantities.split(",") if word.strip()))
    point = None if check is None else _point(check)
    budget = None
    if gpu is not None:
        request, budget = _on_gpu(request, gpu)
    with progress() as stage:

        def over_widths(asked: Request, cut: int | str) -> list[Shown]:
            """The step over its symbols: one, or one for each range of the cut."""
            step = wide_step(
                asked.model,
                asked.recipe,
                **asked.keywords(),
                parallel=asked.parallel,
                freeze=0 if isinstance(cut, str) else cut,
                symbols=wanted,
                seed=seed,
                progress=stage,
            )
            if isinstance(cut, str):
                stage("rewriting the step for every cut")
            return [shown(one, wanted) for one in (by_cut(step) if isinstance(cut, str) else (step,))]

        over = over_widths(request, cut)
        stage("deriving")
        at_widths = (set(point or ()) | {solve or "B"}) - {"B", "S"} != set()
        everywhere = form in ("python", "sympy") or at_widths
        derivations = [Derivation(one, everywhere=everywhere, elements=units == "elements") for one in over]
        found = [quantity for name in names for quantity in in_cases(derivations, name)]
        first = over[0]
        if compares:
            from memir.derivation.difference import to_difference

            (second,) = over_widths(*_other(request, cut, other or request.model, versus or ""))
            text, code = to_difference(derivations[0], Derivation(second, elements=units == "elements"), names, units), EXIT_OK
        elif point is not None:
            from memir.cli.formula_check import checked

            text, code = checked(request, cut, over, found, point, stage)
        elif solve is not None:
            from memir.derivation.solve import to_solution
            from memir.derivation.solve_cut import to_smallest_cut
            from memir.derivation.solve_degree import to_smallest_degree

            if solve in {symbol for symbol, _, _ in first.step.degrees}:
                text, fits = to_smallest_degree(found[0], solve, budget or 0, str(gpu))
            elif solve == CUT:
                text, fits = to_smallest_cut([q for q in found if q.name == names[0]], budget or 0, str(gpu))
            else:
                text, fits = to_solution(first, found[0], solve, budget or 0, str(gpu))
            code = EXIT_OK if fits else EXIT_NO
        else:
            code = EXIT_OK
            if form == "text":
                text = to_text(first, found, units)
            elif form == "latex":
                text = to_latex(first, found, units, standalone)
            elif form == "markdown":
                text = to_markdown(first, found, units)
            else:
                text = to_python(first, found, units) if form == "python" else to_sympy_text(found)
    write(text, output)
    return code


@click.command("formula")
@step_options
@parallel_option
@click.option("--freeze", type=click.IntRange(min=0), default=0)
def _single(request: Request, freeze: int) -> tuple[Request, int]:
    return request, freeze


def _other(request: Request, cut: int | str, target: str, options: str) -> tuple[Request, int | str]:
    """The step that is compared with: another target with the same options, or other options."""
    words = shlex.split(options)
    if not words:
        return replace(request, model=target), cut
    with _single.make_context(click.get_current_context().command_path, [*words, target]) as context:
        found: tuple[Request, int] = _single.invoke(context)
    return found


def _cut(freeze: str | None, solve: str | None, *, compares: bool, parallel: str) -> int | str:
    """The number of frozen layers, or their symbol."""
    from memir.derivation.bounds import CUT

    if solve == CUT and freeze is None:
        freeze = CUT
    if freeze is None:
        return 0
    if freeze.isdigit():
        if solve == CUT:
            raise UsageError(f"--solve {CUT}: the cut is {freeze} already", hint=f"leave out  --freeze {freeze}")
        return int(freeze)
    if freeze not in (CUT, "cut"):
        raise UsageError(
            f"--freeze: {freeze!r} is neither a number of layers nor {CUT}", hint=f"--freeze 8  or  --freeze {CUT}"
        )
    if compares:
        raise UsageError("a comparison is of one cut", hint="give the number of frozen layers:  --freeze 8")
    if solve is not None and solve != CUT:
        raise UsageError(f"--solve {solve} is for one cut", hint=f"--freeze 8 --solve {solve}  or  --solve {CUT}")
    if parallel:
        message = "the cut as a symbol is of one GPU's step, not of one rank's"
        raise UsageError(f"--freeze {CUT}: {message}", hint="give the number of frozen layers:  --freeze 8")
    return CUT


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
        if not equals or not value.isdigit() or (int(value) < 1 and name != "c"):
            raise UsageError(f"--check: {word!r} is not SYMBOL=NUMBER", hint="write  --check B=4,S=2048")
        found[name] = int(value)
    return found
