"""The cache from the outside: what is asked again is read and is what a trace gives; what changed is traced anew."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import memir
from memir import api
from memir.cache import CacheWarning, environment
from memir.cache.store import Store
from memir.frontend.origin import shown_path
from memir.frontend.trace import Traced

ROOT = Path(__file__).resolve().parents[1]
MODEL = """
import json, os
from pathlib import Path
import torch
from torch import nn
import torch.nn.functional as F
from sizes import WIDTH
try:
    from kernels import ACTIVATION
except ImportError:
    ACTIVATION = F.gelu
HERE = Path(__file__).parent
VOCABULARY = json.loads((HERE / "sizes.json").read_text())["vocabulary"]
DEPTH = int(os.environ.get("MODEL_DEPTH", "1"))
BIAS = (HERE / "bias").exists()
HEADS = len(list(HERE.glob("heads/*.txt"))) or 1

class Model(nn.Module):
    def __init__(self, length: int = 64, scale: int = 2):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(length, WIDTH)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH, bias=BIAS) for _ in range(DEPTH)])
        self.head = nn.Linear(WIDTH, HEADS * VOCABULARY)

    def forward(self, ids, targets=None):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = x + ACTIVATION(layer(x))
        x = self.head(x)
        return x if targets is None else F.cross_entropy(x[..., :VOCABULARY].flatten(0, 1), targets.flatten())
"""
FORWARD = memir.Recipe(target="cpu", mode="forward")


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a model that reads whatever a model may read."""
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "sizes.py").write_text("WIDTH = 24\n")
    (tmp_path / "sizes.json").write_text('{"vocabulary": 50}')
    monkeypatch.delenv("MODEL_DEPTH", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "model.py"


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, int]]:
    """The points that were traced."""
    seen: list[dict[str, int]] = []
    trace = api._trace

    def counted(*arguments: Any, **keywords: Any) -> Any:
        result = trace(*arguments, **keywords)
        seen.append(result[2])
        return result

    monkeypatch.setattr(api, "_trace", counted)
    return seen


def ask(target: Path | str, **options: Any) -> api.TracedProgram:
    return api.program_of(str(target), options.pop("recipe", FORWARD), **{"batch": 2, "seq": 16, **options})


@pytest.mark.parametrize("recipe", [FORWARD, memir.Recipe(target="cuda", clip=1.0, lora=memir.Lora(targets=("head",)))])
def test_a_second_question_is_answered_without_a_trace(
    cached: Path, model: Path, traces: list[dict[str, int]], recipe: memir.Recipe
) -> None:
    first = ask(model, recipe=recipe)
    assert ask(model, recipe=recipe) == first == ask(model, recipe=recipe, cache=False)
    assert traces == [{"B": 2, "S": 16}] * 2  # the first, and the one without the cache
    assert memir.analyze(str(model), recipe, batch=2, seq=16) == memir.analyze(str(model), recipe, batch=2, seq=16, cache=False)


@pytest.mark.parametrize("point", [{"batch": 5, "seq": 40}, {"batch": 3, "seq": 2}, {"batch": 2, "seq": None}])
def test_another_point_of_the_domain_is_answered_as_a_trace_would(
    cached: Path, model: Path, traces: list[dict[str, int]], point: dict[str, int | None]
) -> None:
    ask(model)
    found = ask(model, **point)
    assert len(traces) == 1
    assert found == ask(model, **point, cache=False)
    assert found.point["S"] == (point["seq"] or 64)  # the model's limit is the default


@pytest.mark.parametrize(
    ("point", "recipe"), [({"batch": 1}, memir.Recipe()), ({"seq": 1}, FORWARD), ({"batch": 1, "seq": 1}, FORWARD)]
)
def test_a_size_of_one_is_kept_apart(
    cached: Path, model: Path, traces: list[dict[str, int]], point: dict[str, int], recipe: memir.Recipe
) -> None:
    ask(model, recipe=recipe)
    found = ask(model, recipe=recipe, **point)
    assert len(traces) == 2
    assert found == ask(model, recipe=recipe, **point)
    assert len(traces) == 2
    assert found == ask(model, recipe=recipe, **point, cache=False)


def test_a_batch_of_one_answers_for_other_lengths_with_its_general_program(
    cached: Path, model: Path, traces: list[dict[str, int]]
) -> None:
    first, second = (ask(model, recipe=memir.Recipe(), batch=1, seq=seq) for seq in (16, 48))
    assert len(traces) == 1
    assert second == ask(model, recipe=memir.Recipe(), batch=1, seq=48, cache=False)
    assert (first.general is None) == (second.general is None)


