"""The process in which a step is measured, `python -m memir.runtime.child`; `memir.runtime.real` starts it."""

from __future__ import annotations

import sys

from memir.runtime.real import answer_request

if __name__ == "__main__":
    answer_request(sys.stdin.buffer.read())
