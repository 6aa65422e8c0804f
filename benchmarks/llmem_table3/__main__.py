"""`python -m benchmarks.llmem_table3 [--save]`: LLMem's choices on four GPUs beside memir's; `--save` writes the results."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.llmem_table3.facts import FACTS
from benchmarks.llmem_table3.predict import cells
from benchmarks.llmem_table3.table import csv_text, markdown
from benchmarks.pages import main

if __name__ == "__main__":
    folder = Path(__file__).resolve().parent
    sys.exit(main("benchmarks.llmem_table3", __doc__, FACTS, cells, csv_text, markdown, folder))
