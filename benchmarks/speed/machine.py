"""What was measured on: the machine and the versions."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
from collections.abc import Sequence
from pathlib import Path


def machine() -> dict[str, str]:
    """Cores, memory, CPU model, system."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "CPU": _cpu(),
        "cores": str(os.cpu_count()),
        "RAM": f"{memory / 2**30:.0f} GiB",
        "system": f"{platform.system()} {platform.machine()}",
    }


def versions() -> dict[str, str]:
    """Of Python, memir and what it is built on."""
    packages = ("memir", "torch", "transformers", "sympy", "click")
    return {"Python": platform.python_version(), **{name: importlib.metadata.version(name) for name in packages}}


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return " ".join(line.partition(":")[2].split())
    return platform.processor() or "unknown"


def options(name: str, about: str | None, saved: Path, runs: int) -> argparse.Namespace:
    """`--runs` and `--save` of a benchmark that writes one page."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.speed.{name}", description=about)
    parser.add_argument("--runs", type=int, default=runs, metavar="N")
    parser.add_argument("--save", action="store_true", help=f"write {saved.name}")
    return parser.parse_args()


def page(title: str, intro: str, rows: Sequence[str]) -> str:
    """A page of measurements: what was run, where, with what, and a table's rows."""
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    lines = [
        f"# {title}",
        "",
        intro,
        "",
        "machine: " + ", ".join(f"{k} {v}" for k, v in machine().items()) + f"; load at the end {load}  ",
        "versions: " + ", ".join(f"{k} {v}" for k, v in versions().items()),
        "",
        *rows,
    ]
    return "\n".join(lines) + "\n"
