"""Losses that never hold all logits: the output head and the cross entropy after it are replaced by one function.

- fused-linear: Liger's fused linear cross entropy, one operator (its loop and workspace: memir.ir.liger). The gradients are
  computed in forward and kept for backward (Liger-Kernel, src/liger_kernel/ops/fused_linear_cross_entropy.py,
  `LigerFusedLinearCrossEntropyFunction`). The gradient of the weight has the weight's type; `-fp32` sums it up in fp32.
- chunked: torchtune's `CEWithChunkedOutputLoss` (torchtune/modules/loss/ce_chunked_output_loss.py): the hidden states in 8
  chunks of the sequence, each with its own logits, which are widened to fp32 one after another.

The head gives `Logits`, which hold its input until `F.cross_entropy` takes them: that is what both packages make of a model
(LigerForCausalLMLoss, torchtune's `set_num_output_chunks`). Between the two a model may only take the shape of the logits,
shift and flatten them; one that computes with them is refused.
"""

from __future__ import annotations

import builtins
import functools
import importlib
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (the name everybody uses)
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from memir.errors import UsageError
from memir.frontend.loaded import LoadedModel
from memir.recipe import Recipe

CHUNKS = 8  # CEWithChunkedOutputLoss, num_output_chunks


def _operator(name: str) -> Any:
    def fused(x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, trained: bool) -> list[torch.Tensor]:
        """The loss, the gradient of x and, where the weight is trained, that of the weight."""
        raise RuntimeError("memir's operators describe memory; they are never run")

    def described(x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, trained: bool) -> list[torch.Tensor]:
        loss = x.new_empty([], dtype=torch.float32)
        return [loss, torch.empty_like(x), *([torch.empty_like(weight)] if trained else [])]

    types = {"x": torch.Tensor, "weight": torch.Tensor, "targets": torch.Tensor, "trained": bool, "return": list[torch.Tensor]}
    fused.__annotations__ = types
    made = torch.library.custom_op(f"memir_liger::{name}", fused, mutates_args=())
    made.register_fake(described)
    return made


_OPERATORS = {
    "fused-linear": _operator("fused_linear_cross_entropy"),
    "fused-linear-fp32": _operator("fused_linear_cross_entropy_fp32"),
    "fused-linear-0.4": _operator("fused_linear_cross_entropy_0_4"),
}


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, name: str) -> torch.Tensor:
        loss, *gradients = _OPERATORS[name](x, weight, targets, weight.requires_grad)
        ctx.save_for_backward(*(gradient.detach() for gradient in gradients))
        scalar: torch.Tensor = loss
        return scalar

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, *weight = ctx.saved_tensors  # scaled in place where the loss is not the last operator
        return x, weight[0] if weight else None, None, None


class Logits:
    """The head's output that is not computed: [..., V] as a model sees it, the head's input behind it."""

    def __init__(self, loss: _Loss, hidden: torch.Tensor, flat: bool = False) -> None:
        self._loss, self._hidden, self._flat = loss, hidden, flat

    @property
    def shape(self) -> tuple[Any, ...]:
        """The extents of the logits."""
        leading = tuple(self._hidden.shape[:-1])
        if self._flat:
            leading = (functools.reduce(operator.mul, leading),)
        return (*leading, self._loss.head.out_features)

    def size(self, dim: int | None = None) -> Any:
        """The extents, or one of them."""
        return self.shape if dim is None else self.shape[dim]

    @property
    def device(self) -> torch.device:
        """Where they would be."""
        return self._hidden.device

    @property
    def dtype(self) -> torch.dtype:
        """What they would be."""
        return self._hidden.dtype

    def float(self) -> Logits:
        """Themselves: the functions widen what they compute with."""
        return self

    def to(self, *arguments: Any, **keywords: Any) -> Logits:
        """Themselves, as `float`."""
        return self

    def contiguous(self) -> Logits:
        """Themselves."""
        return self

    def view(self, *shape: Any) -> Logits:
        """[-1, V]."""
        extents = shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list, torch.Size)) else shape
        if len(extents) != 2 or not (isinstance(extents[1], int) and extents[1] in (-1, self._loss.head.out_features)):
            self._refuse(f"view{tuple(extents)}")
        return Logits(self._loss, self._hidden, flat=True)

    reshape = view

    def flatten(self, start: int = 0, end: int = -1) -> Logits:
        """All dimensions but the last as one."""
        if start != 0 or end not in (self._hidden.dim() - 2, -2):
            self._refuse(f"flatten({start}, {end})")
        return Logits(self._loss, self._hidden, flat=True)

    def __getitem__(self, index: Any) -> Logits:
        parts = index if isinstance(index, tuple) else (index,)
        if Ellipsis in parts:
            at = parts.index(Ellipsis)
            parts = parts[:at] + (slice(None),) * (self._hidden.dim() - len(parts) + 1) + parts[at + 1 :]
        whole = slice(None)
        if (
            self._flat
            or not all(isinstance(part, slice) for part in parts)
            or parts[self._hidden.dim() - 1 :] not in ((), (whole,))
        ):
            self._refuse(f"[{index}]")
        return Logits(self._loss, self._hidden[parts[: self._hidden.dim() - 1]])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python and its libraries ask for these of any object
            raise AttributeError(name)
        return self._refuse(f".{name}")

    def __add__(self, other: Any = None) -> Any:
        return self._refuse("arithmetic")

    __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __pow__ = __neg__ = __matmul__ = __add__

    def _refuse(self, what: str) -> Any:
        hint = "only shifting and flattening may stand between the head and F.cross_entropy; or  --loss model"
        raise UsageError(f"--loss {self._loss.name}: the model computes with its logits before the loss: {what}", hint=hint)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = next(a for a in (*args, *(kwargs or {}).values()) if isinstance(a, Logits))
        if func is not F.cross_entropy:
            given._refuse(getattr(func, "__name__", str(func)))
        return given._cross_entropy(*args, **(kwargs or {}))

    def _cross_entropy(
        self,
        input: Logits,  # noqa: A002
        target: torch.Tensor,
        weight: torch.Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: builtins.float = 0.0,
    ) -> torch.Tensor:
        if weight is not None or size_average is not None or reduce is not None or label_smoothing or reduction == "none":
            self._refuse("weights, label smoothing or losses by token")
        if not self._flat and self._hidden.dim() > 2:
            self._refuse("a cross entropy over a dimension that is not the last")
        return self._loss.of(self._hidden, target, ignore_index, reduction)


