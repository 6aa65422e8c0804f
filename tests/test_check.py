"""memir check: the configuration and its errors, budgets, the baseline, the order of everything. Nothing is traced here."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from memir.check.baseline import Baseline, entry, to_text
from memir.check.baseline import read as read_baseline
from memir.check.config import load
from memir.check.facts import Facts, saved_per_layer
from memir.check.init import configuration
from memir.check.judge import GREW, OK, OVER, UNKNOWN, judge
from memir.cli import main
from memir.diff.orders import leading
from memir.diff.side import Side
from memir.errors import InconclusiveError, MemirError, ParseError, UsageError
from memir.ir.parser import parse
from memir.ir.sizetext import parse_size
from memir.workers import Call
from tests.programs import STEP
from tests.sarif import results

GIB = 2**30


def facts(here: str = "400*B*S + 1000", **changes: Any) -> Facts:
    """A step of that peak at B=4, S=64."""
    size = parse_size(here)
    nbytes = size.evaluate({"B": 4, "S": 64})
    plain = Facts(
        name="GPT",
        point=(("B", 4), ("S", 64)),
        requested=nbytes,
        allocated=-(-nbytes // 512) * 512,
        formula=here,
        here=here,
        orders=leading([size]),
        phase="backward",
        op="aten.mm",
        module="head",
        source="model.py:3",
        saved_per_layer=4096,
        saved_in="layers.1",
        fits="",
        needed=(0, 0),
        inconclusive=(),
        versions=(("memir", "1"), ("torch", "2.13.0")),
    )
    return dataclasses.replace(plain, **changes)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text("x = 1\ny = 2\nz = 3\n")
    return tmp_path


def write(text: str, name: str = "memir.toml") -> Path:
    Path(name).write_text(text, encoding="utf-8")
    return Path(name)


def scenario(text: str) -> Any:
    write(f'[scenarios.a]\ntarget = "model.py"\n{text}\n')
    (found,) = load(Path("memir.toml"), "memir.toml").scenarios
    return found


FULL = """\
[tool.memir]
baseline = "base.json"

[tool.memir.defaults]
dtype = "f32"
optimizer = "sgd"

[tool.memir.scenarios.small]
target = "model.py:GPT"
batch = 4
seq = 128
set = { n_layer = 4, bias = false }
lora = "r=8,targets=q_proj"
optimizer-impl = "foreach"
dropout = false
gpu = "a100-80gb"
max = "1.5GiB"
max_increase = "0.5%"
max_order = "B*S + S**2"
fits = "a100-80gb"
max_saved_per_layer = "200 MiB"

