"""AutoFreeze and its cache in two real processes with gloo: the same decisions, the same weights, less to reduce."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What both ranks ended with: a plain loop, one with a cache, the Trainer with a cache; all in one pair of processes."""
    folder = tmp_path_factory.mktemp("ddp")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}  # of the Trainer
    processes = [
        subprocess.Popen(
            [sys.executable, str(ROOT / "tests" / "freezing_ddp.py"), str(rank), str(folder)],
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    errors = [process.communicate(timeout=240)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(errors)
    one, other = (json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1))
    return {kind: [one[kind], other[kind]] for kind in one}


def test_both_ranks_freeze_the_same_and_stay_equal(runs: dict[str, list[dict[str, Any]]]) -> None:
    for one, other in runs.values():
        assert one["cuts"] == other["cuts"]
        assert one["cuts"][-1] == one["num_layers"] - 1
        assert one["digest"] == other["digest"]


def test_only_what_still_trains_is_reduced(runs: dict[str, list[dict[str, Any]]]) -> None:
    for one, other in runs.values():
        assert one["reduced_bytes"] == one["trained_bytes"] == other["reduced_bytes"]


def test_activations_that_another_rank_wrote_give_the_same_weights(runs: dict[str, list[dict[str, Any]]]) -> None:
    """Every epoch deals the samples anew, so a rank needs what the other one has written."""
    assert runs["cached"][0]["digest"] == runs["plain"][0]["digest"]
    for kind in ("cached", "trainer"):
        assert [rank["problem"] for rank in runs[kind]] == ["", ""]
        assert all(rank["hits"] for rank in runs[kind])
