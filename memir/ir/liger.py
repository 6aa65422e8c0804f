"""Workspace of Liger's fused linear cross entropy, whose loop over chunks of tokens is one operator here.

Source: Liger-Kernel, src/liger_kernel/ops/fused_linear_cross_entropy.py, `fused_linear_cross_entropy_forward`, at v0.8.2 and
v0.4.2. Of BT tokens, hidden size H and vocabulary V: inc_factor = ceil(V/H), a chunk has next_power_of_2(ceil(BT/inc_factor))
rows, and its logits are made, turned into their gradient in place, and multiplied into the gradients of input and weight.
What is alive at once, by the loop's variables:

- while a chunk's logits are made, the ones of the chunk before (`grad_logits_chunk` still names them);
- while a chunk's gradient of the input is made, [rows, H], the same two (0.8.1 and newer: `grad_logits_t` names the old ones);
- while the weight's gradient is added up: one matrix [V, H] in the logits' type and its copy in fp32 (0.6.2 and newer, where
  the sum is not in fp32; with fp32 accumulation `addmm` adds in place on GPUs of compute capability 8.0 or more);
- 0.4.2: a chunk's logits in their type and in fp32, beside the gradient of the chunk before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from memir.ir.core import Value
from memir.ir.dtypes import ITEMSIZE
from memir.ir.size import ZERO, Size, ceil_div, max_of, min_of, pow2_of

Scratch = Callable[[Sequence[Value], Sequence[Value]], Size]


def chunk_rows(tokens: Size, vocabulary: int, hidden: int) -> Size:
    """next_power_of_2(ceil(tokens/ceil(vocabulary/hidden)))."""
    return pow2_of(ceil_div(tokens, -(-vocabulary // hidden)))


def _two_chunks(tokens: Size, vocabulary: int, hidden: int) -> tuple[Size, Size]:
    """Rows of the first and of the second chunk; the latter is 0 where there is one only.

    With a factor of 2 or more the first has at most BT rows, with 4 or more as many are left for the second.
    """
    factor = -(-vocabulary // hidden)
    if factor == 1:
        return tokens, ZERO
    first = chunk_rows(tokens, vocabulary, hidden)
    if tokens.is_constant or factor < 4:
        return first, min_of(first, tokens - first)
    return first, first  # a batch of one token is traced with numbers


def _loop(operands: Sequence[Value], results: Sequence[Value], release: str, wide: bool) -> Size:
    """Bytes beside the results. Operands: input [BT, H], weight [V, H], targets; results: loss, grad_input, grad_weight."""
    given, weight = operands[0], operands[1]
    tokens, hidden, vocabulary = given.shape[0], given.shape[1].constant, weight.shape[0].constant
    first, second = _two_chunks(tokens, vocabulary, hidden)
    width = ITEMSIZE[given.dtype]
    logits, row, matrix = vocabulary * width, hidden * width, vocabulary * hidden
    always = tokens * 5  # the loss of each token in fp32, and the mask of ignored ones
    if release == "0.4":
        upcast = 0 if width == 4 else 4 * vocabulary
        alone = first * (logits + max(upcast, logits, row))
        return always + _largest([alone, (second + 2 * first) * logits, second * (logits + upcast) + first * logits])
    trained = len(results) > 2
    making = second * logits + (second * row + first * logits if trained else max_of(second * row, first * logits))
    moments = [making, first * (logits + row)]
    if trained and not wide:
        moments.append(first * logits + matrix * (width if width == 4 else width + 4))
    if trained and wide and width < 4:  # the sum is apart from the result, which is made at the end
        moments = [moment + matrix * (4 - width) for moment in moments]
        moments.append(first * logits + matrix * 4)
    return always + _largest(moments)


def _largest(sizes: Sequence[Size]) -> Size:
    """The maximum, without those that another one contains term by term."""
    kept = [s for s in dict.fromkeys(sizes) if not any(o is not s and (o - s).is_nonnegative for o in sizes)]
    most = kept[0]
    for size in kept[1:]:
        most = max_of(most, size)
    return most


def _rule(release: str, wide: bool) -> Scratch:
    return lambda operands, results: _loop(operands, results, release, wide)


RULES: dict[tuple[str, str], Scratch] = {
    ("cuda", "liger.fused_linear_cross_entropy"): _rule("0.8", False),
    ("cuda", "liger.fused_linear_cross_entropy_fp32"): _rule("0.8", True),
    ("cuda", "liger.fused_linear_cross_entropy_0_4"): _rule("0.4", False),
}