[tool.memir.scenarios.cpu]
target = "model.py"
device = "cpu"
max_increase = "64MiB"
"""


def test_every_key_is_read(folder: Path) -> None:
    config = load(write(FULL, "pyproject.toml"), "pyproject.toml")
    cpu, small = config.scenarios
    assert (config.baseline, cpu.name, cpu.recipe.target, cpu.recipe.dtype) == (folder / "base.json", "cpu", "cpu", "f32")
    assert cpu.budgets.max_increase.allowed(1) == 64 * 2**20
    assert (small.target, small.batch, small.seq, small.line) == ("model.py:GPT", 4, 128, 8)
    assert small.sets == {"n_layer": "4", "bias": "false"}
    assert (small.recipe.optimizer, small.recipe.optimizer_impl, small.recipe.dropout) == ("sgd", "foreach", False)
    assert str(small.recipe.lora) == "r=8,alpha=32,targets=q_proj"
    assert small.recipe.gpu == "8.0"
    assert small.budgets.max == 3 * GIB // 2
    assert small.budgets.max_increase.allowed(1000) == 5
    assert small.budgets.max_saved_per_layer == 200 * 2**20


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("btach = 4", "unknown key 'btach'"),
        ("batch = 0", "batch is a positive number, not 0"),
        ("batch = true", "batch is a positive number"),
        ('seq = "many"', "seq is a positive number, not 'many'"),
        ('max = "76GB"', "max: '76GB' has an unknown unit"),
        ('max = "76"', "max: '76' has no unit"),
        ('max = "lots"', "max: 'lots' is no amount of memory"),
        ("max = -1", "max: -1 is negative"),
        ('max_increase = "-1%"', "max_increase: '-1%' is no amount of memory"),
        ('max_order = "B*"', "max_order:"),
        ('max_order = "B*T"', "max_order: T: only B and S are known there"),
        ('fits = "a100-81gb"', "fits: 'a100-81gb'"),
        ('dtype = "f8"', "dtype: 'f8' is none of"),
        ('device = "tpu"', "device: 'tpu' is none of"),
        ('lora = "r=x"', "lora: not a number"),
        ("accumulate = 1.5", "accumulate is a whole number, not 1.5"),
        ("set = 3", "set is a table, not 3"),
        ("skip = 1", "skip is a text, not 1"),
    ],
)
def test_a_mistake_is_told_with_file_and_line(folder: Path, line: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        scenario(f"# a comment\n{line}")
    assert caught.value.message.startswith(message)
    assert caught.value.where.splitlines()[0] == "memir.toml:4"
    assert caught.value.where.splitlines()[1] == line


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ('max = "90GiB"\nfits = "a100-80gb"', "max is more than all of a100-80gb"),
        ('gpu = "h100"\nfits = "a100-80gb"', "gpu is h100 and fits is a100-80gb"),
        ('mode = "forward"\nmax_saved_per_layer = "1MiB"', "nothing is saved for backward"),
        ('device = "cpu"\ngpu = "h100"', "gpu h100: the target is cpu"),
    ],
)
def test_budgets_that_contradict_each_other(folder: Path, lines: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        scenario(lines)
    assert caught.value.message.startswith(message)
    assert caught.value.where.startswith("memir.toml:")


def test_files_that_cannot_be_meant(folder: Path) -> None:
    with pytest.raises(ParseError) as caught:
        load(write("[scenarios.a\n"), "memir.toml")
    assert caught.value.line == 1
    with pytest.raises(UsageError, match="the scenario a has no target"):
        load(write("[scenarios.a]\nbatch = 1\n"), "memir.toml")
    with pytest.raises(UsageError, match=r"has no \[tool.memir\]"):
        load(write("[project]\n", "pyproject.toml"), "pyproject.toml")
    with pytest.raises(UsageError, match="unknown key 'scenario'"):
        load(write('[scenario.a]\ntarget = "x"\n'), "memir.toml")


@pytest.mark.parametrize(
    ("budget", "changes", "status", "words"),
    [
        ('max = "101KiB"', {}, OK, ""),
        ('max = "100KiB"', {}, OVER, "over max = 0.10 MiB"),
        ('max_order = "B*S"', {}, OK, ""),
        ('max_order = "S"', {}, OVER, "the peak has a B*S term, beyond max_order = S"),
        ('max_order = "B*S"', {"here": "2*B*S^2 + 5"}, OVER, "the peak has a B*S**2 term"),
        ("max_saved_per_layer = 4096", {}, OK, ""),
        ("max_saved_per_layer = 4095", {}, OVER, "layers.1 keeps"),
        ('fits = "t4"', {"fits": "fits"}, OK, ""),
        (
            'fits = "t4"',
            {"fits": "does not fit", "needed": (20 * GIB, 21 * GIB)},
            OVER,
            "does not fit t4: 20.00 to 21.00",
        ),
        ('fits = "t4"', {"fits": "tight", "needed": (GIB, GIB)}, UNKNOWN, "is not certain"),
        ("", {"inconclusive": ("no rule",)}, UNKNOWN, "no rule"),
    ],
)
def test_each_budget(folder: Path, budget: str, changes: dict[str, Any], status: str, words: str) -> None:
    found = judge(scenario(budget), facts(**changes), None)
    assert found.status == status
    assert words in " ".join(reason.text for reason in found.reasons)


@pytest.mark.parametrize(
    ("budget", "here", "status", "words"),
    [
        ("", "400*B*S + 1000", OK, ""),
        ("", "400*B*S + 1001", GREW, "the peak grew: 0.10 MiB -> 0.10 MiB, +1 bytes"),
        ('max_increase = "1%"', "400*B*S + 2034", OK, ""),
        ('max_increase = "1%"', "400*B*S + 2035", GREW, "more than max_increase = 1%"),
        ('max_increase = "1KiB"', "400*B*S + 2024", OK, ""),
        ('max_increase = "50%"', "400*B*S + S^2", GREW, "the peak gained a S**2 term"),
        ("", "399*B*S + 1000", OK, ""),
        ("batch = 5", "400*B*S + 1000", UNKNOWN, "its batch changed since the baseline was written"),
    ],
)
def test_against_the_baseline(folder: Path, budget: str, here: str, status: str, words: str) -> None:
    baseline = Baseline({"a": entry(scenario(""), facts())}, {})
    found = judge(scenario(budget), facts(here), baseline)
    assert found.status == status
    assert words in " ".join(reason.text for reason in found.reasons)


def test_the_baseline_reads_back_and_is_the_same_every_time(folder: Path) -> None:
    entries = {"b": entry(scenario(""), facts()), "a": entry(scenario(""), facts("3*B*S^2 + 5"))}
    baseline = Baseline(entries, {"torch": "2.13.0"})
    text = to_text(baseline)
    assert text == to_text(Baseline(dict(reversed(baseline.entries.items())), {"torch": "2.13.0"}))
    assert str(folder) not in text
    assert read_baseline(write(text, "base.json"), "base.json") == baseline
    assert read_baseline(Path("none.json"), "none.json") is None
    for broken in ("", "{}", '{"schema_version": 9}', '{"schema_version": 1, "scenarios": [], "versions": {}}'):
        with pytest.raises(UsageError):
            read_baseline(write(broken, "base.json"), "base.json")


def test_what_a_layer_keeps_is_counted_at_the_end_of_forward() -> None:
    assert saved_per_layer(Side("a", parse(STEP), {"B": 2, "S": 8})) == (64 * 16, "layers.0")


ANSWERS = {
    "ok.py": facts(),
    "big.py": facts("4000*B*S + 2*B*S^2"),
    "broken.py": InconclusiveError("cannot be followed", where="broken.py:3"),
    "missing.py": UsageError("missing.py: no such file"),
    "bug.py": MemirError("a bug"),
}
CONFIG = """\
[scenarios.big]
target = "big.py"
max = "100KiB"
max_order = "B*S"

