"""Bytes that an operator reads and writes, where the operator's results do not tell: what is written in place."""

from __future__ import annotations

# In-place operators over lists have no results in a program. Their operands are so many lists of equal length, one after the
# other, of which these are written (native_functions.yaml: the first is `self`; _fused_adam_ has parameters, gradients, both
# states and the steps, and writes all but the gradients). One that is not listed here has one list.
_LISTS: dict[str, tuple[int, tuple[int, ...]]] = {
    "_foreach_addcmul_": (3, (0,)),
    "_foreach_addcdiv_": (3, (0,)),
    "_foreach_lerp_": (2, (0,)),
    "_foreach_copy_": (2, (0,)),
    "_fused_adamw_": (5, (0, 2, 3)),
    "_fused_adam_": (5, (0, 2, 3)),
    "_fused_sgd_": (2, (0,)),
}
_TWO_LISTS = ("List", "TensorList")  # overloads of _foreach_add_, _foreach_mul_, ...


def written(opcode: str, count: int) -> list[int]:
    """Positions of the operands, `count` of them, that an operator without results writes; none if it writes nothing."""
    parts = opcode.split(".")
    name = parts[1] if len(parts) > 1 else ""
    if not name.endswith("_"):
        return []
    lists, which = _LISTS.get(name, (2 if parts[-1] in _TWO_LISTS else 1, (0,)))
    each = count // lists
    return [k * each + i for k in which for i in range(each)]
