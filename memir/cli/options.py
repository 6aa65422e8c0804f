"""The options that describe a training step, shared by every command that traces one."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TextIO

import click

from memir.cli.progress import Progress
from memir.errors import UsageError
from memir.recipe import CHOICES, Lora, Quantize, Recipe

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True, slots=True)
class Request:
    """What the user asked to be traced. `batch` and `seq` are None where the defaults hold."""

    model: str  # TARGET as it was typed
    recipe: Recipe
    batch: int | None = None
    seq: int | None = None
    sets: dict[str, str] = field(default_factory=dict)  # config field -> value as it was typed
    inputs: str | None = None
    trust_remote_code: bool = False
    cache: bool = True  # whether a step that was traced before may be read (`cache_option`)
    fold: bool = True  # whether layers that repeat are traced once (`cache_option`)
    parallel: str = ""  # passes of distributed methods (memir.cli.parallel)

    def keywords(self) -> dict[str, Any]:
        """The keyword arguments of `memir.trace`; those of `program_of` are `program_keywords`."""
        return {
            "batch": self.batch,
            "seq": self.seq,
            "sets": self.sets,
            "inputs": self.inputs,
            "trust_remote_code": self.trust_remote_code,
        }

    def program_keywords(self) -> dict[str, Any]:
        """The keyword arguments of `memir.api.program_of`."""
        return {**self.keywords(), "cache": self.cache, "fold": self.fold, "parallel": self.parallel}


def _choice(name: str, help_text: str) -> Decorator:
    """An option for a field of Recipe with a fixed set of values; its default is the field's own."""
    flag = "--" + name.replace("_", "-")
    default = getattr(Recipe(), name)
    return click.option(
        flag, f"recipe_{name}", type=click.Choice(CHOICES[name]), default=default, show_default=True, help=help_text
    )


_OPTIONS: tuple[Decorator, ...] = (
    click.option("-b", "--batch", type=int, help="Sequences in a batch, B.  [default: 1]"),
    click.option("-s", "--seq", type=int, help="Tokens in a sequence, S.  [default: 2048, or the model's limit if smaller]"),
    click.option(
        "--set", "sets", multiple=True, metavar="NAME=VALUE", help="Override a field of the model's config; repeatable."
    ),
    click.option(
        "--inputs", metavar="TEXT", help="Name forward()'s token ids (and targets) when guessing fails: ids=idx,targets=y."
    ),
    click.option("--trust-remote-code", is_flag=True, help="Let code from a Hugging Face repository run."),
    _choice("target", "Whose kernels and allocator are followed."),
    _choice("dtype", "Type of parameters and activations."),
    _choice("amp", "torch.autocast around forward and loss; with --dtype f32, usually."),
    _choice(
        "attention",
        "sdpa: the kernel that PyTorch takes; or one kernel of it; flash-attn-2, eager: Hugging Face models with that package, "
        "or with neither.",
    ),
    click.option(
        "--optimizer",
        "recipe_optimizer",
        metavar="NAME",
        default="adamw",
        show_default=True,
        help="A torch.optim class, bitsandbytes' (adamw-8bit, paged-adamw-8bit, lion), Hugging Face's word for one, or none.",
    ),
    _choice("optimizer_impl", "Implementation of the optimizer; default is what PyTorch picks."),
    click.option(
        "--clip", "recipe_clip", type=float, metavar="NORM", help="Clip the gradient norm.  [default: 1 in trainer, else none]"
    ),
    click.option(
        "--accumulate", "recipe_accumulate", type=int, metavar="N", default=1, show_default=True, help="Micro-batches a step."
    ),
    _choice("checkpoint", "Activation checkpointing: full is around every layer."),
    _choice("loss", "The model's own; Liger's fused linear cross entropy (fp32: it accumulates so); torchtune's in 8 chunks."),
    click.option("--lora", metavar="SPEC", help="Train low-rank adapters: r=16,alpha=32,targets=q_proj,v_proj."),
    click.option(
        "--quantize",
        metavar="SPEC",
        help="Base weights in few bits: nf4, fp4 (,double ,keep ,trl), int8, gptq,bits=4,group=128.",
    ),
    click.option(
        "--dropout", type=click.Choice(("on", "off")), default="on", show_default=True, help="Off sets every dropout to 0."
    ),
    _choice("mode", "A training step, or one forward pass without gradients."),
    _choice("loop", "plain: a loop written by hand; trainer: the step as Hugging Face's Trainer runs it."),
    click.option(
        "--keep-outputs", "recipe_keep_outputs", is_flag=True, help="The loop's variable holds the outputs during backward."
    ),
    click.option(
        "--function",
        "recipe_function",
        is_flag=True,
        help="With --keep-outputs: the step is a function, at whose end they die.",
    ),
    _choice("zero_grad", "Gradients are freed before forward, or after the optimizer step."),
    _choice("batch_kind", "A batch without padding, or one with an attention mask."),
)


def step_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """TARGET and the options of a step; the command gets them as one argument, `request`."""
    return click.argument("model", metavar="TARGET")(recipe_options(command))


