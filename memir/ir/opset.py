"""What an operator means: the single table that lowering, passes, FLOPs and the verifier read.

Workspace (`scratch`) is alive only while the operator runs, on top of its results; each rule names its source in PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from memir.ir.core import Value
from memir.ir.size import ZERO, Size

Scratch = Callable[[Sequence[Value], Sequence[Value]], Size]  # (operands, results) -> bytes

_SCRATCH: dict[tuple[str, str], Scratch] = {}


def scratch_of(target: str, opcode: str, operands: Sequence[Value], results: Sequence[Value]) -> Size:
    """Bytes of workspace that the target's kernel takes beside its results; 0 where no rule is known."""
    rule = _SCRATCH.get((target, opcode))
    return rule(operands, results) if rule is not None else ZERO
