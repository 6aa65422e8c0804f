"""The pictures that examples draw without matplotlib."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    spec = importlib.util.spec_from_file_location("attention_kernels", ROOT / "examples" / "attention_kernels.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CURVES = {"flash": [(512, 1.0), (1024, 2.0)], "efficient": [(512, 1.0), (1024, 2.25)], "eager": [(512, 1.5), (1024, 5.0)]}


def test_the_picture_has_a_line_for_each_kernel_within_its_frame(kernels: ModuleType) -> None:
    picture = ElementTree.fromstring(kernels.svg(CURVES, "peak"))
    lines = [element for element in picture if element.tag.endswith("polyline")]
    assert len(lines) == 3
    places = [tuple(map(float, pair.split(","))) for line in lines for pair in str(line.get("points")).split()]
    assert len(places) == 6
    assert all(0 <= x <= 640 and 0 <= y <= 400 for x, y in places)
    assert places[1][1] > places[-1][1]  # eager is the higher one
    assert [e.text for e in picture if e.tag.endswith("text")][-3:] == list(CURVES)


def test_the_table_has_a_line_for_each_length(kernels: ModuleType) -> None:
    assert kernels.table(CURVES).splitlines()[-1].split() == ["1,024", "2.00", "2.25", "5.00"]
