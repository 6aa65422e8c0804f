"""AutoFreeze and its cache in two real processes with gloo: the same decisions, the same weights, less to reduce."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent


def run_two(folder: Path, kind: str) -> list[dict[str, Any]]:
    folder.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "tests" / "freezing_ddp.py")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen([*command, str(r), str(folder), kind], env=environment, **pipes) for r in (0, 1)]
    ended = [process.communicate(timeout=240) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(errors for _, errors in ended)
    return [json.loads(printed) for printed, _ in ended]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("ddp")
    return {kind: run_two(folder / kind, kind) for kind in ("cached", "plain")}


def test_both_ranks_freeze_the_same_and_stay_equal(runs: dict[str, list[dict[str, Any]]]) -> None:
    for one, other in runs.values():
        assert one["cuts"] == other["cuts"]
        assert one["cuts"][-1] == 3
        assert one["digest"] == other["digest"]


def test_only_what_still_trains_is_reduced(runs: dict[str, list[dict[str, Any]]]) -> None:
    for rank in (*runs["cached"], *runs["plain"]):
        assert rank["reduced_bytes"] == rank["trained_bytes"]


def test_activations_that_another_rank_wrote_give_the_same_weights(runs: dict[str, list[dict[str, Any]]]) -> None:
    """Every epoch deals the samples anew, so a rank needs what the other one has written."""
    assert [rank["problem"] for rank in runs["cached"]] == ["", ""]
    assert all(rank["hits"] for rank in runs["cached"])
    assert {rank["digest"] for ranks in runs.values() for rank in ranks} == {runs["plain"][0]["digest"]}
