"""What goes wrong inside the user's model while it is traced, told with the user's own line."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from memir.errors import InconclusiveError, MemirError, UsageError
from memir.frontend.fake import Extent
from memir.frontend.loaded import LoadedModel
from memir.frontend.origin import is_users, shown_path


def user_frame(error: BaseException) -> str:
    """`model.py:170   assert t <= self.config.block_size`: the innermost line of the user's code in the traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    for frame in reversed(frames):
        if is_users(frame.filename):
            return f"{shown_path(frame.filename)}:{frame.lineno}   {frame.line or ''}".rstrip()
    return ""


@contextmanager
def explained(loaded: LoadedModel, batch: Extent, seq: Extent) -> Iterator[None]:
    """Exceptions of the model's code become errors for people. PyTorch's fake tensors tell what they cannot follow."""
    try:
        yield
    except MemirError:
        raise
    except (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode) as error:
        raise InconclusiveError(
            f"{loaded.name} decides by data that is unknown before it runs: {_first_line(error)}", where=user_frame(error)
        ) from error
    except (UnsupportedOperatorException, UnsupportedFakeTensorException) as error:
        raise InconclusiveError(
            f"an operator without a fake implementation: {_first_line(error)}",
            where=user_frame(error),
            hint="memir cannot know the shapes it returns; register one with torch.library.register_fake",
        ) from error
    except Exception as error:  # the boundary to the user's code: anything can come out of it
        text = f"{type(error).__name__}: {_first_line(error)}" if not isinstance(error, AssertionError) else _first_line(error)
        hint = f"B was {batch.value}, S was {seq.value}"
        if loaded.max_seq is not None and seq.value > loaded.max_seq:
            hint += f"; the model's limit is {loaded.max_seq}.  Try  -s {loaded.max_seq}"
        where = "\n".join(filter(None, [user_frame(error), text]))
        if _is_fake_failure(error):
            raise InconclusiveError(f"{loaded.name} cannot be traced without data", where=where, hint=hint) from error
        raise UsageError(f"forward() of {loaded.name} fails on ids of shape [B, S]", where=where, hint=hint) from error


def _is_fake_failure(error: Exception) -> bool:
    """Whether tracing, not the model, is the reason: a value was asked for, or fake and real tensors met."""
    text = str(error)
    words = ("fake tensor", "FakeTensor", "data-dependent", "unbacked", "meta tensor", "storage", "data_ptr", ".numpy()")
    return any(word in text for word in words)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
