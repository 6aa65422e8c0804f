"""Loading leaves the process as it was: stdout, sys, cwd, torch's defaults; and what is compiled is analyzed as eager."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from memir.errors import UsageError
from memir.frontend.load import load_target
from memir.frontend.load_eager import eager_only, unwrap_compiled
from memir.recipe import Recipe

DISTURBER = """
import os, sys, random, warnings, argparse
import torch
from torch import nn
print("hello from the import")
sys.path.append("/somewhere/else")
os.chdir("..")
torch.set_default_dtype(torch.float64)
torch.set_default_device("meta")
torch.manual_seed(1)
torch.set_grad_enabled(False)
warnings.warn("look out", DeprecationWarning)
arguments = argparse.ArgumentParser().parse_args()

class GPT(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        print("hello from the constructor")
        torch.set_default_dtype(torch.float64)
        self.embed = nn.Embedding(20, width)

    def forward(self, idx):
        print("hello from forward")
        return self.embed(idx) @ self.embed.weight.T
"""


def state() -> dict[str, object]:
    return {
        "path": list(sys.path),
        "argv": list(sys.argv),
        "bytecode": sys.dont_write_bytecode,
        "cwd": Path.cwd(),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "grad": torch.is_grad_enabled(),
        "rng": torch.get_rng_state().tolist(),
        "compile": torch.compile,
        "script": torch.jit.script,
        "register": nn.Module.register_parameter,
        "offline": os.environ.get("HF_HUB_OFFLINE"),
    }


@pytest.mark.parametrize("good", [True, False])
def test_everything_is_put_back(tmp_path: Path, capsys: pytest.CaptureFixture[str], good: bool) -> None:
    path = tmp_path / "disturber_model.py"
    path.write_text(DISTURBER if good else DISTURBER + "\nraise RuntimeError('at the end')\n")
    before = state()
    if good:
        loaded = load_target(str(path), recipe=Recipe(dtype="f32"))
        assert loaded.dtype == torch.float32
    else:
        with pytest.raises(UsageError, match="at the end"):
            load_target(str(path), recipe=Recipe())
    assert state() == before
    assert "disturber_model" not in sys.modules
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "hello from the import" in captured.err
    assert ("hello from forward" in captured.err) == good
    assert sorted(p.name for p in tmp_path.iterdir()) == ["disturber_model.py"]  # no bytecode


def test_hugging_face_leaves_everything_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = '"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 64'
    (tmp_path / "config.json").write_text('{"model_type": "llama", ' + sizes + "}")
    before, seed = state(), random.getstate()
    load_target(str(tmp_path), recipe=Recipe())
    assert state() == before
    assert random.getstate() == seed
    assert capsys.readouterr().out == ""


COMPILED = """
import torch
from torch import nn

@torch.compile
def scale(x):
    return x * 2

@torch.jit.script
def shift(x):
    return x + 1

class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 8)

    @torch.compile(dynamic=True)
    def forward(self, idx):
        return scale(shift(self.embed(idx))) @ self.embed.weight.T

def make():
    return torch.compile(GPT())
"""


@pytest.mark.parametrize("name", ["", ":make"])
def test_compiled_code_is_analyzed_as_eager(tmp_path: Path, name: str) -> None:
    path = tmp_path / "model.py"
    path.write_text(COMPILED)
    loaded = load_target(f"{path}{name}", recipe=Recipe())
    assert loaded.name == "GPT"
    notes = [line for line in loaded.assumptions if "analyzed as eager" in line]
    assert any("torch.compile at model.py:5" in line for line in notes)
    assert any("torch.jit.script at model.py:9" in line for line in notes)
    assert len(notes) == (4 if name else 3)


def test_wrapped_modules_are_unwrapped() -> None:
    inner = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    inner[1] = torch.compile(inner[1], backend="eager")
    inner[0].compile(backend="eager")
    notes: list[str] = []
    module = unwrap_compiled(torch.compile(inner, backend="eager"), notes)
    assert module is inner
    assert [type(m) for m in inner] == [nn.Linear, nn.Linear]
    assert inner[0]._compiled_call_impl is None
    assert notes == ["analyzed as eager: the model is wrapped in torch.compile"]
    assert unwrap_compiled(nn.Linear(2, 2), notes) is not None
    assert len(notes) == 1


def test_eager_only_is_scoped() -> None:
    calls = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        calls.append(graph)
        return graph.forward

    compiled = torch.compile(lambda x: x + 1, backend=backend)
    with eager_only():
        compiled(torch.ones(2))
    assert calls == []
    compiled(torch.ones(2))
    assert len(calls) == 1
