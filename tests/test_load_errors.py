"""Bad targets: each gives one screen that says what is wrong, where, and what to type; exit code 2; never a traceback."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from memir.errors import EXIT_USAGE, MemirError
from memir.frontend.load import check_seq, load_target
from memir.recipe import Lora, Recipe

MODEL = """
import torch
import torch.nn.functional as F
from torch import nn

class Block(nn.Module):
    def __init__(self, width): super().__init__(); self.up = nn.Linear(width, width)
    def forward(self, x): return x + self.up(x)

class GPT(nn.Module):
    def __init__(self, width=16, depth=2, vocab_size=50, block_size=32):
        super().__init__()
        self.block_size = block_size
        self.embed = nn.Embedding(vocab_size, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, vocab_size)

    def forward(self, idx, targets=None):
        x = self.embed(idx)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        return logits, None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())
"""


def write(folder: Path, text: str, name: str = "model.py") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def failure(target: str, **options: object) -> str:
    """The screen of the one error that loading gives; checks its exit code and size."""
    recipe = options.pop("recipe", Recipe())
    with pytest.raises(MemirError) as caught:
        load_target(target, recipe=recipe, **options)  # type: ignore[arg-type]
    screen = caught.value.render()
    assert caught.value.exit_code == EXIT_USAGE
    assert len(screen.splitlines()) <= 20
    assert "Traceback" not in screen
    return screen


def test_no_such_file(tmp_path: Path) -> None:
    write(tmp_path, MODEL)
    screen = failure(str(tmp_path / "modle.py"))
    assert "no such file" in screen
    assert "nearest" in screen
    assert "model.py" in screen


def test_no_such_folder(tmp_path: Path) -> None:
    assert "there is no folder" in failure(str(tmp_path / "none" / "model.py"))


def test_syntax_error_shows_line_and_caret(tmp_path: Path) -> None:
    screen = failure(write(tmp_path, "import torch\n\ndef broken(:\n    pass\n"))
    lines = screen.splitlines()
    assert "syntax error in model.py" in lines[0]
    assert "model.py:3:12" in lines[1]
    assert lines[2].strip() == "def broken(:"
    assert lines[3].index("^") - 2 == "def broken(:".index("(") + 1


def test_syntax_error_in_a_file_that_it_imports(tmp_path: Path) -> None:
    write(tmp_path, "x = = 1\n", "helper_with_error.py")
    assert "helper_with_error.py:1:5" in failure(write(tmp_path, "import helper_with_error\n" + MODEL))


def test_missing_package_names_package_and_line(tmp_path: Path) -> None:
    screen = failure(write(tmp_path, "import torch\nfrom flash_attention_of_tomorrow.ops import attend\n" + MODEL))
    assert "needs the package 'flash_attention_of_tomorrow'" in screen
    assert "model.py:2   from flash_attention_of_tomorrow.ops import attend" in screen
    assert "pip install flash_attention_of_tomorrow" in screen


def test_missing_name_in_a_package(tmp_path: Path) -> None:
    screen = failure(write(tmp_path, "from torch import no_such_thing\n"))
    assert "cannot be imported" in screen
    assert "model.py:1   from torch import no_such_thing" in screen


def test_relative_import_outside_a_package(tmp_path: Path) -> None:
    assert "__init__.py" in failure(write(tmp_path, "from .blocks import Block\n"))


def test_file_that_raises_while_imported(tmp_path: Path) -> None:
    screen = failure(write(tmp_path, "widths = [1]\nwidth = widths[3]\n"))
    assert "fails while it is imported" in screen
    assert "model.py:2   width = widths[3]" in screen
    assert "IndexError" in screen


def test_script_that_exits(tmp_path: Path) -> None:
    screen = failure(write(tmp_path, "import sys\nif len(sys.argv) < 2:\n    sys.exit('usage')\n"))
    assert "exits while it is imported" in screen
    assert "__main__" in screen


def test_no_module_class(tmp_path: Path) -> None:
    screen = failure(write(tmp_path, "def build():\n    return 1\n"))
    assert "no torch.nn.Module class" in screen
    assert "model.py:build" in screen


def test_empty_file(tmp_path: Path) -> None:
    assert "no torch.nn.Module class" in failure(write(tmp_path, ""))


def test_several_candidates_are_listed_with_commands(tmp_path: Path) -> None:
    other = MODEL[MODEL.index("class GPT") :].replace("class GPT", "class Encoder")
    path = write(tmp_path, MODEL + "\n" + other)
    screen = failure(path)
    assert "two model classes could be meant: GPT (line 10) and Encoder (line 25)" in screen
    assert f"memir analyze {path}:GPT" in screen
    assert f"memir analyze {path}:Encoder" in screen
    assert load_target(f"{path}:Encoder", recipe=Recipe()).name == "Encoder"


def test_name_not_in_the_file(tmp_path: Path) -> None:
    screen = failure(write(tmp_path, MODEL) + ":GTP")
    assert "has no 'GTP'" in screen
    assert "Block, GPT" in screen
    assert "nearest: GPT" in screen


def test_name_that_is_no_model(tmp_path: Path) -> None:
    path = write(tmp_path, MODEL + "\nWIDTH = 3\nclass Plain: pass\n")
    assert "WIDTH is int" in failure(f"{path}:WIDTH")
    assert "no torch.nn.Module" in failure(f"{path}:Plain")


def test_constructor_that_needs_arguments(tmp_path: Path) -> None:
    path = write(tmp_path, MODEL.replace("width=16, depth=2", "width, depth"))
    screen = failure(path)
    assert "GPT needs 2 arguments without a default: width, depth" in screen
    assert "--set width=... --set depth=..." in screen
    assert f"memir analyze {path}:model" in screen
    assert load_target(path, recipe=Recipe(), sets={"width": "8", "depth": "1"}).layers == ("layers.0",)


def test_configuration_with_fields_without_default(tmp_path: Path) -> None:
    text = "from dataclasses import dataclass\n@dataclass\nclass Config:\n    width: int\n    depth: int = 2\n"
    path = write(tmp_path, text + MODEL.replace("width=16, depth=2, vocab_size=50, block_size=32", "config: Config"))
    assert "Config has no default for width" in failure(path)


def test_several_configurations(tmp_path: Path) -> None:
    text = "".join(
        f"from dataclasses import dataclass\n@dataclass\nclass {name}Config:\n    width: int = 8\n\n"
        for name in ("Small", "Large")
    )
    body = MODEL.replace("width=16, depth=2, vocab_size=50, block_size=32", "config").replace(
        "super().__init__()\n        self.block_size = block_size",
        "super().__init__()\n        width = config.width; depth = 1; vocab_size = 9",
    )
    screen = failure(write(tmp_path, text + body))
    assert "SmallConfig, LargeConfig" in screen
    assert "def model(): return GPT(SmallConfig())" in screen


def test_constructor_that_raises(tmp_path: Path) -> None:
    path = write(tmp_path, MODEL.replace("self.block_size = block_size", "raise ValueError('width must be odd')"))
    screen = failure(path)
    assert "GPT() fails" in screen
    assert "ValueError: width must be odd" in screen
    assert "model.py:13" in screen


def test_factory_that_raises_or_returns_something_else(tmp_path: Path) -> None:
    path = write(tmp_path, MODEL + "\ndef bad():\n    return GPT(missing=1)\n\ndef odd():\n    return 3\n")
    screen = failure(f"{path}:bad")
    assert "bad() fails" in screen
    assert "model.py:26   return GPT(missing=1)" in screen
    assert "odd() returns int, not a torch.nn.Module" in failure(f"{path}:odd")


def test_forward_that_fails_shows_the_users_line(tmp_path: Path) -> None:
    path = write(tmp_path, MODEL.replace("logits = self.head(x)", "logits = self.head(x.transpose(1, 2))"))
    screen = failure(path)
    assert "forward() of GPT fails on idx of shape [B, S]" in screen
    assert "logits = self.head(x.transpose(1, 2))" in screen
    assert "B was 2, S was 8" in screen
    assert "--inputs" in screen


def test_forward_with_an_unknown_required_argument(tmp_path: Path) -> None:
    path = write(tmp_path, MODEL.replace("idx, targets=None", "idx, temperature, targets=None"))
    assert "--inputs temperature=VALUE" in failure(path)
    loaded = load_target(path, recipe=Recipe(), inputs="temperature=0.5")
    assert loaded.call.constants == (("temperature", 0.5),)


def test_forward_without_loss_or_logits(tmp_path: Path) -> None:
    start = MODEL.index("        return logits, None")
    screen = failure(write(tmp_path, MODEL[:start] + "        return logits.mean((1, 2)), 'text'\n"))
    assert "no loss and no logits" in screen
    assert "--inputs loss=item:1" in screen


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ("ids", "not NAME=VALUE"),
        ("ids=idx,ids=idx", "given twice"),
        ("loss=somewhere", "names no place"),
        ("ids=tokens", "has no parameter 'tokens'"),
        ("extra=1", "has no parameter 'extra'"),
    ],
)
def test_inputs_that_do_not_fit(tmp_path: Path, inputs: str, said: str) -> None:
    assert said in failure(write(tmp_path, MODEL), inputs=inputs)


def test_no_trainable_parameters(tmp_path: Path) -> None:
    path = write(tmp_path, MODEL + "\ndef frozen():\n    return GPT().requires_grad_(False)\n")
    screen = failure(f"{path}:frozen")
    assert "nothing to train" in screen
    assert "--mode forward" in screen
    assert load_target(f"{path}:frozen", recipe=Recipe(mode="forward")).name == "GPT"
    assert load_target(f"{path}:frozen", recipe=Recipe(lora=Lora())).name == "GPT"


def test_unknown_option_lists_the_nearest(tmp_path: Path) -> None:
    screen = failure(write(tmp_path, MODEL), sets={"dept": "3"})
    assert "--set dept: GPT has no such option" in screen
    assert "nearest: depth" in screen


def test_option_of_the_wrong_type(tmp_path: Path) -> None:
    assert "--set depth: 'deep' is not an integer" in failure(write(tmp_path, MODEL), sets={"depth": "deep"})


def test_instance_cannot_be_set(tmp_path: Path) -> None:
    path = write(tmp_path, MODEL + "\nmodel = GPT()\n")
    assert "is an instance that is built already" in failure(f"{path}:model", sets={"depth": "3"})


def test_module_that_is_not_there() -> None:
    assert "there is no module" in failure("no_such_package.models:GPT")


def test_sequence_beyond_the_limit(tmp_path: Path) -> None:
    path = write(tmp_path, MODEL)
    screen = failure(path, seq=64)
    assert "at most 32 tokens" in screen
    assert "S was 64" in screen
    assert "Try  -s 32  or  --set block_size=64" in screen
    check_seq(load_target(path, recipe=Recipe()), 32)


def config(folder: Path, values: object) -> str:
    (folder / "config.json").write_text(values if isinstance(values, str) else json.dumps(values))
    return str(folder)


TINY = {
    "model_type": "llama",
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 64,
}


def test_config_that_is_not_json(tmp_path: Path) -> None:
    screen = failure(config(tmp_path, '{"model_type": "llama",\n "hidden_size": }\n'))
    assert "config.json is not JSON" in screen
    assert "config.json:2:17" in screen
    assert screen.splitlines()[3].index("^") == 2 + 16


def test_config_that_is_empty_or_a_list(tmp_path: Path) -> None:
    assert "config.json is not JSON" in failure(config(tmp_path, ""))
    assert "not list" in failure(config(tmp_path, "[]"))


def test_config_of_an_unknown_type(tmp_path: Path) -> None:
    screen = failure(config(tmp_path, TINY | {"model_type": "lama"}))
    assert "unknown model type 'lama'" in screen
    assert "nearest: llama" in screen
    assert "names no model_type" in failure(config(tmp_path, {"hidden_size": 16}))


def test_folder_without_config(tmp_path: Path) -> None:
    write(tmp_path, MODEL)
    screen = failure(str(tmp_path))
    assert "has no config.json" in screen
    assert "model.py" in screen


def test_encoder_only(tmp_path: Path) -> None:
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 64}
    path = config(tmp_path, small | {"model_type": "bert"})
    assert "bert is an encoder-only model" in failure(path)
    assert load_target(path, recipe=Recipe(), sets={"is_decoder": "true"}).name == "BertLMHeadModel"
    assert "encoder-only" in failure(config(tmp_path, small | {"model_type": "distilbert"}))


def test_encoder_decoder(tmp_path: Path) -> None:
    assert "t5 is an encoder-decoder model" in failure(config(tmp_path, {"model_type": "t5"}))


def test_not_a_language_model(tmp_path: Path) -> None:
    assert "no causal language model" in failure(config(tmp_path, {"model_type": "vit"}))


def test_remote_code_needs_the_flag(tmp_path: Path) -> None:
    write(tmp_path, "raise RuntimeError('this code ran')\n", "modeling_new.py")
    auto_map = {"AutoConfig": "modeling_new.NewConfig", "AutoModelForCausalLM": "modeling_new.NewModel"}
    screen = failure(config(tmp_path, {"model_type": "new-one", "auto_map": auto_map}))
    assert "--trust-remote-code" in screen
    assert "this code ran" not in screen


def test_config_field_that_is_unknown_or_ill_typed(tmp_path: Path) -> None:
    path = config(tmp_path, TINY)
    screen = failure(path, sets={"num_hidden_layer": "3"})
    assert "no such field" in screen
    assert "num_hidden_layers" in screen
    assert "is not an integer" in failure(path, sets={"num_hidden_layers": "x"})


def test_config_that_does_not_fit_its_model(tmp_path: Path) -> None:
    screen = failure(config(tmp_path, TINY | {"hidden_act": "no-such-activation"}))
    assert "llama" in screen
    assert "no-such-activation" in screen


def test_inputs_are_not_for_hugging_face(tmp_path: Path) -> None:
    assert "--inputs is for a model.py" in failure(config(tmp_path, TINY), inputs="ids=input_ids")


def test_unknown_name_lists_the_nearest_presets() -> None:
    screen = failure("lama-3.1-8b")
    assert "no file, no preset and no model in the local Hugging Face cache" in screen
    assert "nearest presets: " in screen
    assert "llama-3.1-8b" in screen


def test_id_that_is_not_cached() -> None:
    screen = failure("some-org/some-model-that-nobody-has")
    assert "memir never downloads" in screen
    assert "hf download some-org/some-model-that-nobody-has config.json" in screen


def test_empty_target() -> None:
    assert "no target" in failure(" ")
