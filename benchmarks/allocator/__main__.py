"""`python -m benchmarks.allocator FILE...`: recorded memory snapshots played again; exit code 1 where one goes another way."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.allocator.replay import replay
from memir.allocator.settings import parse_settings
from memir.errors import UsageError
from memir.recorded.recording import parse_recording
from memir.recorded.unpickle import read_pickle

MAX_DEVICES = 16


def main() -> int:
    """Print a row for every device that a file has a history of."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.allocator", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="what torch.cuda.memory._dump_snapshot wrote")
    print("| recording | device | events | allocations | elsewhere | segments | others | failures | others | same layout |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|---|")
    agree = True
    for path in parser.parse_args().files:
        try:
            root = read_pickle(path)
        except UsageError as error:
            print(error.render(), file=sys.stderr)
            agree = False
            continue
        conf = root.get("allocator_settings", {}).get("PYTORCH_CUDA_ALLOC_CONF", "") if isinstance(root, dict) else ""
        for device in range(MAX_DEVICES):
            try:
                recording = parse_recording(root, str(path), device)
                found = replay(recording, parse_settings(conf))
            except UsageError as error:
                if device == 0:
                    print(error.message, file=sys.stderr)
                continue
            agree &= found.agrees
            figures = (found.num_requests, found.num_elsewhere, found.num_segments, found.num_other_segments)
            figures = (len(recording.events), *figures, found.num_failures, found.num_other_failures)
            cells = " | ".join(f"{figure:,}" for figure in figures)
            print(f"| {path.name} | {device} | {cells} | {'yes' if found.is_same_layout else 'no'} |")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