def test_a_length_that_widened_the_domain_answers_for_itself_only(
    cached: Path, model: Path, traces: list[dict[str, int]]
) -> None:
    """At S=64 all of the table is read, elsewhere a part: the domain `S != 64` of other lengths is widened there."""
    (model.parent / "model.py").write_text(
        MODEL.replace("self.positions(torch.arange(ids.shape[1], device=ids.device))", "self.positions.weight[: ids.shape[1]]")
    )
    at_the_end = ask(model, seq=64)
    other = ask(model, seq=32)
    assert other == ask(model, seq=32, cache=False)
    assert at_the_end == ask(model, seq=64)


def rewrite(name: str, text: str) -> Callable[[Path, pytest.MonkeyPatch], None]:
    def change(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)

    return change


CHANGES = {
    "the model's source": rewrite("model.py", MODEL.replace("nn.Embedding(length", "nn.Embedding(2 * length")),
    "a module that it imports": rewrite("sizes.py", "WIDTH = 48\n"),
    "a file that it reads": rewrite("sizes.json", '{"vocabulary": 70}'),
    "a file that it asks for": rewrite("bias", ""),
    "a folder that it lists": rewrite("heads/2.txt", ""),
    "a module that was not there": rewrite("kernels.py", "from torch.nn.functional import relu as ACTIVATION\n"),
    "a package in front of a module": rewrite("sizes/__init__.py", "WIDTH = 32\n"),
    "a variable": lambda _, monkeypatch: monkeypatch.setenv("MODEL_DEPTH", "3"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_the_model_reads_is_traced_anew_when_it_changes(
    cached: Path,
    model: Path,
    traces: list[dict[str, int]],
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Path, pytest.MonkeyPatch], None],
) -> None:
    (model.parent / "heads").mkdir()
    (model.parent / "heads/1.txt").touch()
    before = ask(model)
    assert len(traces) == 1
    change(model.parent, monkeypatch)
    after = ask(model)
    assert len(traces) == 2
    assert after != before


def test_a_change_that_is_taken_back_is_found_again(cached: Path, model: Path, traces: list[dict[str, int]]) -> None:
    first = ask(model)
    (model.parent / "sizes.py").write_text("WIDTH = 48\n")
    ask(model)
    (model.parent / "sizes.py").write_text("WIDTH = 24\n")
    (model.parent / "notes.txt").write_text("no part of the model")
    (model.parent / "train.py").write_text("raise SystemExit")
    assert ask(model) == first
    assert len(traces) == 2


@pytest.mark.parametrize(
    "options",
    [
        {"recipe": memir.Recipe(target="cpu", mode="forward", dtype="f32")},
        {"sets": {"length": 32}},
        {"inputs": "ids=ids"},
        {"trust_remote_code": True},
    ],
)
def test_every_option_is_part_of_the_question(
    cached: Path, model: Path, traces: list[dict[str, int]], options: dict[str, Any]
) -> None:
    ask(model)
    ask(model, **options)
    assert len(traces) == 2


