"""`python -m benchmarks.freeze [memory] [steps] [pretrain] [finetune] [--save]`; without names: all of them."""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
from pathlib import Path
from typing import Any

from benchmarks.freeze.table import Predict, load, page, save
from benchmarks.speed.machine import machine, versions

STAGES = ("memory", "steps", "pretrain", "finetune")
PREDICT: Predict | None = None  # memir's own answer for a cut goes in here; until then the page has what was measured only


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.freeze", description=__doc__)
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=", ".join(STAGES))
    parser.add_argument("--folder", type=Path, default=Path("build/freeze"), help="for the pretrained weights and the cache")
    parser.add_argument("--save", action="store_true", help="write results.json and results.md")
    options = parser.parse_args()
    if unknown := set(options.stages) - set(STAGES):
        parser.error(f"no such stage: {', '.join(sorted(unknown))}")
    options.folder.mkdir(parents=True, exist_ok=True)
    results = load() if options.save else {}
    for stage in [name for name in STAGES if name in (options.stages or STAGES)]:
        results[stage] = measured(stage, options.folder)
        results |= {"machine": machine(), "versions": versions() | {"tokenizers": importlib.metadata.version("tokenizers")}}
        if options.save:
            save(results, PREDICT)
    print(page(results, PREDICT), end="")
    return 0


def measured(stage: str, folder: Path) -> Any:
    """What a stage measures."""
    if stage == "memory":
        from benchmarks.freeze.memory import memory

        return memory(say)
    if stage == "steps":
        from benchmarks.freeze.steps import step_times

        return step_times(say)
    from benchmarks.freeze.finetune import finetune
    from benchmarks.freeze.pretrain import pretrain

    return (pretrain if stage == "pretrain" else finetune)(folder, say)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
