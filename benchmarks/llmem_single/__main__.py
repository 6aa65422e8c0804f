"""`python -m benchmarks.llmem_single [--save]`: LLMem's single-GPU rows beside memir; `--save` writes the results."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.llmem_single.facts import FACTS
from benchmarks.llmem_single.predict import predict
from benchmarks.llmem_single.table import csv_text, markdown
from benchmarks.pages import main

if __name__ == "__main__":
    folder = Path(__file__).resolve().parent
    sys.exit(main("benchmarks.llmem_single", __doc__, FACTS, lambda fact: [predict(fact)], csv_text, markdown, folder))
