"""The process of one rank, `python -m memir.runtime.rank_child FOLDER RANK`; `memir.runtime.ranks` starts it."""

from __future__ import annotations

import sys
from pathlib import Path

from memir.runtime.ranks import answer_rank

if __name__ == "__main__":
    answer_rank(Path(sys.argv[1]), int(sys.argv[2]))
