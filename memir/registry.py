"""Passes and backends by name: a table of places, so that nothing is imported before it is asked for, and entry points."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType

from memir.errors import UsageError

PASSES: Mapping[str, str] = MappingProxyType(
    {
        "activation-checkpoint": "memir.passes.activation_checkpoint:ActivationCheckpoint",
        "bind": "memir.passes.bind:Bind",
        "context-parallel": "memir.passes.context_parallel:ContextParallel",
        "data-parallel": "memir.passes.data_parallel:DataParallel",
        "expert-parallel": "memir.passes.expert_parallel:ExpertParallel",
        "freeze": "memir.passes.freeze:Freeze",
        "fsdp": "memir.passes.fsdp:Fsdp",
        "fsdp1": "memir.passes.fsdp1:Fsdp1",
        "lifetimes": "memir.passes.lifetimes:Lifetimes",
        "optimizer": "memir.passes.optimizer:Optimizer",
        "pipeline-parallel": "memir.passes.pipeline_parallel:PipelineParallel",
        "tensor-parallel": "memir.passes.tensor_parallel:TensorParallel",
        "unroll": "memir.passes.unroll:Unroll",
        "zero": "memir.passes.zero:Zero",
    }
)
BACKENDS: Mapping[str, str] = MappingProxyType(
    {
        "explain": "memir.backends.explain:Explain",
        "formula": "memir.backends.formula:Formula",
        "ir": "memir.backends.ir:Ir",
        "json": "memir.backends.json:Json",
        "markdown": "memir.backends.markdown:Markdown",
        "text": "memir.backends.text:Text",
    }
)


@dataclass(frozen=True, slots=True)
class Registry:
    """One kind of thing: `what` for messages, memir's own `table`, the entry points' `group`, the `method` each must have."""

    what: str
    group: str
    method: str
    own: tuple[tuple[str, str], ...]

    def table(self) -> dict[str, str]:
        """name -> "module:Class" of all that is installed; UsageError where two have one name."""
        table = dict(self.own)
        for point in _entry_points(self.group):
            if point.name in table:
                raise UsageError(
                    f"the name {point.name} is taken: there is a second {self.what} of that name",
                    where=f"{table[point.name]}\n{point.value}" + (f"  from {point.dist.name}" if point.dist else ""),
                    hint="uninstall one of them, or have it renamed",
                )
            table[point.name] = point.value
        return dict(sorted(table.items()))

    def names(self) -> list[str]:
        """All names, sorted."""
        return list(self.table())

    def load(self, name: str) -> type:
        """The class of that name, imported now; UsageError, with the nearest names, if there is none or it does not fit."""
        table = self.table()
        if name not in table:
            raise UsageError(f"unknown {self.what} {name!r}", hint=nearest(name, table))
        place = table[name]
        module, _, attribute = place.partition(":")
        own = (name, place) in self.own
        try:
            found = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            if own:
                raise
            raise UsageError(f"the {self.what} {name} cannot be imported: {error}", where=place) from error
        if not (isinstance(found, type) and dataclasses.is_dataclass(found) and hasattr(found, self.method)):
            raise UsageError(f"{place} is not a {self.what}: a frozen dataclass with a method {self.method}()")
        if getattr(found, "name", None) != name:
            raise UsageError(f"{place} calls itself {getattr(found, 'name', None)!r} and is registered as {name!r}")
        return found


def nearest(word: str, known: Mapping[str, object] | list[str]) -> str:
    """A hint that names what was probably meant, and otherwise all that is known."""
    near = difflib.get_close_matches(word, list(known), n=3)
    return f"did you mean  {', '.join(near)}?" if near else f"known: {', '.join(known)}"


@lru_cache(maxsize=8)
def _entry_points(group: str) -> tuple[EntryPoint, ...]:
    return tuple(sorted(entry_points(group=group), key=lambda point: (point.name, point.value)))


passes = Registry("pass", "memir.passes", "run", tuple(PASSES.items()))
backends = Registry("backend", "memir.backends", "emit", tuple(BACKENDS.items()))
