"""A step's live bytes by cut, by the allocator's accounting: `python -m benchmarks.freeze.memory CUT`, a process each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from benchmarks.freeze.setting import CUTS, ROOT, real_step
from benchmarks.freeze.steps import freezing
from memir.runtime.real import measure


def memory(say: Callable[[str], None]) -> dict[str, Any]:
    """Bytes at the step's start, at its peak and at its end, and the operator that reaches the peak."""
    found = {}
    for cut in CUTS:
        say(f"memory: cut {cut}")
        command = [sys.executable, "-m", "benchmarks.freeze.memory", str(cut)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
        found[str(cut)] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    measured = measure(real_step(), freezing(int(sys.argv[1])))
    event = measured.peak_event()
    answer = {"at_start": measured.at_start, "peak": measured.peak, "at_end": measured.at_end, "op": event.op if event else ""}
    print(json.dumps(answer))
