"""One process, measured from outside: wall seconds from start to end, and the most memory that it had resident."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Run:
    """`peak` is the largest resident set in bytes; `stdout` what the process printed.

    Linux counts the process that starts another one towards the other one's peak until that runs its own program, so this
    module and who uses it import little.
    """

    seconds: float
    peak: int
    stdout: str


class FailedError(Exception):
    """A process that should have ended well did not."""


def run(command: Sequence[str], environment: Mapping[str, str]) -> Run:
    """Run a command in the repository's root, with `environment` over the present one. FailedError with its last words."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        start = time.perf_counter()
        process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **environment}, stdout=out, stderr=errors)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        errors.seek(0)
        if process.returncode:
            last = errors.read().decode(errors="replace").strip().splitlines()[-3:]
            raise FailedError(f"{' '.join(command)}: exit code {process.returncode}\n" + "\n".join(last))
        unit = 1 if sys.platform == "darwin" else 1024  # getrusage(2): bytes there, KiB on Linux
        return Run(seconds, usage.ru_maxrss * unit, out.read().decode())