[scenarios.ok]
target = "ok.py"

[scenarios.left-out]
target = "ok.py"
skip = "needs a GPU we do not have"

[scenarios.broken]
target = "broken.py"

[scenarios.missing]
target = "missing.py"
"""


@pytest.fixture
def answered(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every target has its answer above, without a process."""

    def run(calls: Sequence[Call], done: Any = None, limit: Any = None) -> list[Any]:
        return [ANSWERS[call.arguments["target"]] for call in calls]

    monkeypatch.setattr("memir.check.run.run", run)
    write(CONFIG)
    return folder


def check(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["check", *arguments])


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("ok",), 0),
        (("big",), 1),
        (("broken",), 3),
        (("missing",), 3),
        (("left-out",), 3),
        ((), 1),
        (("ok", "left-out"), 3),
        (("--exit-zero",), 0),
        (("broken", "--allow-inconclusive"), 0),
        (("big", "broken", "--allow-inconclusive"), 1),
        (("none",), 2),
    ],
)
def test_exit_codes(answered: Path, arguments: tuple[str, ...], code: int) -> None:
    assert check(*arguments).exit_code == code


def test_a_bug_is_exit_code_4(answered: Path) -> None:
    write('[scenarios.bug]\ntarget = "bug.py"\n')
    assert check().exit_code == 4


def test_a_skipped_scenario_is_said_loudly_in_every_format(answered: Path) -> None:
    for form in ("text", "json", "markdown", "github", "sarif"):
        result = check("left-out", "--format", form)
        assert result.exit_code == 3
        assert "needs a GPU we do not have" in result.stdout
        assert "warning: left-out was not checked" in result.stderr
    assert "SKIPPED  left-out" in check().stdout


