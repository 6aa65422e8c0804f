"""What holds for every test: nothing is downloaded, one thread a worker, golden files are rewritten only with --bless."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("memir", deadline=None, derandomize=True, print_blob=True)  # never timed, the same every time
settings.load_profile("memir")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["COLUMNS"] = "80"  # the width that click wraps help to
os.environ["MEMIR_NO_CACHE"] = "1"  # tests trace, and leave the user's cache alone; those of the cache turn it on (`cached`)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--bless", action="store_true", help="write what is printed now into the golden files")
    parser.addoption("--whole", action="store_true", help="grids of models and recipes whole, which takes minutes more")


@pytest.fixture
def cached(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Traced programs are kept, in a folder of this test."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.delenv("MEMIR_NO_CACHE")
    monkeypatch.setenv("MEMIR_CACHE_DIR", str(folder))
    monkeypatch.setattr("memir.cache.store._SAID", set())
    for module in ("environment", "watch"):  # whoever edits memir while its tests run: what is imported is what lies there
        monkeypatch.setattr(f"memir.cache.{module}.process_started", lambda: 1 << 62)
    return folder


@pytest.fixture
def bless(request: pytest.FixtureRequest) -> bool:
    """Whether golden files are to be rewritten."""
    return bool(request.config.getoption("--bless"))
