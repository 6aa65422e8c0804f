"""The command line: a group of commands, each imported when it is called, and the one place that turns errors into exit codes.

Exit codes: 0 fine, 1 the answer is no, 2 usage or configuration, 3 inconclusive, 4 internal error; as shells have it, 130 after
Ctrl-C and 141 when the reader of stdout has gone.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import click

from memir import __version__
from memir.errors import EXIT_INTERNAL, EXIT_OK, EXIT_USAGE, MemirError, UsageError

COMMANDS = {
    "analyze": "Peak memory of a training step: number, formula, place, and what is alive there.",
    "cache": "Say what is kept of traced steps, or remove it.",
    "check": "Hold scenarios against their budgets and a baseline.",
    "compare": "Compare the predicted step with a recorded CUDA memory snapshot.",
    "diff": "Say what a change of the model's code does to the peak, and which line is behind it.",
    "export": "Write the predicted step as a CUDA memory snapshot.",
    "formula": "The memory of a model as mathematics over batch, sequence, depth and widths.",
    "gpus": "List the known GPUs: memory as the driver reports it, FLOP/s, bandwidths.",
    "graph": "Print the operators of a training step as PyTorch ran them (torch.fx).",
    "init": "Write a first configuration for memir check.",
    "ir": "Print a training step's memory program.",
    "lint": "Find what in the model's code costs memory without need.",
    "opt": "Run passes on a memory program in text form.",
    "plan": "The fastest distributed method, micro-batch and checkpointing among those that fit some GPUs.",
    "presets": "List the known models and their parameter counts.",
    "freeze": "Every cut of frozen leading layers: memory, operations, speed-up; the best one.",
    "sweep": "Peaks at many batches, lengths and recipes; the largest batch or sequence that fits.",
    "verify": "Run the step for real and compare its peak with the prediction.",
}  # name -> one line for `memir --help`; the command itself is `memir.cli.NAME.command`

EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141


@dataclass(slots=True)
class Settings:
    """What holds for every command. `progress` None: only on a terminal."""

    traceback: bool = False
    progress: bool | None = None


class ReaderGoneError(Exception):
    """Whoever read stdout has closed it (`memir ir gpt2 | head`)."""


class Memir(click.Group):
    """A group whose commands are imported on use, and which alone decides how the process ends."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names of all commands, sorted."""
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of that name, imported now; None if there is none."""
        if cmd_name not in COMMANDS:
            return None
        command = importlib.import_module(f"memir.cli.{cmd_name}").command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list of commands from the table, so that help imports none of them."""
        with formatter.section("Commands"):
            formatter.write_dl(sorted(COMMANDS.items()))

    def invoke(self, ctx: click.Context) -> Any:
        """The command's result. A closed stdout is told apart here: click would make it exit code 1, which means "no"."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:
            raise ReaderGoneError from error

    def main(  # type: ignore[override]  # click declares overloads by standalone_mode; here every way ends the process
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        **extra: Any,
    ) -> NoReturn:
        """Run and exit: a number that a command returns, or gives to `ctx.exit`, is the exit code."""
        extra.pop("standalone_mode", None)
        for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
            if getattr(sys, name) is None:  # the shell closed it: nothing comes from it, and nothing can be written to it
                setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 (open as long as the process)
        gc.set_threshold(50_000, 20, 100)  # importing torch and transformers makes millions of objects, and hardly a cycle
        settings = Settings(traceback=os.environ.get("MEMIR_TRACEBACK", "") not in ("", "0"))
        try:
            result = super().main(args, prog_name or "memir", standalone_mode=False, obj=settings, **extra)
            sys.stdout.flush()
            code = result if isinstance(result, int) else EXIT_OK
        except click.ClickException as error:
            error.show()
            code = EXIT_USAGE
        except MemirError as error:
            code = report_error(error, settings)
        except (click.Abort, KeyboardInterrupt):
            click.echo("interrupted", err=True)
            code = EXIT_INTERRUPTED
        except (ReaderGoneError, BrokenPipeError):
            silence_stdout()
            code = EXIT_BROKEN_PIPE
        except OSError as error:  # a full disk under stdout, say
            code = report_error(UsageError(f"cannot read or write: {error.strerror or error}"), settings)
            silence_stdout()
        except Exception as error:  # the process's boundary: whatever else arrives here is a bug in memir
            code = report_error(error, settings)
        sys.exit(code)


def report_error(error: Exception, settings: Settings) -> int:
    """Print the error for people on stderr; the exit code it asks for."""
    code = error.exit_code if isinstance(error, MemirError) else EXIT_INTERNAL
    if settings.traceback:
        click.echo("".join(traceback.format_exception(error)).rstrip(), err=True)
    click.echo(error.render() if isinstance(error, MemirError) else f"error: {type(error).__name__}: {error}", err=True)
    if code == EXIT_INTERNAL:
        click.echo("  this is a bug in memir, not in your model: please report it", err=True)
        if not settings.traceback:
            click.echo("  with the command and its output under  MEMIR_TRACEBACK=1", err=True)
    return code


def silence_stdout() -> None:
    """Let the interpreter's last flush go nowhere."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):  # stdout is not a file descriptor (a test's buffer): nothing is left to flush
        return


@click.group("memir", cls=Memir, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="memir", message="%(prog)s %(version)s")
@click.option(
    "--traceback", "show_traceback", is_flag=True, help="Show the Python traceback of an error (or MEMIR_TRACEBACK=1)."
)
@click.option(
    "--progress/--no-progress", default=None, help="Say on stderr what takes longer than a second.  [default: on a terminal]"
)
@click.pass_obj
def main(settings: Settings, show_traceback: bool, progress: bool | None) -> None:
    """How much GPU memory a decoder language model's training step takes, and why, without a GPU.

    TARGET is a Python file with a model (model.py, model.py:GPT), package.module:Name, a folder or file with a Hugging Face
    config.json, a preset (memir presets), or a Hugging Face id in the local cache. Weights are never read.

    Exit codes: 0 fine, 1 the answer is no, 2 usage or configuration, 3 inconclusive, 4 internal error.
    """
    settings.traceback |= show_traceback
    settings.progress = progress
