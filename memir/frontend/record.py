"""The recorder: one step on fake tensors, as an fx graph of ATen operators plus the moments storages are born and die.

A dispatch mode on top of the fake mode sees every ATen operator below autograd. A weak reference on each storage tells its true
end, which is when the last reference of Python or autograd goes. What PyTorch hides from the mode (which backward operator
belongs to which forward one) is read off autograd's sequence numbers.
"""

from __future__ import annotations

import operator
import sys
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

from memir.frontend.origin import ModuleStack, source_line
from memir.ir.dtypes import FROM_TORCH
from memir.ir.size import Size

Sizes = Callable[[Any], Size]  # int or SymInt -> Size
ValueKey = tuple[int, torch.dtype, tuple[Size, ...], tuple[Size, ...], Size]


@dataclass(slots=True)
class StorageRecord:
    """One storage: its bytes, and the events at which it is born and dies (None: before, or after, the recorded step)."""

    nbytes: Size
    name: str = ""
    kind: str = ""
    of: str | None = None
    device: str = "gpu"
    born: int | None = None
    died: int | None = None


@dataclass(slots=True)
class Span:
    """Storages that a function was called with, from its first event to its last."""

    storages: set[int]
    start: int
    end: int


@dataclass(slots=True)
class ValueRecord:
    """A tensor as seen: its view of a storage, and the fx node that stands for it."""

    name: str
    dtype: str
    shape: tuple[Size, ...]
    strides: tuple[Size, ...]
    offset: Size
    storage: int
    node: fx.Node


