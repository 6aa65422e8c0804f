"""`python -m benchmarks.gpu.child NAME [SNAPSHOT]`: runs one case in this process; its figures as JSON are the last line."""

from __future__ import annotations

import json
import sys

import torch

from benchmarks.gpu.cases import CASES
from benchmarks.gpu.meter import Meter
from memir.runtime.real import RealStep, builder


def main(name: str, snapshot: str = "") -> None:
    case = next(case for case in CASES if case.name == name)
    meter = Meter(torch.cuda)  # type: ignore[arg-type]  # a module with these functions
    step = builder(RealStep(case.preset, case.recipe, case.batch, case.seq, case.sets), on_phase=meter.on_phase)()
    figures = meter.measure(step)
    if snapshot:
        torch.cuda.memory._record_memory_history(max_entries=1_000_000)
        step()
        torch.cuda.synchronize()
        torch.cuda.memory._dump_snapshot(snapshot)
    properties = torch.cuda.get_device_properties(0)
    facts = {
        "case": name,
        "gpu": properties.name,
        "compute": f"{properties.major}.{properties.minor}",
        "total": properties.total_memory,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
    print(json.dumps({**facts, **figures.as_dict()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
