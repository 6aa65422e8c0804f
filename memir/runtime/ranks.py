"""One training step for real on several CPU ranks: gloo, a process a rank, a distributed method of PyTorch's applied.

`measure_ranks` gives what each rank's allocator saw (`memir.runtime.measure`). Every rank has the same random weights and a
batch of its own of the size asked for.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from memir.errors import InconclusiveError, MemirError, UsageError
from memir.frontend.parallel import parse_methods
from memir.frontend.parallel.method import Method, Model, around_step, make_mesh, make_step, world_size
from memir.frontend.quiet import quiet
from memir.recipe import Recipe
from memir.runtime.collectives import BACKEND, register_backend
from memir.runtime.measure import BuildStep, Measured, measure_cpu
from memir.runtime.real import RealStep, import_libraries, kernel_of, load_real, real_batch

TIME_LIMIT = 600.0  # seconds, for all ranks together
_LINES = 12  # of a failed rank's stderr
_CONSEQUENCE = ("Connection closed by peer", "Connection reset by peer", "timed out waiting")  # of another rank's end


@dataclass(frozen=True, slots=True)
class RankRequest:
    """What one rank is asked: the step, the methods, and how many ranks there are."""

    real: RealStep
    methods: tuple[Method, ...]
    world: int
    time_limit: float


def real_ranks(
    target: str,
    recipe: Recipe,
    batch: int,
    seq: int,
    sets: Mapping[str, str] | None = None,
    method: str | tuple[Method, ...] = (),
    world: int | None = None,
    *,
    inputs: str | None = None,
    time_limit: float = TIME_LIMIT,
) -> tuple[Measured, ...]:
    """The real step of TARGET under a method (`"fsdp{degree=2}"`), measured on each rank, rank 0 first.

    `world` is the method's own number of ranks where it is not given. The recipe's target becomes the CPU.
    Raises what `measure_ranks` raises.
    """
    methods = parse_methods(method) if isinstance(method, str) else method
    return measure_ranks(RealStep(target, recipe, batch, seq, dict(sets or {}), inputs), methods, world, time_limit)


def measure_ranks(
    real: RealStep, methods: tuple[Method, ...], world: int | None = None, time_limit: float = TIME_LIMIT
) -> tuple[Measured, ...]:
    """Runs the step in a fresh process a rank; what each measured, by rank.

    UsageError: the methods' mesh is not of `world` ranks, a target that is not the CPU, or what a rank says of the user's
    input. InconclusiveError: a rank died (with the end of its stderr) or the time limit (in seconds) passed. No process
    outlives the call.
    """
    needed = world_size(methods)
    if real.device != "cpu":
        raise UsageError(f"ranks run on the CPU, and the recipe's target is {real.device}", hint="--target cpu")
    if world is not None and world != needed:
        raise UsageError(f"the method has {needed} ranks, not {world}")
    with tempfile.TemporaryDirectory(prefix="memir-ranks-") as name:
        folder = Path(name)
        (folder / "request").write_bytes(pickle.dumps(RankRequest(real, methods, needed, time_limit)))
        ranks = [_start(folder, rank) for rank in range(needed)]
        try:
            late = _wait(ranks, folder, time_limit)
        finally:
            for child in ranks:
                child.kill() if child.poll() is None else None
                child.wait()
        return _answers(folder, ranks, f"not finished after {time_limit:g} seconds" if late else "")


def _start(folder: Path, rank: int) -> subprocess.Popen[bytes]:
    with (folder / f"stderr{rank}").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "memir.runtime.rank_child", str(folder), str(rank)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log,
            env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        )


def _wait(ranks: list[subprocess.Popen[bytes]], folder: Path, time_limit: float) -> bool:
    """Until all have ended, or a while after one has failed; whether the time limit passed instead."""
    end = time.monotonic() + time_limit
    failed_at = 0.0
    while any(child.poll() is None for child in ranks):
        now = time.monotonic()
        if now > end:
            return not failed_at
        if not failed_at and any(child.poll() not in (None, 0) for child in ranks):
            failed_at, end = now, min(end, now + 3.0)  # the others mostly fail of it: let them say so
        time.sleep(0.05)
    return False


def _answers(folder: Path, ranks: list[subprocess.Popen[bytes]], late: str) -> tuple[Measured, ...]:
    outcomes: dict[int, Any] = {}
    for rank in range(len(ranks)):
        file = folder / f"measured{rank}"
        outcomes[rank] = pickle.loads(file.read_bytes()) if file.exists() else None
    told = [outcome for outcome in outcomes.values() if isinstance(outcome, MemirError)]
    if told:
        raise told[0]
    missing = [rank for rank, outcome in outcomes.items() if outcome is None]
    if missing:
        logs = {rank: (folder / f"stderr{rank}").read_text(errors="replace").strip() for rank in missing}
        first = min(missing, key=lambda rank: (not logs[rank], any(text in logs[rank] for text in _CONSEQUENCE), rank))
        raise InconclusiveError(
            f"rank {first} of {len(ranks)} ended without a result ({late or f'exit code {ranks[first].returncode}'})",
            where="\n".join(logs[first].splitlines()[-_LINES:]),
            hint="out of memory?  a smaller batch or sequence, or fewer ranks"
            if ranks[first].returncode == -9 and not late
            else "",
        )
    return tuple(outcomes[rank] for rank in range(len(ranks)))


def answer_rank(folder: Path, rank: int) -> None:
    """A rank's side: reads the request in `folder`, and leaves a Measured or a MemirError there."""
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    request: RankRequest = pickle.loads((folder / "request").read_bytes())
    outcome: Measured | MemirError
    try:
        outcome = _measure(request, folder, rank)
    except MemirError as error:
        outcome = error
    except Exception:  # the process's boundary: the parent shows the end of it
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    written = folder / f"writing{rank}"
    written.write_bytes(pickle.dumps(outcome))
    written.rename(folder / f"measured{rank}")
    sys.stderr.flush()
    os._exit(0 if isinstance(outcome, Measured) else 1)  # no destructor of a process group waits for the other ranks


def _end_with(parent: int) -> None:
    """Ends this process when its parent is gone, which then cannot end it."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def _measure(request: RankRequest, folder: Path, rank: int) -> Measured:
    torch.set_num_threads(1)  # kernels' scratch grows with the threads (docs/memory-model.md)
    register_backend()
    dist.init_process_group(
        BACKEND,
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=request.world,
        timeout=timedelta(seconds=request.time_limit),
    )
    with quiet():
        import_libraries(request.real.recipe)
        mesh = make_mesh(request.methods)  # before the profiler: groups and their bookkeeping are no step's
        measured = measure_cpu(rank_builder(request.real, request.methods, mesh))
        dist.barrier()
    return measured


def rank_builder(real: RealStep, methods: tuple[Method, ...], mesh: DeviceMesh) -> BuildStep:
    """What `measure_cpu` calls on each rank: it makes the model, applies the methods, and returns the step."""

    def build() -> Callable[[], object]:
        loaded, module = load_real(real)
        batch = real_batch(loaded, real)
        step = make_step(methods, Model(loaded, module, real.recipe), mesh, batch)

        def run() -> None:
            with kernel_of(real), around_step(methods):
                step()

        return run

    return build