@dataclass(slots=True)
class Event:
    """One operator, or a pseudo-operator: `memir.alloc`, `memir.free`."""

    opcode: str
    phase: str
    path: str
    source: str
    operands: list[int] = field(default_factory=list)  # indices of ValueRecords
    results: list[int] = field(default_factory=list)
    frees: list[int] = field(default_factory=list)  # indices of StorageRecords
    sequence: int | None = None  # autograd's number of the node that this operator made (forward) or belongs to (backward)
    backward: bool = False  # runs inside autograd's engine
    recompute: bool = False  # a forward operator run again inside the engine
    from_engine: bool = False  # called by the engine's C++, not by Python code that it runs
    keeps: list[int] = field(default_factory=list)  # storages that a checkpoint holds whose stretch begins with this operator
    hooked: bool = False  # saved-tensor hooks were active: autograd keeps what they return
    node: fx.Node | None = None
    forward_of: int | None = None  # the forward event that this one differentiates or recomputes; set by lowering


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # PyTorch leaves its modes untyped
    """Records every storage and operator while it is active; `reset()` begins a new step."""

    def __init__(self, sizes: Sizes, modules: ModuleStack, intercept: Intercept | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sizes, self.modules, self.intercept = sizes, modules, intercept
        self.storages: list[StorageRecord] = []
        self.live: dict[int, int] = {}  # storage._cdata -> index in self.storages
        self._watch: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.paused = 0
        self.silent = False  # storages are seen, operators are not kept: before the step
        self.closed = False  # what dies from now on dies because the tracer ends, not the step
        self.entered: Callable[[str], None] = lambda name: None
        self.wrappers: tuple[type, ...] = ()  # tensor classes whose operators are not recorded, but those they turn into
        self.reset()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled: without PyTorch's wrapper around each call of the mode."""
        return False

    def reset(self) -> None:
        """Forgets the operators; every storage that is alive becomes one that was there before."""
        self.graph = fx.Graph()
        self.events: list[Event] = []
        self.values: list[ValueRecord] = []
        self.inputs: list[int] = []  # values that existed before the first operator
        self.by_key: dict[ValueKey, int] = {}
        self.by_node: dict[fx.Node, int] = {}
        self.saved: dict[int, set[int]] = {}  # sequence number of an autograd node -> storages it keeps
        self.writers: dict[int, list[int]] = {}  # storage -> events that have a result in it, in order
        self.phase = ""
        self.reentrant: list[Span] = []  # gradients that reentrant checkpoints were called with in backward
        self._open: list[Span] = []
        self.kept: list[int] = []  # storages that the checkpoint holds whose first operator is still to come
        self._last_sequence = -1
        for index in self.live.values():
            self.storages[index].born = None
        self.resident = list(self.live.values())

    # -- storages ------------------------------------------------------------------------------------------------

    def see(self, tensor: torch.Tensor, event: int | None = None) -> tuple[int, bool]:
        """The index of the tensor's storage, and whether it is new (born at `event`)."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        index = self.live.get(key)
        if index is not None:
            return index, False
        index = len(self.storages)
        self.storages.append(StorageRecord(self.sizes(storage.nbytes()), born=event))
        self.live[key] = index
        self._watch[key] = weakref.ref(storage, partial(self._died, key))
        return index, True

    def _died(self, key: int, reference: object) -> None:
        index = self.live.pop(key)
        del self._watch[key]
        if self.closed or self.silent:
            return
        if not self.events:
            self._pseudo("memir.free", "")
        self.storages[index].died = len(self.events) - 1
        self.events[-1].frees.append(index)

    def _pseudo(self, opcode: str, source: str) -> Event:
        event = Event(opcode, self.phase, self.modules.path, source)
        self.events.append(event)
        return event

    def on_phase(self, name: str) -> None:
        """The loop enters a phase."""
        self.phase = name
        self.entered(name)

    def on_event(self, name: str) -> None:
        """The loop is about to let storages go without an operator."""
        self._pseudo("memir.free", name)

    # -- operators -----------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.wrappers and any(issubclass(t, self.wrappers) for t in types):
            return NotImplemented
        if self.paused or func.namespace == "prim":
            return func(*args, **kwargs)
        out = func(*args, **kwargs) if self.intercept is None else self.intercept(self, func, args, kwargs)
        if self.silent:
            for tensor in tensors_in(out):
                self.see(tensor)
        else:
            self._record(func, args, kwargs, out)
        return out

    def _record(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        outs = tensors_in(out)
        mutates = func._schema.is_mutable
        if not outs and not mutates:
            return
        if func in _SAME_VIEW and self._known(outs[0]):
            return  # another handle on a tensor that is there already
        in_engine = torch._C._current_graph_task_id() != -1
        recompute = in_engine and torch.is_grad_enabled()
        event = Event(opcode_of(func), self.phase, "", "", backward=in_engine, recompute=recompute)
        self._origin(event)
        nodes: dict[int, fx.Node] = {}
        operands = [t for a in (args, kwargs.values()) for t in tensors_in(a)]
        unseen = [t for t in operands if t.untyped_storage()._cdata not in self.live]
        if unseen:
            self._adopt(unseen, event)
        for tensor in operands:
            value = self._value(tensor, event)
            event.operands.append(value)
            nodes[id(tensor)] = self.values[value].node
        position = len(self.events)
        self.events.append(event)
        if self.kept and not in_engine:
            event.keeps, self.kept = self.kept, []
        node = self.graph.call_function(func, _to_nodes(tuple(args), nodes), _to_nodes(dict(kwargs), nodes))
        event.node = node
        node.meta.update(phase=event.phase, path=event.path, source=event.source, layer=layer_of(event.path))
        several = not isinstance(out, torch.Tensor)
        for number, tensor in enumerate(outs):
            storage, new = self.see(tensor, position)
            name = node.name if number == 0 else f"{node.name}.{number}"
            if new:
                self.storages[storage].name = name
            handle = self.graph.call_function(operator.getitem, (node, number)) if several else node
            event.results.append(self._add_value(tensor, storage, name, handle, position))
        node.meta["val"] = [self._describe(v) for v in event.results]

    def _describe(self, value: int) -> str:
        v = self.values[value]
        return f"{v.dtype}[{', '.join(map(str, v.shape))}]"

    def _origin(self, event: Event) -> None:
        """Module path, source line and autograd's sequence number of the operator being recorded."""
        if event.backward and not event.recompute:
            node = torch._C._current_autograd_node()
            if node is not None:
                number = node._sequence_nr()
                event.sequence = number if number < 2**63 else None
            event.from_engine = _called_by_engine(sys._getframe(3))
            self.modules.idle()
            return
        event.path = self.modules.path
        event.source = source_line(sys._getframe(2))
        event.hooked = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        latest = torch._C._autograd._get_sequence_nr() - 1
        if latest > self._last_sequence:  # also within an autograd.Function's forward, which runs without gradients
            event.sequence = latest
            self._last_sequence = latest

    def on_checkpoint(self, held: list[torch.Tensor]) -> None:
        """A checkpoint begins in the forward and holds these tensors."""
        indices = (self.live.get(tensor.untyped_storage()._cdata) for tensor in held)
        self.kept = sorted({index for index in indices if index is not None})

    def on_reentrant(self, given: list[torch.Tensor], begins: bool) -> None:
        """A reentrant checkpoint's backward begins or ends, called with these gradients."""
        if not begins:
            self._open.pop().end = len(self.events) - 1
            return
        indices = (self.live.get(tensor.untyped_storage()._cdata) for tensor in given)
        self._open.append(Span({index for index in indices if index is not None}, len(self.events), len(self.events)))
        self.reentrant.append(self._open[-1])

    def adopt(self, tensor: torch.Tensor) -> None:
        """A tensor that was made without an operator (a random generator's state) is alive from now on."""
        event = Event("", self.phase, self.modules.path, source_line(sys._getframe(1)))
        event.backward = torch._C._current_graph_task_id() != -1
        event.recompute = event.backward
        self._adopt([tensor], event)

    def _adopt(self, tensors: Iterable[torch.Tensor], event: Event) -> None:
        """Tensors made outside the mode's sight (constants): they are allocated by a pseudo-operator just before."""
        alloc = Event("memir.alloc", event.phase, event.path, event.source, backward=event.backward, recompute=event.recompute)
        self.events.append(alloc)
        position = len(self.events) - 1
        for tensor in tensors:
            storage, new = self.see(tensor, position)
            if new:
                node = self.graph.placeholder(f"constant_{storage}")
                self.storages[storage].name = node.name
                alloc.results.append(self._add_value(tensor, storage, node.name, node, position))

    # -- values --------------------------------------------------------------------------------------------------

    def _key(self, tensor: torch.Tensor, storage: int) -> ValueKey:
        sizes = self.sizes
        shape, strides = tuple(map(sizes, tensor.shape)), tuple(map(sizes, tensor.stride()))
        return storage, tensor.dtype, shape, strides, sizes(tensor.storage_offset())

    def _known(self, tensor: torch.Tensor) -> bool:
        storage = self.live.get(tensor.untyped_storage()._cdata)
        return storage is not None and self._key(tensor, storage) in self.by_key

    def _value(self, tensor: torch.Tensor, event: Event) -> int:
        """The value that stands for an operand of the event that is about to be recorded."""
        storage = self.live[tensor.untyped_storage()._cdata]
        value = self.by_key.get(self._key(tensor, storage))
        if value is not None:
            return value
        record = self.storages[storage]
        if record.born is None:  # there before the step
            node = self.graph.placeholder(record.name.replace(".", "_") or f"input_{storage}")
            value = self._add_value(tensor, storage, node.name, node)
            self.inputs.append(value)
            return value
        # A view that was made out of the mode's sight (autograd unpacks saved views so): an alias of its storage.
        base = next(i for i in range(len(self.values) - 1, -1, -1) if self.values[i].storage == storage)
        view = Event("aten.as_strided", event.phase, event.path, event.source, [base], backward=event.backward)
        arguments = (self.values[base].node, list(tensor.shape), list(tensor.stride()), tensor.storage_offset())
        node = self.graph.call_function(torch.ops.aten.as_strided.default, arguments)
        view.node = node
        self.events.append(view)
        value = self._add_value(tensor, storage, node.name, node, len(self.events) - 1)
        view.results.append(value)
        return value

    def _add_value(self, tensor: torch.Tensor, storage: int, name: str, node: fx.Node, event: int | None = None) -> int:
        """A new value; `event` is the one that makes it, None for what was there before the step."""
        key = self._key(tensor, storage)
        value = len(self.values)
        self.values.append(
            ValueRecord(name, FROM_TORCH[str(tensor.dtype).removeprefix("torch.")], key[2], key[3], key[4], storage, node)
        )
        self.by_key[key] = value
        self.by_node[node] = value
        if event is not None:
            self.writers.setdefault(storage, []).append(event)
        return value


Intercept = Callable[[Recorder, Any, Any, Any], Any]

_SAME_VIEW = frozenset({torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.lift_fresh.default})


def _called_by_engine(frame: FrameType | None) -> bool:
    """Whether the innermost Python frame is the one that runs autograd's engine (torch/autograd/graph.py): no Python code that
    the engine runs called the operator. The wrappers that PyTorch puts around a mode's methods do not count."""
    while frame is not None and frame.f_code.co_name in ("_fn", "inner"):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name == "_engine_run_backward"


def opcode_of(func: Any) -> str:
    """`aten.mm` for aten.mm.default, `aten.add.Tensor` for an overload with a name."""
    name = str(func)
    return name.removesuffix(".default")


def layer_of(path: str) -> int | None:
    """The first number in a module path: the layer."""
    return next((int(part) for part in path.split(".") if part.isdigit()), None)


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """The tensors in an operator's arguments or results: tuples, lists and dictionary views only."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, (str, int, float, torch.SymInt, torch.dtype)) or tree is None:
        return []
    if isinstance(tree, (tuple, list)) or type(tree).__name__ == "dict_values":
        return [tensor for item in tree for tensor in tensors_in(item)]
    return []


def _to_nodes(tree: Any, nodes: dict[int, fx.Node]) -> Any:
    if isinstance(tree, torch.Tensor):
        return nodes[id(tree)]
    if isinstance(tree, tuple):
        return tuple(_to_nodes(item, nodes) for item in tree)
    if isinstance(tree, list):
        return [_to_nodes(item, nodes) for item in tree]
    if isinstance(tree, dict):
        return {key: _to_nodes(item, nodes) for key, item in tree.items()}
    if isinstance(tree, torch.Generator):
        return None
    return tree
