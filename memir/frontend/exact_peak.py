"""A rank's step by PyTorch's own FSDP2 and DTensor: passes as the methods that `trace_rank` applies."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from memir.errors import InconclusiveError, MemirError, UsageError
from memir.frontend.exact import trace_rank
from memir.frontend.loaded import LoadedModel
from memir.frontend.parallel import parse_methods
from memir.frontend.parallel.method import Method
from memir.frontend.trace import Progress
from memir.ir.core import Program
from memir.recipe import Recipe

_PASS = re.compile(r"[\w-]+(?:\{[^}]*\})?")
_CHECKPOINT = "activation-checkpoint"
_OF_THE_PASS = re.compile(r"\s*\bplaced-gradients\b")  # DTensor and FSDP do so by themselves
SOME = 2  # micro-batches: more of them are alike


def exact_step(
    load: Callable[[Recipe], LoadedModel],
    recipe: Recipe,
    passes: str,
    batch: int,
    seq: int,
    progress: Progress = lambda _: None,
) -> Program:
    """The step of rank 0 under the methods that the text of the passes names; B and S are numbers in it.

    UsageError: what PyTorch's own code cannot be traced for. InconclusiveError: it was tried, and ended otherwise.
    """
    methods, checkpoints = as_methods(passes)
    recipe = replace(recipe, accumulate=min(recipe.accumulate, SOME), checkpoint="full" if checkpoints else recipe.checkpoint)
    try:
        return trace_rank(lambda: load(recipe), recipe, methods, batch, seq, progress=progress).program
    except MemirError:
        raise
    except Exception as error:  # PyTorch's own code on fake tensors: whatever it raises, there is no number
        said = (str(error).splitlines() or [""])[0]
        raise InconclusiveError(f"PyTorch's own code cannot be traced here: {type(error).__name__}: {said}") from error


def as_methods(passes: str) -> tuple[tuple[Method, ...], bool]:
    """The methods, and whether every layer is checkpointed. UsageError for passes that are none of PyTorch's own."""
    words, checkpoints = [], False
    for word in _PASS.findall(passes):
        if word == _CHECKPOINT:
            checkpoints = True
        elif word.startswith(_CHECKPOINT):
            raise UsageError(f"{word}: only checkpointing of every layer is traced with PyTorch's own methods")
        else:
            words.append(_OF_THE_PASS.sub("", word))
    if not words:
        raise UsageError("one GPU: there is no distributed method to trace")
    return parse_methods(",".join(words)), checkpoints
