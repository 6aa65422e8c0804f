"""`python -m benchmarks.speed.check [--runs N] [--save]`: memir check of ten scenarios, all cached and all to be traced."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from statistics import median

from benchmarks.speed.cases import PYTHON
from benchmarks.speed.machine import machine, options, versions
from benchmarks.speed.measure import ROOT, FailedError, run

PAGE = Path(__file__).with_name("check.md")
AIMS = {"cached": 3.0, "changed": 40.0}  # seconds on a machine with two cores
SCENARIOS = (
    ("gpt", f"{ROOT}/examples/gpt.py", {}),
    ("gpt-checkpointed", f"{ROOT}/examples/gpt.py", {"checkpoint": "full"}),
    ("gpt-sgd", f"{ROOT}/examples/gpt.py", {"optimizer": "sgd"}),
    ("gpt-f32", f"{ROOT}/examples/gpt.py", {"dtype": "f32"}),
    ("llama", f"{ROOT}/examples/llama.py", {}),
    ("llama-small", f"{ROOT}/examples/llama.py:small", {}),
    ("llama-fused", f"{ROOT}/examples/llama.py", {"optimizer_impl": "fused"}),
    ("gpt2", "gpt2", {}),
    ("llama-3.1-8b", "llama-3.1-8b", {}),
    ("llama-3.1-8b-lora", "llama-3.1-8b", {"lora": "r=16"}),
)


def configuration() -> str:
    """The ten scenarios as memir.toml."""
    lines = []
    for name, target, keys in SCENARIOS:
        lines += [f'[scenarios."{name}"]', f"target = {json.dumps(target)}", "batch = 4", "seq = 1024"]
        lines += [f"{key} = {json.dumps(value)}" for key, value in keys.items()]
    return "\n".join(lines) + "\n"


def main() -> int:
    asked = options("check", __doc__, PAGE, 3)
    with tempfile.TemporaryDirectory(prefix="memir-speed-") as folder:
        config = Path(folder) / "memir.toml"
        config.write_text(configuration())
        command = (PYTHON, "-m", "memir", "check", "--config", str(config))
        found: dict[str, list[tuple[float, float]]] = {"changed": [], "cached": []}
        try:
            for name in ("changed", "cached"):
                for number in range(asked.runs):
                    cache = str(Path(folder) / (f"cache-{number}" if name == "changed" else "cache-0"))
                    before = os.times()
                    done = run(command, {"MEMIR_CACHE_DIR": cache, "MEMIR_NO_CACHE": "", "HF_HUB_OFFLINE": "1"})
                    after = os.times()
                    spent = after.children_user + after.children_system - before.children_user - before.children_system
                    found[name].append((done.seconds, spent))
                    print(f"{name}: {done.seconds:.2f} s, {spent:.2f} s of processors", file=sys.stderr)
        except FailedError as error:
            print(error, file=sys.stderr)
            return 1
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    lines = [
        "# Speed of memir check",
        "",
        f"`python -m benchmarks.speed.check --runs {asked.runs} --save`, ten scenarios, medians.",
    ]
    lines += ["", "machine: " + ", ".join(f"{k} {v}" for k, v in machine().items()) + f"; load at the end {load}  "]
    lines += ["versions: " + ", ".join(f"{k} {v}" for k, v in versions().items()), ""]
    lines += ["| ten scenarios | seconds | seconds of processors | aim | met |", "|---|---|---|---|---|"]
    for name, runs in found.items():
        wall, spent = median(r[0] for r in runs), median(r[1] for r in runs)
        met = "yes" if wall <= AIMS[name] else "no"
        lines.append(f"| {name} | {wall:.2f} | {spent:.2f} | <= {AIMS[name]:g} s | {met} |")
    text = "\n".join(lines) + "\n"
    print(text)
    if asked.save:
        PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
