"""The memory IR: types, sizes, text form, verifier, unrolling."""

from memir.ir.core import Kind, Op, Phase, Program, Repeat, Storage, Value
from memir.ir.parser import parse
from memir.ir.printer import to_text
from memir.ir.size import Size

__all__ = ["Kind", "Op", "Phase", "Program", "Repeat", "Size", "Storage", "Value", "parse", "to_text"]
