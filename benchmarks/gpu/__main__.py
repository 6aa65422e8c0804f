"""`python -m benchmarks.gpu measure [--only WORD] [--snapshots FOLDER]`, `python -m benchmarks.gpu compare FILE.json`.

`measure` runs every case in a fresh process on the GPU of this machine and writes benchmarks/measured/GPU-torch-VERSION.json.
`compare` prints memir's predictions beside such a file; it needs no GPU. Exit code 2: no GPU here.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.gpu.cases import CASES, Case

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 120  # seconds a case


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("command", choices=("measure", "compare"))
    parser.add_argument("file", nargs="?", type=Path)
    parser.add_argument("--only", default="", metavar="WORD")
    parser.add_argument("--snapshots", type=Path, metavar="FOLDER", help="also dump a memory snapshot of one more step each")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "measured", metavar="FOLDER")
    options = parser.parse_args()
    if options.command == "compare":
        from benchmarks.gpu.compare import page

        if options.file is None:
            parser.error("compare needs a FILE.json")
        print(page(json.loads(options.file.read_text())), end="")
        return 0
    import torch

    if not torch.cuda.is_available():
        print("error: no CUDA device here; compare needs none", file=sys.stderr)
        return 2
    rows = [run(case, options.snapshots) for case in CASES if options.only in case.name]
    options.out.mkdir(parents=True, exist_ok=True)
    named = re.sub(r"[^a-z0-9.]+", "-", f"{torch.cuda.get_device_name()} torch {torch.__version__}".lower())
    path = options.out / f"{named}.json"
    path.write_text(json.dumps(rows, indent=1) + "\n")
    print(path)
    return 0


def run(case: Case, snapshots: Path | None) -> dict[str, Any]:
    """The case's figures, or what went wrong."""
    print(f"  {case.name}", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "benchmarks.gpu.child", case.name]
    if snapshots is not None:
        snapshots.mkdir(parents=True, exist_ok=True)
        command.append(str(snapshots / f"{re.sub('[^a-z0-9.]+', '-', case.name)}.pickle"))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    try:
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False)
    except subprocess.TimeoutExpired:
        return {"case": case.name, "error": f"took more than {LIMIT} seconds"}
    if done.returncode:
        return {"case": case.name, "error": (done.stderr.strip().splitlines() or ["no message"])[-1][:300]}
    row: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return row


if __name__ == "__main__":
    sys.exit(main())
