"""Answers to what a model asks about values while it is traced.

Fake tensors have no values, but much of what models ask is known when a step is described: whether positions are
consecutive, whether a mask is all ones, how many tokens an expert gets under a balanced load. A question (`.item()`, `if
tensor.any()`, `nonzero`) is answered by replaying the integer operators that lead to it at several small (B, S)
(`memir.frontend.replay`) and generalizing: equal answers stay; numbers must be a polynomial in B and S that holds at a
further point too. Everything else is inconclusive, with the line that asked.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from fractions import Fraction
from functools import cache
from math import lcm
from typing import Any

import sympy
import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._python_dispatch import _disable_current_modes

from memir.errors import InconclusiveError
from memir.frontend.loaded import LoadedModel
from memir.frontend.origin import source_line
from memir.frontend.record import Recorder
from memir.frontend.replay import Replay, UnanswerableError, needed, routing_multiple
from memir.recipe import Recipe

aten = torch.ops.aten

BALANCED = "routing depends on data: traced with a balanced load (every expert gets the same share of the tokens)"
RANDOM_TOKENS = "where the model looks at token values, they are taken to be random"

Handler = Callable[[Recorder, Any, Any, Any], Any]


class Answers:
    """The recorder's interceptor: runs each operator, and answers those whose result depends on data."""

    def __init__(
        self, batch: dict[str, torch.Tensor], loaded: LoadedModel, recipe: Recipe, handlers: dict[Any, Handler]
    ) -> None:
        self.batch, self.mask, self.padded = batch, loaded.call.mask, recipe.batch_kind == "padded"
        first = next(iter(batch.values()))
        self.extents = dict(zip(("B", "S"), first.shape, strict=True))
        self.assumptions: list[str] = []
        self._inputs: dict[int, Any] = {}
        self._handlers: dict[Any, Handler] = {
            aten._local_scalar_dense.default: self._scalar,
            aten.equal.default: self._scalar,
            aten.is_nonzero.default: self._scalar,
            aten.nonzero.default: self._nonzero,
            aten.masked_select.default: self._masked_select,
            aten.index.Tensor: self._index,
            aten.repeat_interleave.Tensor: self._repeat_interleave,
            aten.bincount.default: self._bincount,
            aten._grouped_mm.default: _grouped_mm,
            **handlers,
        }

    def attach(self, recorder: Recorder) -> None:
        """A step begins: which of the recorder's storages are the batch."""
        self._inputs = {}
        for name, tensor in self.batch.items():
            index = recorder.live[tensor.untyped_storage()._cdata]
            self._inputs[index] = self._real_mask if name == self.mask else self._real_tokens

    def _real_mask(self, shape: list[int]) -> torch.Tensor:
        mask = torch.ones(shape, dtype=torch.long)
        if self.padded:
            mask[0, shape[-1] // 2 :] = 0
        return mask

    def _real_tokens(self, shape: list[int]) -> torch.Tensor:
        self._assume(RANDOM_TOKENS)
        return torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(0))

    def _assume(self, text: str) -> None:
        if text not in self.assumptions:
            self.assumptions.append(text)

    def __call__(self, recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs the operator, or answers it."""
        handler = self._handlers.get(func)
        if handler is not None:
            return handler(recorder, func, args, kwargs)
        if _writes_a_list(func) and all(tensor.constant is None for tensor in args[0]):
            return None  # no new tensor, and PyTorch's shape functions would look at each of a long list
        return func(*args, **kwargs)

    # -- the questions -------------------------------------------------------------------------------------------

    def _scalar(self, recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
        if getattr(args[0], "constant", None) is not None:
            return func(*args, **kwargs)
        if recorder.phase.endswith("optimizer") and args[0].is_floating_point():
            return 1.0  # an optimizer scales by it (torch/optim/_adafactor.py, the parameter's norm); memory does not follow it
        return self._ask(recorder, args, lambda tensors: func(*tensors, **kwargs))

    def _nonzero(self, recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
        count = self._ask(recorder, args, lambda tensors: int(tensors[0].count_nonzero()))
        # aten/src/ATen/native/TensorAdvancedIndexing.cpp, nonzero_out_cpu: the result has strides (1, n)
        return torch.empty_strided((count, args[0].dim()), (1, count), dtype=torch.long)

    def _masked_select(self, recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
        count = self._ask(recorder, [args[1]], lambda tensors: int(tensors[0].count_nonzero()))
        return torch.empty((count,), dtype=args[0].dtype)

    def _repeat_interleave(self, recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
        return torch.empty((self._ask(recorder, args, lambda tensors: int(tensors[0].sum())),), dtype=torch.long)

    def _bincount(self, recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
        least = args[2] if len(args) > 2 else kwargs.get("minlength", 0)
        length = self._ask(recorder, args[:1], lambda tensors: max(int(tensors[0].max()) + 1, least))
        return torch.empty((length,), dtype=torch.long)

    def _index(self, recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
        """`x[mask]`: a boolean index stands for the positions of its true elements."""
        indices: list[Any] = []
        for index in args[1]:
            if index is not None and index.dtype in (torch.bool, torch.uint8):
                count = self._ask(recorder, [index], lambda tensors: int(tensors[0].count_nonzero()))
                recorder.paused += 1
                indices += [torch.empty((count,), dtype=torch.long) for _ in range(index.dim())]
                recorder.paused -= 1
            else:
                indices.append(index)
        return func(args[0], indices, **kwargs)

    # -- the answers ---------------------------------------------------------------------------------------------

    def _ask(self, recorder: Recorder, args: Any, question: Callable[[list[torch.Tensor]], Any]) -> Any:
        """The answer to `question` about the real counterparts of the tensors, generalized over B and S."""
        values = [recorder.by_key[recorder._key(a, recorder.live[a.untyped_storage()._cdata])] for a in args]
        events = needed(recorder, values)
        m = routing_multiple(recorder, events)
        points = [(2, m), (3, m), (2, 2 * m), (4, 3 * m), (5, 4 * m)]
        if not isinstance(self.extents["B"], torch.SymInt):
            points = [(self.extents["B"], s) for _, s in points]
        if not isinstance(self.extents["S"], torch.SymInt):
            points = [(b, self.extents["S"]) for b, _ in points]
        answers = []
        recorder.paused += 1
        try:
            with unset_fake_temporarily(), _disable_current_modes(), torch.no_grad():
                for b, s in points:
                    replay = Replay(recorder, self._inputs, {"B": b, "S": s})
                    answers.append(question(replay.run(events, values)))
                    if replay.routed:
                        self._assume(BALANCED)
        except UnanswerableError as error:
            raise InconclusiveError(
                "the model's code decides by data that is unknown before it runs",
                where=f"{source_line(sys._getframe(1))}\n{error}",
            ) from error
        finally:
            recorder.paused -= 1
        if all(answer == answers[0] for answer in answers):
            return answers[0]
        generalized = _polynomial(points, answers)
        if generalized is None:
            raise InconclusiveError(
                f"an answer that the model asks for is no polynomial in B and S: {answers} at {points}",
                where=source_line(sys._getframe(1)),
            )
        scale = lcm(*(c.denominator for c in generalized))
        b, s = self.extents["B"], self.extents["S"]
        total = sum(int(c * scale) * term for c, term in zip(generalized, (1, b, s, b * s), strict=True) if c)
        return total if scale == 1 else total // scale


@cache
def _writes_a_list(func: Any) -> bool:
    """Whether it is a foreach operator that writes into the tensors of its first list and returns nothing."""
    return func.namespace == "aten" and func._opname.startswith("_foreach_") and not func._schema.returns


def _grouped_mm(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    """Grouped matrix product: PyTorch's shape function takes bf16 only, its kernels take others too.

    Rows are padded to 16 bytes: aten/src/ATen/native/GroupedMMUtils.h, `create_grouped_gemm_output_tensor`.
    """
    a, b, offsets = args[0], args[1], args[2] if len(args) > 2 else kwargs.get("offs")
    if a.dim() == 2:
        shape = [offsets.size(0), a.size(0), b.size(1)] if b.dim() == 2 else [a.size(0), b.size(-1)]
    else:
        shape = [a.size(1), b.size(1)] if b.dim() == 2 else [a.size(0), a.size(1), b.size(-1)]
    per_row = 16 // a.dtype.itemsize
    row = (shape[-1] + per_row - 1) // per_row * per_row
    strides = [row, 1] if len(shape) == 2 else [shape[1] * row, row, 1]
    return torch.empty_strided(shape, strides, dtype=a.dtype)


def _polynomial(points: list[tuple[int, int]], answers: list[Any]) -> list[Fraction] | None:
    """Coefficients of 1, B, S, B*S through the points; None where the answers are no whole numbers or do not lie on one."""
    if not all(isinstance(a, int) and not isinstance(a, bool) for a in answers):
        return None
    matrix = sympy.Matrix([[1, b, s, b * s] for b, s in points])
    augmented = matrix.row_join(sympy.Matrix(answers))
    if matrix.rank() != augmented.rank():
        return None
    reduced, pivots = augmented.rref()
    coefficients = [Fraction(0)] * 4
    for row, pivot in enumerate(pivots):
        coefficients[pivot] = Fraction(int(reduced[row, 4].p), int(reduced[row, 4].q))
    return coefficients