def test_nothing_to_check_is_no_pass(folder: Path) -> None:
    write("")
    result = check()
    assert (result.exit_code, result.stdout) == (3, "no scenarios: nothing was checked\n")
    Path("memir.toml").unlink()
    (folder / ".git").mkdir()
    assert check().exit_code == 2
    assert "memir init" in check().stderr


def test_the_order_of_names_does_not_matter(answered: Path) -> None:
    for form in ("text", "json", "markdown", "github", "sarif"):
        one, two = check("big", "ok", "broken", "--format", form), check("broken", "big", "ok", "--format", form)
        assert one.stdout == two.stdout


def test_a_baseline_is_written_and_held(answered: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = check("--update-baseline")
    assert (first.exit_code, "memir-baseline.json: 2 scenarios" in first.stderr) == (1, True)
    text = Path("memir-baseline.json").read_text()
    check("--update-baseline", "ok")
    assert Path("memir-baseline.json").read_text() == text  # that of the others stays
    assert check("ok").stdout.startswith("ok       ok      0.10 MiB  B=4, S=64  as in the baseline")
    monkeypatch.setitem(ANSWERS, "ok.py", facts("500*B*S + 1000"))
    result = check("ok")
    assert result.exit_code == 1
    assert "peak-regression: the peak grew: 0.10 MiB -> 0.12 MiB, +25,600 bytes" in result.stdout
    assert "formula at this point: +100*B*S" in result.stdout
    (line,) = check("ok", "--format", "github").stdout.splitlines()
    assert line.startswith("::error file=model.py,line=3,title=memir%3A peak-regression (MEM002)::ok: the peak grew")
    (found,) = results(check("ok", "--format", "sarif").stdout)
    assert found["ruleId"] == "MEM002"
    assert json.loads(check("ok", "--format", "json").stdout)["scenarios"][0]["delta_formula"] == "100*B*S"
    assert (
        "| `ok` | 0.10 MiB | 0.12 MiB | +0.02 MiB (+24.8 %) |  | **regressed** |" in check("ok", "--format", "markdown").stdout
    )


def test_a_finding_without_a_line_of_ours_stands_at_its_scenario(answered: Path) -> None:
    lines = check("broken", "--format", "github").stdout.splitlines()
    assert lines[0].startswith("::warning file=memir.toml,line=13,")


MODELS = """\
from torch import nn


class Layer(nn.Module):
    def forward(self, x):
        return x


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(8, 8)
        self.layers = nn.ModuleList([Layer()])

    def forward(self, ids):
        return self.tokens(ids)
"""


def test_init_writes_what_check_reads(folder: Path) -> None:
    (folder / "src").mkdir()
    (folder / "src" / "gpt.py").write_text(MODELS)
    (folder / "src" / "broken.py").write_text("class (")
    (folder / "tests").mkdir()
    (folder / "tests" / "model.py").write_text(MODELS)
    (folder / "hf").mkdir()
    (folder / "hf" / "config.json").write_text('{"model_type": "llama"}')
    result = CliRunner().invoke(main, ["init"])
    assert (result.exit_code, result.stderr) == (0, "")
    config = load(Path("memir.toml"), "memir.toml")
    assert [s.target for s in config.scenarios] == ["hf/config.json", "src/gpt.py:GPT"]
    again = CliRunner().invoke(main, ["init"])
    assert again.exit_code == 2
    assert "is there already" in again.stderr
    assert CliRunner().invoke(main, ["init", "--stdout"]).stdout == Path("memir.toml").read_text()


def test_every_budget_of_the_first_configuration_can_be_switched_on(folder: Path) -> None:
    (folder / "gpt.py").write_text(MODELS)
    text, targets = configuration(folder)
    assert targets == ["gpt.py:GPT"]
    for name in ("max", "gpu", "fits"):
        text = text.replace(f"# {name}", name)
    (found,) = load(write(text), "memir.toml").scenarios
    assert found.budgets.max == 76 * GIB
    assert None not in dataclasses.astuple(found.budgets)


def test_init_of_a_folder_without_models(folder: Path) -> None:
    text, targets = configuration(folder)
    assert targets == []
    assert load(write(text), "memir.toml").scenarios == ()
