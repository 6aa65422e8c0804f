"""A first configuration for a folder: a scenario for each model that its files define, with every budget in a comment."""

from __future__ import annotations

import ast
import json
import os
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

SKIPPED = {"build", "dist", "node_modules", "site-packages", "test", "tests", "venv", "__pycache__"}
MOST = 20  # scenarios; more is nobody's first configuration

_HEAD = """\
# What training steps may take, for  memir check  (docs/check.md describes every key).
# memir check --update-baseline  writes memir-baseline.json, which is committed; from then on every increase is told.

# [defaults]          # for all scenarios; each of them may say otherwise
# dtype = "bf16"      # the options of  memir analyze  (amp, optimizer, checkpoint, lora, ...)
# batch = 4
# seq = 2048
"""
_SCENARIO = """
[scenarios.{name}]
target = {target}
batch = 4
# seq = 2048                        # the default, or the model's limit
# gpu = "a100-80gb"                 # whose kernels are taken (memir gpus)
# max = "76GiB"                     # allocated bytes at the peak
# max_increase = "1%"               # over the baseline; without it nothing may be added
# max_order = "B*S"                 # no term of the peak's formula grows faster
# fits = "a100-80gb"                # with what the allocator reserves
# max_saved_per_layer = "512MiB"    # kept for backward by one layer
# skip = "why"                      # not checked, said loudly, never a pass
"""
_NONE = """
# No model was found in this folder. A target is a file, a class in it, an importable name, or a preset:
#
# [scenarios.train]
# target = "model.py:GPT"
# batch = 4
# seq = 2048
# max = "76GiB"
"""


def configuration(folder: Path) -> tuple[str, list[str]]:
    """The text of a memir.toml, and the targets that it has scenarios for."""
    targets = list(dict.fromkeys(find_targets(folder)))[:MOST]
    names: dict[str, int] = {}
    parts = []
    for target in targets:
        name = re.sub(r"[^A-Za-z0-9_]+", "-", re.sub(r"\.py|config\.json", "", target)).strip("-").lower()
        names[name] = names.get(name, 0) + 1
        unique = name if names[name] == 1 else f"{name}-{names[name]}"
        parts.append(_SCENARIO.format(name=unique, target=json.dumps(target, ensure_ascii=False)))
    text = _HEAD + ("".join(parts) if targets else _NONE)
    tomllib.loads(text)  # what is written can be read
    return text, targets


def find_targets(folder: Path) -> Iterator[str]:
    """`model.py:GPT` of each outermost model class, and folders with a Hugging Face configuration, in order of their paths."""
    for root, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in SKIPPED and not name.startswith((".", "test")))
        place = Path(root).relative_to(folder)
        for file in sorted(files):
            path = place / file
            if file == "config.json" and _is_hugging_face(folder / path):
                yield path.as_posix()
            if file.endswith(".py") and not file.startswith(("test_", "conftest")):
                yield from (f"{path.as_posix()}:{name}" for name in _models(folder / path))


def _is_hugging_face(path: Path) -> bool:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(data, dict) and isinstance(data.get("model_type"), str)


def _models(path: Path) -> list[str]:
    """Classes with an embedding and a forward() that no other class of the file uses; the file is read, not run."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return []
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    names = {node.name for node in classes}
    used = {
        inner.id
        for node in classes
        for inner in ast.walk(node)
        if isinstance(inner, ast.Name) and inner.id in names and inner.id != node.name
    }
    return [node.name for node in classes if node.name not in used and _is_model(node)]


def _is_model(node: ast.ClassDef) -> bool:
    bases = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
    forward = any(isinstance(item, ast.FunctionDef) and item.name == "forward" for item in node.body)
    embeds = any(isinstance(n, ast.Attribute | ast.Name) and "Embedding" in ast.unparse(n) for n in ast.walk(node))
    return "Module" in bases and forward and embeds
