"""One fresh process for every case, forked from a server that has imported the libraries and done nothing else."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar
from unittest import mock

Task = TypeVar("Task")
Result = TypeVar("Result")

_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}


def each_in_fresh_process(work: Callable[[Task], Result], tasks: Sequence[Task], jobs: int) -> Iterator[Result]:
    """`work(task)` for every task, in order, each in a process that has run nothing else; `jobs` at a time.

    The processes have one thread each, and what libraries write to stderr is dropped: `work` returns its errors.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.accuracy_cpu.preload"])
    with mock.patch.dict(os.environ, _ENVIRONMENT), context.Pool(jobs, initializer=_silence, maxtasksperchild=1) as pool:
        yield from pool.imap(work, tasks)


def _silence() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
