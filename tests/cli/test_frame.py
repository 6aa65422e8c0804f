"""The group itself: help without heavy imports, one exit code for each way a command can end, progress on stderr only."""

from __future__ import annotations

import importlib
import io
import os
import subprocess
import sys
import time
import types
from collections.abc import Callable
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from memir import __version__, cli
from memir.cli.options import Request, output_option, step_options, write
from memir.cli.progress import Progress
from memir.errors import InconclusiveError, MemirError, UsageError, VerifyError
from memir.recipe import CHOICES, Lora, Quantize, Recipe

HELP = """\
Usage: memir [OPTIONS] COMMAND [ARGS]...

  How much GPU memory a decoder language model's training step takes, and why,
  without a GPU.

  TARGET is a Python file with a model (model.py, model.py:GPT),
  package.module:Name, a folder or file with a Hugging Face config.json, a
  preset (memir presets), or a Hugging Face id in the local cache. Weights are
  never read.

  Exit codes: 0 fine, 1 the answer is no, 2 usage or configuration, 3
  inconclusive, 4 internal error.

Options:
  --version                   Show the version and exit.
  --traceback                 Show the Python traceback of an error (or
                              MEMIR_TRACEBACK=1).
  --progress / --no-progress  Say on stderr what takes longer than a second.
                              [default: on a terminal]
  -h, --help                  Show this message and exit.

Commands:
  analyze  Peak memory of a training step: number, formula, place, and what is
           alive there.
  cache    Say what is kept of traced steps, or remove it.
  check    Hold scenarios against their budgets and a baseline.
  compare  Compare the predicted step with a recorded CUDA memory snapshot.
  diff     Say what a change of the model's code does to the peak, and which
           line is behind it.
  export   Write the predicted step as a CUDA memory snapshot.
  formula  The memory of a model as mathematics over batch, sequence, depth and
           widths.
  freeze   Every cut of frozen leading layers: memory, operations, speed-up; the
           best one.
  gpus     List the known GPUs: memory as the driver reports it, FLOP/s,
           bandwidths.
  graph    Print the operators of a training step as PyTorch ran them
           (torch.fx).
  init     Write a first configuration for memir check.
  ir       Print a training step's memory program.
  lint     Find what in the model's code costs memory without need.
  opt      Run passes on a memory program in text form.
  plan     The fastest distributed method, micro-batch and checkpointing among
           those that fit some GPUs.
  presets  List the known models and their parameter counts.
  sweep    Peaks at many batches, lengths and recipes; the largest batch or
           sequence that fits.
  verify   Run the step for real and compare its peak with the prediction.
"""
BUG = "  this is a bug in memir, not in your model: please report it\n"
HOW = "  with the command and its output under  MEMIR_TRACEBACK=1\n"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.main, arguments)


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Run a command `ends` that does what is given; its result."""

    def invoke(body: Callable[[], Any], *options: str) -> Result:
        module = types.ModuleType("memir.cli.ends")
        module.command = click.command("ends")(lambda: body())  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "memir.cli.ends", module)
        monkeypatch.setitem(cli.COMMANDS, "ends", "Ends.")
        return run(*options, "ends")

    return invoke


def fails(error: BaseException) -> Callable[[], None]:
    def body() -> None:
        click.echo("a result")
        raise error

    return body


def test_help_is_this_text() -> None:
    result = run("--help")
    assert (result.exit_code, result.output) == (0, HELP)


def test_version() -> None:
    assert run("--version").output == f"memir {__version__}\n"


@pytest.mark.parametrize("code", ["import memir", "from memir.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass"])
def test_help_and_import_load_neither_torch_nor_sympy(code: str) -> None:
    code += (
        "\nimport sys; print('loaded:', sorted({m.split('.')[0] for m in sys.modules} & {'torch', 'sympy', 'transformers'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "loaded: []"


@pytest.mark.parametrize("name", sorted(cli.COMMANDS))
def test_every_command_has_help_and_imports_nothing_heavy(name: str) -> None:
    code = (
        f"import sys\nfrom memir.cli import main\ntry: main([{name!r}, '--help'])\nexcept SystemExit as e: assert e.code == 0\n"
        "print('loaded:', sorted({m.split('.')[0] for m in sys.modules} & {'torch', 'sympy', 'transformers'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"Usage: memir {name} ")
    assert done.stdout.splitlines()[-1] == "loaded: []"


@pytest.mark.parametrize("name", sorted(cli.COMMANDS))
def test_module_name_of_a_command_is_its_own_name(name: str) -> None:
    assert importlib.import_module(f"memir.cli.{name}").command.name == name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nonsense"], "No such command 'nonsense'"),
        (["--nonsense"], "No such option"),
        (["analyze"], "Missing argument 'TARGET'"),
        (["analyze", "gpt2", "--dtype", "int3"], "'int3' is not one of 'bf16', 'f16', 'f32'"),
        (["analyze", "gpt2", "-b", "many"], "'many' is not a valid integer"),
    ],
)
def test_usage_errors_exit_2_on_stderr(arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
    assert result.stderr.startswith("Usage: memir ")


def test_no_command_shows_help_and_exits_2() -> None:
    result = run()
    assert result.exit_code == 2
    assert "Commands:" in result.stderr


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (lambda: None, 0),
        (lambda: 1, 1),
        (lambda: click.get_current_context().exit(3), 3),
        (lambda: sys.exit(1), 1),
    ],
)
def test_a_command_chooses_its_exit_code(ends: Callable[..., Result], body: Callable[[], Any], code: int) -> None:
    result = ends(body)
    assert (result.exit_code, result.output) == (code, "")


@pytest.mark.parametrize(
    ("error", "code", "stderr"),
    [
        (UsageError("no such file: x", where="x", hint="look again"), 2, "error: no such file: x\n  x\n  look again\n"),
        (InconclusiveError("an operator"), 3, "error: an operator\n"),
        (VerifyError("freed twice"), 4, f"error: freed twice\n{BUG}{HOW}"),
        (MemirError("odd"), 4, f"error: odd\n{BUG}{HOW}"),
        (TypeError("bad operand"), 4, f"error: TypeError: bad operand\n{BUG}{HOW}"),
        (KeyboardInterrupt(), 130, "\ninterrupted\n"),
        (BrokenPipeError(32, "Broken pipe"), 141, ""),
    ],
)
def test_every_error_has_its_exit_code_and_no_traceback(
    ends: Callable[..., Result], error: BaseException, code: int, stderr: str
) -> None:
    result = ends(fails(error))
    assert (result.exit_code, result.stdout, result.stderr) == (code, "a result\n", stderr)


@pytest.mark.parametrize("error", [TypeError("bad operand"), UsageError("bad operand")])
@pytest.mark.parametrize("by", ["option", "environment"])
def test_traceback_is_shown_when_asked_for(
    ends: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, error: Exception, by: str
) -> None:
    if by == "environment":
        monkeypatch.setenv("MEMIR_TRACEBACK", "1")
    result = ends(fails(error), *(["--traceback"] if by == "option" else []))
    assert result.stderr.startswith("Traceback (most recent call last):")
    assert "error: " in result.stderr
    assert HOW not in result.stderr


@pytest.mark.skipif(os.name == "nt", reason="a closed pipe is another error there")
def test_reader_of_stdout_may_leave() -> None:
    writes = "import click\nfrom memir import cli\nimport sys, types\nm = types.ModuleType('memir.cli.spam')\n"
    writes += "m.command = click.command('spam')(lambda: [click.echo('x' * 1000) for _ in range(1000)] and None)\n"
    writes += "sys.modules['memir.cli.spam'] = m; cli.COMMANDS['spam'] = ''; cli.main(['spam'])"
    process = subprocess.Popen([sys.executable, "-c", writes], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(10)
    process.stdout.close()
    stderr = process.stderr.read()
    process.stderr.close()
    assert (process.wait(), stderr) == (141, b"")


def request_of(*arguments: str) -> Request:
    @click.command()
    @step_options
    def command(request: Request) -> Request:
        return request

    found = command.main(list(arguments), standalone_mode=False)
    assert isinstance(found, Request)
    return found


def test_options_default_to_the_recipe() -> None:
    assert request_of("gpt2") == Request("gpt2", Recipe())


def test_every_option_reaches_the_request() -> None:
    arguments = (
        "model.py:GPT -b 4 -s 128 --set n_layer=24 --set name=a=b --inputs ids=x --trust-remote-code --target cpu --dtype f32"
    )
    arguments += " --attention eager --optimizer SGD --optimizer-impl fused --clip 1.5 --accumulate 2 --checkpoint full"
    arguments += " --lora r=8,targets=q,v --dropout off --mode forward --keep-outputs --zero-grad first --batch-kind padded"
    arguments += " --amp bf16 --quantize nf4,double --function"
    recipe = Recipe(
        target="cpu",
        dtype="f32",
        amp="bf16",
        attention="eager",
        optimizer="SGD",
        optimizer_impl="fused",
        clip=1.5,
        accumulate=2,
        checkpoint="full",
        lora=Lora(8, targets=("q", "v")),
        quantize=Quantize(double=True),
        dropout=False,
        mode="forward",
        keep_outputs=True,
        function=True,
        zero_grad="first",
        batch_kind="padded",
    )
    assert request_of(*arguments.split()) == Request(
        "model.py:GPT", recipe, 4, 128, {"n_layer": "24", "name": "a=b"}, "ids=x", True
    )


@pytest.mark.parametrize("field", sorted(CHOICES))
def test_every_choice_of_a_recipe_is_an_option(field: str) -> None:
    for value in CHOICES[field]:
        assert getattr(request_of("gpt2", f"--{field.replace('_', '-')}", value).recipe, field) == value


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "n_layer"], "--set: 'n_layer' is not NAME=VALUE"),
        (["--set", "=3"], "--set: '=3' is not NAME=VALUE"),
        (["--set", "a=1", "--set", "a=2"], "--set: a is given twice"),
        (["--lora", "q_proj"], "--lora: 'q_proj' has no name"),
        (["--lora", "rank=3"], "--lora: unknown option 'rank'"),
        (["--accumulate", "0"], "accumulate: 0 is not a positive number"),
        (["--clip", "-1"], "clip: -1 is negative"),
    ],
)
def test_bad_options_are_usage_errors(arguments: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        request_of("gpt2", *arguments)


def test_output_goes_to_a_file_and_always_ends_its_line(tmp_path: Any) -> None:
    @click.command()
    @output_option
    def command(output: Any) -> None:
        write("text", output)

    assert CliRunner().invoke(command, []).stdout == "text\n"
    assert CliRunner().invoke(command, ["-o", str(tmp_path / "a.txt")]).stdout == ""
    assert (tmp_path / "a.txt").read_text() == "text\n"
    with pytest.raises(UsageError, match=r"cannot write .*: No such file"):
        command.main(["-o", str(tmp_path / "none" / "a.txt")], standalone_mode=False)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(stream: io.StringIO, enabled: bool | None, monkeypatch: pytest.MonkeyPatch, patience: float = 0.0) -> str:
    monkeypatch.setattr("memir.cli.progress.PATIENCE", patience)
    with Progress(stream, enabled) as progress:
        progress.stage("tracing gpt2")
        deadline = time.monotonic() + 5
        while patience == 0 and enabled is not False and not stream.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)
    return stream.getvalue()


def test_progress_redraws_one_line_on_a_terminal_and_removes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(Terminal(), None, monkeypatch)
    assert text.startswith("\r\x1b[K| tracing gpt2 (0 s)")
    assert text.endswith("\r\x1b[K")


def test_progress_is_one_line_a_stage_elsewhere_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(io.StringIO(), True, monkeypatch) == "tracing gpt2 ...\n"


def test_progress_says_nothing_when_switched_off_or_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(Terminal(), False, monkeypatch) == ""
    assert shown(Terminal(), None, monkeypatch, patience=60) == ""