@pytest.mark.parametrize("part", ["_packages", "_own_sources"])
def test_other_packages_or_another_memir_trace_anew(
    cached: Path, model: Path, traces: list[dict[str, int]], monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    ask(model)
    monkeypatch.setattr(environment, part, lambda *_: "another")
    ask(model)
    assert len(traces) == 2


@pytest.mark.parametrize("variable", ["TORCH_LOGS", "TRANSFORMERS_VERBOSITY", "HF_HOME", "PYTHONPATH"])
def test_variables_of_the_libraries_are_part_of_the_question(
    cached: Path, model: Path, traces: list[dict[str, int]], monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    before = environment.signature()
    monkeypatch.setenv(variable, "other")
    assert environment.signature() != before


def test_a_file_that_changes_while_it_is_traced_is_not_kept(cached: Path, model: Path) -> None:
    def edit(stage: str) -> None:
        if stage == "tracing the step":
            (model.parent / "sizes.py").write_text("WIDTH = 48\n")

    ask(model, progress=edit)
    assert Store(cached).usage().entries == 0


@pytest.mark.parametrize("changes", ["memir", "a package"])
def test_nothing_is_kept_while_memir_or_packages_change(
    cached: Path, model: Path, monkeypatch: pytest.MonkeyPatch, changes: str
) -> None:
    """What is in memory may be older than the sources that the key is made of."""

    def change(stage: str) -> None:
        if stage == "tracing the step" and changes == "memir":
            newest = max(path.stat().st_mtime_ns for path in (ROOT / "memir" / "frontend").glob("*.py"))
            monkeypatch.setattr(environment, "process_started", lambda: newest)
        elif stage == "tracing the step":
            monkeypatch.setattr(environment, "_packages", lambda _: "another")

    ask(model, progress=change)
    assert Store(cached).usage().entries == 0


def test_a_process_knows_when_it_began() -> None:
    code = "from memir.cache.environment import process_started; print(process_started())"
    before = time.time_ns()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    tick = 20_000_000  # nanoseconds; the system counts in steps
    assert before - tick < int(done.stdout) < time.time_ns()


def test_errors_are_the_same_with_a_kept_program(cached: Path, model: Path) -> None:
    ask(model)
    messages = []
    for cache in (True, False):
        with pytest.raises(memir.UsageError) as error:
            ask(model, seq=65, cache=cache)
        messages.append(error.value.render())
    assert messages[0] == messages[1]
    assert "accepts sequences of at most 64 tokens" in messages[0]


def test_a_folder_named_like_a_preset_is_another_target(
    cached: Path, tmp_path: Path, traces: list[dict[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sets = {"n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": 64}
    first = ask("gpt2", sets=sets)
    assert ask("gpt2", sets=sets) == first
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert ask("gpt2", sets=sets) == first
    assert len(traces) == 1
    (tmp_path / "elsewhere" / "gpt2").mkdir()
    with pytest.raises(memir.UsageError, match=r"the folder has no config\.json"):
        ask("gpt2", sets=sets)


def test_the_same_file_from_another_folder_shows_its_own_lines(
    cached: Path, model: Path, traces: list[dict[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Places in the source are shown relative to the working directory."""
    ask(model)
    monkeypatch.chdir(model.parent.parent)
    shown_path.cache_clear()
    found = ask(model)
    assert len(traces) == 2
    assert found.subject.source.startswith(f"{model.parent.name}/model.py:")


def test_nothing_is_kept_of_a_module_or_without_the_cache(
    cached: Path, model: Path, monkeypatch: pytest.MonkeyPatch, traces: list[dict[str, int]]
) -> None:
    import torch

    built = torch.nn.Sequential(torch.nn.Embedding(10, 4), torch.nn.Linear(4, 10))
    api.program_of(built, FORWARD, batch=2, seq=4)
    ask(model, cache=False)
    monkeypatch.setenv("MEMIR_NO_CACHE", "1")
    ask(model)
    assert len(traces) == 3
    assert list(cached.iterdir()) == []


def test_every_field_of_a_traced_step_is_known_to_the_cache(cached: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A field that the record does not have would be lost on a hit: nothing is kept until api._record has it."""
    assert {field.name for field in dataclasses.fields(Traced)} <= api._KEPT
    monkeypatch.setattr(api, "_KEPT", api._KEPT - {"assumptions"})
    ask(model)
    assert Store(cached).usage().entries == 0


def test_a_damaged_file_is_told_and_written_again(cached: Path, model: Path, traces: list[dict[str, int]]) -> None:
    first = ask(model)
    (path,) = cached.rglob("*.entry")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.warns(CacheWarning, match=rf"damaged or not memir's and is not used: programs/.*/{path.name}"):
        assert ask(model) == first
    assert ask(model) == first
    assert len(traces) == 2


def test_a_folder_that_cannot_be_written_is_told_once(
    cached: Path, model: Path, monkeypatch: pytest.MonkeyPatch, traces: list[dict[str, int]]
) -> None:
    (cached / "file").touch()
    monkeypatch.setenv("MEMIR_CACHE_DIR", str(cached / "file"))
    with pytest.warns(CacheWarning, match="the cache cannot be written"):
        first = ask(model)
    assert ask(model) == first  # a second warning would be an error
    assert len(traces) == 2


def test_a_hit_imports_neither_torch_nor_transformers(tmp_path: Path, model: Path) -> None:
    code = (
        "import sys\nfrom memir.cli import main\n"
        "try: main('analyze model.py -b 2 -s 16 --mode forward'.split())\nexcept SystemExit as end: print(end.code)\n"
        "heavy = {'torch', 'transformers', 'peft', 'accelerate', 'numpy', 'sympy', 'memir.frontend'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    variables = {k: v for k, v in os.environ.items() if k != "MEMIR_NO_CACHE"} | {"MEMIR_CACHE_DIR": str(tmp_path / "cache")}
    first, second = (
        subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=variables, capture_output=True, text=True, check=True)
        for _ in range(2)
    )
    *answer, code_of_exit, loaded = second.stdout.splitlines()
    assert (code_of_exit, loaded, second.stderr) == ("0", "[]", "")
    assert answer == first.stdout.splitlines()[:-2]
    assert "torch" in first.stdout.splitlines()[-1]
