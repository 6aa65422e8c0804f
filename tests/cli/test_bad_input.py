"""Bad input on the command line: a one-screen message on stderr, the right exit code, nothing on stdout."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from click.testing import CliRunner

from memir.cli import main

HEAD = """\
import torch
from torch import nn
import torch.nn.functional as F


"""
MODEL = """\
class {name}(nn.Module):
    def __init__(self, width={width}):
        super().__init__()
        self.tokens = nn.Embedding(32, width)
        self.head = nn.Linear(width, 32)

    def forward(self, idx, targets=None):
        x = self.tokens(idx)
{body}
        logits = self.head(x)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


"""
PLAIN = "        x = torch.tanh(x)"


def model(name: str = "Tiny", width: str = "8", body: str = PLAIN) -> str:
    return MODEL.format(name=name, width=width, body=body)


OPAQUE = """\
library = torch.library.Library("memir_test", "DEF")
library.define("opaque(Tensor x) -> Tensor")
library.impl("opaque", lambda x: x.clone(), "CPU")


"""
NEEDS = model().replace(" width=8", " width").replace("(self, width):", "(self, width, depth):")
CONFIG = {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64}
BERT = {"model_type": "bert", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}


@dataclass(frozen=True)
class Case:
    """`files` are written to an empty working directory; `error` is how stderr starts, `parts` are further text in it."""

    name: str
    command: str
    error: str
    parts: tuple[str, ...] = ()
    files: dict[str, str] = field(default_factory=dict)
    code: int = 2


CASES = [
    Case(
        "unknown gpu",
        "analyze model.py --gpu h1000",
        "error: --gpu: 'h1000' is no amount of memory and no known GPU",
        ("nearest: h100",),
    ),
    Case(
        "gpu of several sizes", "analyze model.py --gpu a100", "error: --gpu: 'a100' is", ("a100-sxm4-40gb", "a100-sxm4-80gb")
    ),
    Case("impossible memory", "analyze model.py --gpu 4TiB", "error: --gpu: '4TiB' is more than the memory of any GPU"),
    Case("gpu and cpu", "analyze model.py --gpu t4 --target cpu", "error: --gpu t4: the target is cpu", ("leave out  --gpu",)),
    Case(
        "kernel of another target",
        "analyze model.py --attention flash --target cpu",
        "error: attention: flash is a kernel of cuda",
    ),
    Case("no such file", "analyze modle.py", "error: modle.py: no such file", ("model.py",), {"model.py": HEAD + model()}),
    Case("no such folder", "analyze none/model.py", "error: none/model.py: no such file", ("there is no folder none",)),
    Case(
        "syntax error",
        "analyze model.py",
        "error: syntax error in model.py",
        ("model.py:2:", "class Broken(\n", "^"),
        {"model.py": "import torch\nclass Broken(\n"},
    ),
    Case(
        "missing package",
        "analyze model.py",
        "error: model.py",
        ("no_such_package", "model.py:1"),
        {"model.py": "import no_such_package\n"},
    ),
    Case("no module class", "analyze model.py", "error: model.py", ("nn.Module",), {"model.py": "x = 1\n"}),
    Case(
        "several classes",
        "analyze model.py",
        "error: model.py: ",
        ("One (line 6)", "Two (line ", "memir analyze model.py:One"),
        {"model.py": HEAD + model("One") + model("Two")},
    ),
    Case("no such name", "analyze model.py:Tinny", "error: ", ("Tinny", "Tiny"), {"model.py": HEAD + model()}),
    Case("constructor needs arguments", "analyze model.py", "error: ", ("width", "--set"), {"model.py": HEAD + NEEDS}),
    Case(
        "forward fails",
        "analyze model.py",
        "error: forward() of Tiny fails",
        ("model.py:14", "x @ x"),
        {"model.py": HEAD + model(body="        x = x @ x")},
    ),
    Case(
        "nothing to train",
        "analyze model.py",
        "error: Tiny has nothing to train",
        ("--mode forward",),
        {
            "model.py": HEAD
            + model().replace("nn.Linear(width, 32)", "nn.Linear(width, 32)\n        self.requires_grad_(False)")
        },
    ),
    Case("encoder-only model", "analyze config.json", "error: ", ("bert", "decoder"), {"config.json": json.dumps(BERT)}),
    Case("batch 0", "analyze gpt2 -b 0", "error: --batch: 0 is not a positive number"),
    Case("batch negative", "analyze gpt2 --batch=-3", "error: --batch: -3 is not a positive number"),
    Case("sequence 0", "analyze gpt2 -s 0", "error: --seq: 0 is not a positive number"),
    Case("sequence negative", "analyze gpt2 --seq=-3", "error: --seq: -3 is not a positive number"),
    Case("beyond the limit", "analyze gpt2 -s 4096", "error: gpt2 accepts sequences of at most 1024 tokens", ("-s 1024",)),
    Case("unknown preset", "analyze lama-3.1-8b", "error: lama-3.1-8b: no file, no preset", ("llama-3.1-8b",)),
    Case(
        "config is not JSON",
        "analyze config.json",
        "error: config.json",
        ("config.json:1:2", "{model"),
        {"config.json": "{model"},
    ),
    Case("config is a list", "analyze config.json", "error: config.json", (), {"config.json": "[1]"}),
    Case(
        "unknown model type",
        "analyze config.json",
        "error: ",
        ("lllama", "llama"),
        {"config.json": json.dumps({"model_type": "lllama"})},
    ),
    Case(
        "no such config option", "analyze config.json --set n_layers=3", "error: --set", (), {"config.json": json.dumps(CONFIG)}
    ),
    Case(
        "operator without a fake implementation",
        "analyze model.py -b 2 -s 8",
        "error: ",
        ("memir_test.opaque", "model.py:"),
        {"model.py": HEAD + OPAQUE + model(body="        x = torch.ops.memir_test.opaque(x)")},
        code=3,
    ),
    Case(
        "unknown optimizer",
        "analyze config.json -s 8 --optimizer adamm",
        "error: --optimizer: adamm is no optimizer that is known",
        ("adamw",),
        {"config.json": json.dumps(CONFIG)},
    ),
    Case(
        "optimizer without that form",
        "analyze config.json -s 8 --optimizer adafactor --optimizer-impl fused",
        "error: --optimizer-impl: torch.optim.Adafactor has no fused form",
        (),
        {"config.json": json.dumps(CONFIG)},
    ),
    Case(
        "LoRA targets match nothing",
        "analyze config.json -s 8 --lora r=4,targets=nothing",
        "error: LoRA targets match nothing: nothing",
        ("q_proj",),
        {"config.json": json.dumps(CONFIG)},
    ),
    Case("unknown LoRA option", "analyze gpt2 --lora rank=4", "error: --lora: unknown option 'rank'", ("targets",)),
    Case("unknown format", "analyze gpt2 --format yaml", "error: unknown backend 'yaml'", ("json",)),
    Case(
        "no such folder to write to",
        "analyze model.py -b 2 -s 8 -o none/a.txt",
        "error: cannot write none/a.txt: No such file or directory",
        (),
        {"model.py": HEAD + model()},
    ),
    Case("no such program", "opt none.memir", "error: cannot read none.memir: No such file or directory"),
    Case(
        "program with a syntax error",
        "opt a.memir",
        "error: ",
        ("a.memir:3:", "storage $w 8192", "^"),
        {"a.memir": "memir 1\nprogram @tiny\nstorage $w 8192 parameter live_in live_out\n"},
    ),
    Case(
        "program that fails verification",
        "opt a.memir",
        "error: ",
        ("$x",),
        {"a.memir": "memir 1\nprogram @tiny\nstorage $x: 8 activation\nphase forward\n  memir.free() frees $x\n"},
    ),
    Case("unknown pass", "opt - -p lifetime", "error: unknown pass 'lifetime'", ("lifetimes",)),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_bad_input(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in case.files.items():
        (tmp_path / name).write_text(text)
    result = CliRunner().invoke(main, case.command.split())
    assert (result.exit_code, result.stdout) == (case.code, ""), result.output
    assert result.stderr.startswith(case.error)
    for part in case.parts:
        assert part in result.stderr
    assert "Traceback" not in result.stderr
    assert str(tmp_path) not in result.stderr
    assert len(result.stderr.splitlines()) <= 24