class _Loss:
    """What stands for the head and the cross entropy of one model."""

    def __init__(self, name: str, head: nn.Linear, path: str) -> None:
        self.name, self.head, self.path = name, head, path
        self.apply = head.forward
        self.taken = False

    def of(self, hidden: torch.Tensor, targets: torch.Tensor, ignored: int, reduction: str) -> torch.Tensor:
        """The loss of [..., H] and as many targets."""
        self.taken = True
        if self.name == "chunked":
            return self._chunked(hidden, targets, ignored, reduction)
        flat = hidden.reshape(-1, self.head.in_features)  # a copy where a model has shifted them
        if not isinstance(self.head.weight, FakeTensor):
            return _real(self.name, flat, self.head.weight, targets, ignored, reduction)
        loss: torch.Tensor = _Fused.apply(flat, self.head.weight, targets, self.name)  # type: ignore[no-untyped-call]
        return loss

    def _chunked(self, hidden: torch.Tensor, targets: torch.Tensor, ignored: int, reduction: str) -> torch.Tensor:
        dim = hidden.dim() - 2
        chunks = [self.apply(chunk) for chunk in hidden.tensor_split(CHUNKS, dim=dim)]
        del hidden
        total = (targets != ignored).sum()
        parts = [part.reshape(-1) for part in targets.view(self._leading(chunks, dim)).tensor_split(CHUNKS, dim=dim)]
        chunks = [chunk.reshape(-1, chunk.size(-1)) for chunk in chunks]
        loss: Any = 0.0
        for chunk, part in zip(chunks, parts, strict=True):
            loss += F.cross_entropy(chunk.float(), part, ignore_index=ignored, reduction="sum")
        mean: torch.Tensor = loss / total if reduction == "mean" else loss
        return mean

    @staticmethod
    def _leading(chunks: list[torch.Tensor], dim: int) -> list[Any]:
        """The extents of all chunks together, without the last."""
        extents = list(chunks[0].shape[:-1])
        extents[dim] = -1
        return extents


def _real(
    name: str, x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, ignored: int, reduction: str
) -> torch.Tensor:
    try:
        fused = importlib.import_module("liger_kernel.transformers.functional").liger_fused_linear_cross_entropy
    except ImportError:
        raise UsageError(
            f"running --loss {name} for real needs liger-kernel and a GPU", hint="pip install liger-kernel"
        ) from None
    options = {"accum_dtype": torch.float32} if name.endswith("fp32") else {}
    result = fused(x, weight, targets, ignore_index=ignored, reduction=reduction, **options)
    loss: torch.Tensor = result[0] if isinstance(result, tuple) else getattr(result, "loss", result)
    return loss


def fuse_loss(module: nn.Module, loaded: LoadedModel, recipe: Recipe) -> None:
    """Replaces head and loss of the model that `module` is, or has within adapters. UsageError where it has no such two."""
    if loaded.call.loss.startswith("logits:"):
        hint = "give it the targets and let it return F.cross_entropy of them; or  --loss model"
        raise UsageError(f"--loss {recipe.loss}: {loaded.name} returns logits and no loss", where=loaded.source, hint=hint)
    path, head = _head(loaded)
    if head.bias is not None and recipe.loss != "chunked":
        raise UsageError(f"--loss {recipe.loss}: the head {path} has a bias, which Liger's model patches leave out")
    loss = _Loss(recipe.loss, head, path)
    setattr(head, "forward", lambda hidden: Logits(loss, hidden))  # noqa: B010 (a method of one object)
    setattr(module, "forward", _checked(module.forward, loss, loaded))  # noqa: B010


def _head(loaded: LoadedModel) -> tuple[str, nn.Linear]:
    """The output head: what a transformers model says it is, else the last linear layer; with its path."""
    linear = [(name, m) for name, m in loaded.module.named_modules() if type(m) is nn.Linear]
    stated = getattr(loaded.module, "get_output_embeddings", lambda: None)()
    found = [(name, m) for name, m in linear if m is stated] if stated is not None else linear[-1:]
    if not found:
        what = type(stated).__name__ if stated is not None else "none"
        raise UsageError(
            f"loss: {loaded.name} has no nn.Linear as its output head ({what})",
            where=loaded.source,
            hint="fused losses take the weight of a plain linear head; use  --loss model",
        )
    return found[0]


def _checked(forward: Callable[..., Any], loss: _Loss, loaded: LoadedModel) -> Callable[..., Any]:
    """The model's forward; UsageError if no cross entropy took the head's output."""

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        loss.taken = False
        outputs = forward(*args, **kwargs)
        if not loss.taken:
            raise UsageError(
                f"--loss {loss.name}: no F.cross_entropy took the output of {loss.path}",
                where=loaded.source,
                hint="use  --loss model",
            )
        return outputs

    return run
