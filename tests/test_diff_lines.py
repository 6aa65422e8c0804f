"""Changed stretches of code: what is changed, what only moved or was renamed, where an unchanged line went."""

from __future__ import annotations

import pytest

from memir.diff.lines import compare_sources

BASE = '''\
"""A model."""
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 32)
        self.down = nn.Linear(32, 8)

    def forward(self, x):
        h = torch.relu(self.up(x))
        return self.down(h)
'''


def hunks(head: str, base: str = BASE) -> list[tuple[str, bool]]:
    """The head's text of each changed stretch, or the base's after a minus, and whether it is neutral."""
    sources = compare_sources([("a.py", base, "b.py", head)])
    found = []
    for hunk in sources.hunks:
        lines = [sources.text(hunk, n) for n in hunk.after] or [f"-{sources.text(hunk, n, removed=True)}" for n in hunk.before]
        found.append((" ".join(lines), hunk.neutral))
    return found


@pytest.mark.parametrize(
    ("old", "new", "text", "neutral"),
    [
        ("32)\n", "64)\n", "self.up = nn.Linear(8, 64)", False),
        ("h = torch.relu(self.up(x))", "h = torch.relu(self.up(x)).float()", "h = torch.relu(self.up(x)).float()", False),
        ("h = torch.relu", "h = torch.gelu", "h = torch.gelu(self.up(x))", False),
        ("h = torch.relu(", "self.h = torch.relu(", "self.h = torch.relu(self.up(x))", False),
        (
            "h = torch.relu(self.up(x))\n        return self.down(h)",
            "y = torch.relu(self.up(x))\n        return self.down(y)",
            "y = torch.relu(self.up(x)) return self.down(y)",
            True,
        ),
        ("h = torch.relu(self.up(x))", "u = self.up(x)\n        h = torch.relu(u)", "u = self.up(x) h = torch.relu(u)", True),
    ],
)
def test_a_change_of_meaning_is_told_from_a_new_name(old: str, new: str, text: str, neutral: bool) -> None:
    assert hunks(BASE.replace(old, new)) == [(text, neutral)]


def test_comments_and_docstrings_are_no_change() -> None:
    assert hunks(BASE.replace('"""A model."""', '"""A model.\n\nOf two layers.\n"""').replace("32)\n", "32)  # wide\n")) == [
        ("self.up = nn.Linear(8, 32)  # wide", True)
    ]
    assert hunks(BASE.replace("    def forward", "    # runs\n    def forward")) == []


def test_a_line_that_moved_within_its_function_is_neutral_and_one_that_left_it_is_not() -> None:
    up, down = "        self.up = nn.Linear(8, 32)\n", "        self.down = nn.Linear(32, 8)\n"
    assert [neutral for _, neutral in hunks(BASE.replace(up + down, down + up))] == [True, True]
    gone = BASE.replace(up, "").replace("        h = torch", up + "        h = torch")
    assert [neutral for _, neutral in hunks(gone)] == [False, False]


def test_lines_of_the_base_are_found_in_the_head() -> None:
    head = BASE.replace("import torch\n", "import math\n\nimport torch\n")
    sources = compare_sources([("a.py", BASE, "b.py", head)])
    assert sources.to_head("a.py:13") == "b.py:15"
    assert sources.to_head("torch/nn.py:3") == "torch/nn.py:3"  # a file that does not differ
    changed = compare_sources([("a.py", BASE, "b.py", BASE.replace("relu", "gelu"))])
    assert changed.to_head("a.py:13") == ""
    assert changed.to_head("a.py:14") == "b.py:14"


def test_text_that_is_no_python_is_compared_too() -> None:
    assert hunks("def (:\n", "x = 1\n") == [("def (:", False)]


def test_a_file_that_is_new_or_gone() -> None:
    (new,) = compare_sources([("m.py", None, "m.py", "x = 1\n")]).hunks
    (gone,) = compare_sources([("m.py", "x = 1\n", "m.py", None)]).hunks
    assert (list(new.after), list(gone.before)) == ([1], [1])
