"""Work in a forked copy: the same answers as without, whatever happens to the copy."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest

from memir.frontend import beside
from memir.frontend.beside import Beside

HERE = os.getpid()


@pytest.fixture(params=[True, False], ids=["forked", "here"])
def fork(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Test runners have threads of their own; the copies of these tests need none of their locks."""
    monkeypatch.setattr(beside, "can_fork", lambda: hasattr(os, "fork") and hasattr(os, "sched_getaffinity"))
    return bool(request.param)


def test_results_come_in_order(fork: bool) -> None:
    tasks: list[Callable[[], object]] = [lambda: "first", lambda: {"second": os.getpid() == HERE}, lambda: "x" * 3_000_000]
    with Beside(tasks, fork=fork) as work:
        assert work.result(0) == "first"
        assert work.result(1) == {"second": not fork}
        assert len(str(work.result(2))) == 3_000_000  # more than a pipe holds


def test_what_fails_there_is_done_here(fork: bool) -> None:
    def ends() -> str:
        if os.getpid() != HERE:
            os._exit(7)
        return "here"

    def raises() -> str:
        raise ValueError("as it is")

    with Beside([lambda: "before", ends, raises], fork=fork) as work:
        assert work.result(0) == "before"
        assert work.result(1) == "here"
        with pytest.raises(ValueError, match="as it is"):
            work.result(2)


def test_the_copy_does_not_wait_for_threads_that_it_has_not() -> None:
    """OpenMP's threads, once started, are not copied by a fork. In a process of its own, since it would hang."""
    code = """if True:
        import torch
        from memir.frontend.beside import Beside
        torch.set_num_threads(2)
        torch.ones(1 << 20).add(1)
        with Beside([lambda: int(torch.ones(1 << 20).add(1).sum())], fork=True) as work:
            print(bool(work._child), work.result(0))
    """
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert ran.stdout.split()[-1] == str(2 << 20)


def test_what_cannot_be_pickled_is_done_here(fork: bool) -> None:
    with Beside([lambda: lambda: 3], fork=fork) as work:
        assert work.result(0)() == 3


def test_the_copy_is_gone_at_the_end(fork: bool) -> None:
    start = time.monotonic()
    with Beside([lambda: time.sleep(60 if os.getpid() != HERE else 0)], fork=fork) as work:
        child = work._child
    assert time.monotonic() - start < 30
    if child:
        with pytest.raises(ChildProcessError):
            os.waitpid(child, 0)


def test_nothing_is_forked_beside_other_threads() -> None:
    stop = threading.Event()
    other = threading.Thread(target=stop.wait)
    other.start()
    try:
        assert not beside.can_fork()
    finally:
        stop.set()
        other.join()