def recipe_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """`step_options` without the argument TARGET; a command that has none of the kind gets a request for ""."""

    @functools.wraps(command)
    def wrapper(
        *,
        model: str | None = None,
        batch: int | None,
        seq: int | None,
        sets: tuple[str, ...],
        inputs: str | None,
        trust_remote_code: bool,
        lora: str | None,
        quantize: str | None,
        dropout: str,
        cache: bool = True,
        fold: bool = True,
        **others: Any,
    ) -> Any:
        names = [f"recipe_{f.name}" for f in fields(Recipe) if f"recipe_{f.name}" in others]
        recipe = Recipe(
            lora=None if lora in (None, "none") else Lora.parse(str(lora)),
            quantize=None if quantize in (None, "none") else Quantize.parse(str(quantize)),
            dropout=dropout == "on",
            **{name.removeprefix("recipe_"): others.pop(name) for name in names},
        )
        request = Request(model or "", recipe, batch, seq, parse_sets(sets), inputs, trust_remote_code, cache, fold)
        return command(request=request, **others)

    for option in reversed(_OPTIONS):
        option(wrapper)
    return wrapper


def parse_sets(words: tuple[str, ...]) -> dict[str, str]:
    """`n_layer=24` words as a dictionary; UsageError for a word without `=` or a name given twice."""
    found: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        name = name.strip()
        if not equals or not name:
            raise UsageError(f"--set: {word!r} is not NAME=VALUE", hint="write  --set n_layer=24")
        if name in found:
            raise UsageError(f"--set: {name} is given twice")
        found[name] = value.strip()
    return found


def output_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """`-o FILE`, given to the command as `output` (None: stdout)."""
    option = click.option(
        "-o", "--output", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Write there, not to stdout."
    )
    return option(command)


def also_option(formats: Sequence[str]) -> Decorator:
    """`--also FORMAT=FILE`, repeatable: the same result in further formats, given to the command as `also`."""

    def read(ctx: click.Context, param: click.Parameter, words: tuple[str, ...]) -> list[tuple[str, Path]]:
        found = []
        for word in words:
            form, equals, name = word.partition("=")
            if not equals or not name or form not in formats:
                raise UsageError(f"--also: {word!r} is not FORMAT=FILE", hint=f"formats: {', '.join(formats)}")
            found.append((form, Path(name)))
        return found

    text = "Write it in this format, too; repeatable."
    return click.option("--also", multiple=True, metavar="FORMAT=FILE", callback=read, help=text)


def listing_options(json_adds: str) -> Decorator:
    """WORD, `--format text|json` and `-o`, for commands that list what memir knows: `word`, `form` and `output`."""

    def options(command: Callable[..., Any]) -> Callable[..., Any]:
        form = click.option(
            "--format", "form", type=click.Choice(("text", "json")), default="text", show_default=True, help=json_adds
        )
        return click.argument("word", default="")(form(output_option(command)))

    return options


def gpu_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """`--gpu`, below `step_options`: the request's recipe takes the kernels of that card."""

    @functools.wraps(command)
    def wrapper(*, request: Request, gpu: str | None, **others: Any) -> Any:
        if gpu is not None:
            from memir.api import on_gpu
            from memir.hardware import parse_gpu

            request = replace(request, recipe=on_gpu(request.recipe, parse_gpu(gpu)))
        return command(request=request, **others)

    return click.option("--gpu", metavar="NAME", help="Take the kernels of that GPU: h100 (see memir gpus).")(wrapper)


def cache_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """`--no-cache` and `--no-fold`, for commands that need a program and no graph; below `step_options`, which puts them
    into the request."""
    text = "Trace anew, and keep nothing (see memir cache)."
    command = click.option("--no-cache", "cache", is_flag=True, default=True, flag_value=False, help=text)(command)
    text = "Trace every layer, also those that repeat; implies --no-cache."
    return click.option("--no-fold", "fold", is_flag=True, default=True, flag_value=False, help=text)(command)


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """A function that is told each stage of the work: on stderr, for what takes longer than a second (`--progress`).

    Within, warnings of the cache are lines on stderr.
    """
    settings = click.get_current_context().obj
    with Progress(sys.stderr, settings.progress if settings is not None else None) as line, _cache_warnings():
        yield line.stage


@contextmanager
def _cache_warnings() -> Iterator[None]:
    from memir.cache import CacheWarning

    with warnings.catch_warnings():
        others = warnings.showwarning

        def show(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            if issubclass(category, CacheWarning):
                click.echo(f"warning: {message}", err=True)
            else:
                others(message, category, filename, lineno, file, line)

        warnings.simplefilter("always", CacheWarning)
        warnings.showwarning = show
        yield


def write(text: str, output: Path | None) -> None:
    """The command's result, to stdout or to a file; UsageError when the file cannot be written."""
    text = text if text.endswith("\n") else text + "\n"
    if output is None:
        click.echo(text, nl=False)
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {output}: {error.strerror}") from None
