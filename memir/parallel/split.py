"""Which layers each pipeline stage has."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from memir.errors import UsageError

HEAVY = 1  # the layers that the embedding counts as, and the head


def balanced(depth: int, stages: int) -> tuple[int, ...]:
    """The first layer of each stage but the first, as torchtitan splits a decoder of `depth` layers.

    The embedding counts as a layer on the first stage, norm and head as one on the last; earlier stages get what is left over
    (torchtitan/distributed/pipeline_parallel.py, `generate_llm_fqn_per_model_part`); with few layers the first stage is the
    embedding alone. UsageError where a stage would be empty.
    """
    least, more = divmod(depth + 2 * HEAVY, stages)
    if least < HEAVY:
        message = f"pipeline-parallel: {depth} layers do not fill {stages} stages"
        raise UsageError(message, hint=f"at most {depth + 2 * HEAVY} stages, or more layers")
    sizes = [least + (stage < more) for stage in range(stages)]
    sizes[0] -= HEAVY
    return tuple(sum(sizes[:stage]) for stage in range(1, stages))


def given(cuts: Sequence[int], depth: int, stages: int) -> tuple[int, ...]:
    """`cuts` as they are. UsageError where they are not `stages` - 1 rising numbers of layers within the model.

    The first stage may be the embedding alone, and the last the head.
    """
    if len(cuts) != stages - 1:
        message = f"pipeline-parallel: {stages} stages have {stages - 1} first layers after the first, and at= has {len(cuts)}"
        raise UsageError(message, hint=f"at={','.join(map(str, balanced(depth, stages)))}")
    if any(a >= b for a, b in pairwise(cuts)) or cuts[0] < 0 or cuts[-1] > depth:
        message = f"pipeline-parallel: at={','.join(map(str, cuts))} leaves a stage without layers, of {depth}"
        raise UsageError(message, hint=f"at={','.join(map(str, balanced(depth, stages)))}")
    return tuple(cuts)
