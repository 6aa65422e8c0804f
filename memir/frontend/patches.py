"""What is changed in other libraries while a step is traced: scoped, and restored on exit.

transformers asks whether it is being traced (`is_tracing`, true for fake tensors) and then takes branches that real data
does not take: it builds a 4-D mask and leaves the causal fast path. Values that it would look at are answered by
`memir.frontend.answers`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (the name everybody uses)
from torch.fx.experimental import symbolic_shapes
from torch.fx.experimental.sym_node import SymNode
from torch.utils._python_dispatch import _disable_current_modes

# module -> name -> what it answers while a step is traced as real data would run it
_ANSWERS: tuple[tuple[str, str], ...] = (("transformers.masking_utils", "is_tracing"),)


def _not_tracing(tensor: Any = None) -> bool:
    return False


@contextmanager
def real_branches() -> Iterator[None]:
    """The libraries' code takes the branches of a real run."""
    attention = F.scaled_dot_product_attention

    def scaled_dot_product_attention(*args: Any, **kwargs: Any) -> torch.Tensor:
        """`is_causal=S > 1` is symbolic here and a plain boolean in a real run; torch's function takes only the latter.

        Source: transformers/integrations/sdpa_attention.py, `sdpa_attention_forward`, as of 4.48.
        """
        return attention(*map(_plain, args), **{name: _plain(value) for name, value in kwargs.items()})

    saved: list[tuple[Any, str, Any]] = []
    for module_name, name in _ANSWERS:
        module = sys.modules.get(module_name)  # a model that needs it has imported it by now
        if module is not None and hasattr(module, name):
            saved.append((module, name, getattr(module, name)))
            setattr(module, name, _not_tracing)
    saved.append((F, "scaled_dot_product_attention", attention))
    setattr(F, "scaled_dot_product_attention", scaled_dot_product_attention)  # noqa: B010 (a type checker knows its signature)
    try:
        yield
    finally:
        for module, name, original in saved:
            setattr(module, name, original)


# SymNode's arithmetic and comparisons of two sizes (torch/fx/experimental/sym_node.py, _make_node_magic).
_REMEMBERED = (
    *("add", "sub", "mul", "floordiv", "int_floordiv", "int_truediv", "truediv", "mod", "sym_max", "sym_min"),
    *("eq", "ne", "lt", "le", "gt", "ge", "and_", "or_", "sym_and", "sym_or"),
)


@contextmanager
def remembered_sizes() -> Iterator[None]:
    """Arithmetic on symbolic sizes is done once for each pair of expressions.

    For every tensor PyTorch computes whether it is contiguous, its bytes and more, of the same few sizes again and again: that
    is a third of a symbolic trace. A SymNode is not changed once it is made, and looks up itself whether its symbol has become
    a number, so the first answer is the answer.
    """
    saved = {name: getattr(SymNode, name) for name in _REMEMBERED if hasattr(SymNode, name)}
    for name, method in saved.items():
        setattr(SymNode, name, _remembered(method))
    try:
        yield
    finally:
        for name, method in saved.items():
            setattr(SymNode, name, method)


@contextmanager
def export_left_out() -> Iterator[None]:
    """Torch's exporter, and networkx with it, is not imported for the sake of a file's name.

    torch/fx/experimental/symbolic_shapes.py, `uninteresting_files`: the files whose frames are no user's, of modules that it
    imports for that; one that was not imported has no frame.
    """
    original = symbolic_shapes.uninteresting_files
    names: tuple[str, ...] = ("torch", "torch._compile", "torch._dynamo.eval_frame", "torch._logging._internal")
    names += ("torch.fx._symbolic_trace", "torch._logging.structured", "torch._dynamo.guards")
    names += ("torch.fx.experimental.recording", "torch.fx.experimental.sym_node", "torch.fx.interpreter")
    names += (
        "torch._inductor.sizevars",
        "torch._library.custom_ops",
        "torch._library.fake_impl",
        "torch._subclasses.meta_utils",
    )
    names += ("torch._subclasses.fake_tensor", symbolic_shapes.__name__)
    files = {module.__file__ for name in names if (module := sys.modules.get(name)) is not None and module.__file__}
    setattr(symbolic_shapes, "uninteresting_files", lambda: files)  # noqa: B010 (a type checker knows its cache)
    try:
        yield
    finally:
        setattr(symbolic_shapes, "uninteresting_files", original)  # noqa: B010


def _remembered(method: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    known: dict[Any, Any] = {}

    def remembered(self: Any, other: Any) -> Any:
        if type(other) is not SymNode or self.shape_env is not other.shape_env:
            return method(self, other)
        key = (self._expr, other._expr, self.pytype, other.pytype, id(self.shape_env))
        found = known.get(key)
        if found is None:
            found = known[key] = method(self, other)
        return found

    return remembered


def _plain(value: Any) -> Any:
    return bool(value) if isinstance(value, torch.SymBool) else value


@contextmanager
def generator_states(adopt: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Tells `adopt` of every copy of the cpu generator's state: checkpointing keeps one per layer, which no dispatch mode sees.

    torch/utils/checkpoint.py, `_checkpoint_without_reentrant_generator` (fwd_cpu_state); torch/random.py, `fork_rng`.
    """
    original = torch.get_rng_state

    def get_rng_state() -> torch.Tensor:
        with _disable_current_modes():
            state = original()
        adopt(state)
        return state

    torch.get_rng_state = get_rng_state
    try:
        yield
    finally:
        torch.get_rng_state = original
