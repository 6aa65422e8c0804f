"""Whether a strided tensor lies within its storage, for every value of the symbols in the domain."""

from __future__ import annotations

from collections.abc import Sequence

from memir.ir.core import Storage, Value
from memir.ir.domain import is_readable, points
from memir.ir.dtypes import ITEMSIZE
from memir.ir.layout import reach
from memir.ir.size import Size

_TRIED = 24  # places of the domain at which what is not proven is evaluated


class Extents:
    """Checks values against storages; what was decided once is kept."""

    def __init__(self, dims: Sequence[str], domain: Sequence[str]) -> None:
        self._dims = dims
        self._domain = domain
        self._points: list[dict[str, int]] | None = None
        self._negative: dict[Size, dict[str, int] | None] = {}
        self._seen: dict[tuple[object, ...], tuple[str, dict[str, int]] | None] = {}

    def problem(self, value: Value, storage: Storage) -> str | None:
        """Why the value is not a tensor in that storage; None if it is one."""
        key = (value.dtype, value.shape, value.strides, value.offset, storage.nbytes)
        if key not in self._seen:
            self._seen[key] = self._problem(value, storage)
        found = self._seen[key]
        if found is None:
            return None
        text, env = found
        at = f" for {', '.join(f'{s}={n}' for s, n in env.items())}" if env else ""
        return text.format(value=f"%{value.name}", storage=f"${storage.name}") + at

    def negative_at(self, size: Size) -> dict[str, int] | None:
        """A place in the domain where the size is negative; None where it is proven that there is none, or none is found."""
        if size not in self._negative:
            self._negative[size] = self._find_negative(size)
        return self._negative[size]

    def _problem(self, value: Value, storage: Storage) -> tuple[str, dict[str, int]] | None:
        if value.dtype not in ITEMSIZE:
            return "{value} has an unknown dtype " + value.dtype.replace("{", "{{").replace("}", "}}"), {}
        if len(value.shape) != len(value.strides):
            return f"{{value}} has {len(value.shape)} extents and {len(value.strides)} strides", {}
        for what, sizes in (("extent", value.shape), ("stride", value.strides), ("offset", (value.offset,))):
            for size in sizes:
                if (env := self.negative_at(size)) is not None:
                    return f"{{value}} has a negative {what}, {size},", env
        needed = reach(value.shape, value.strides, value.offset) * ITEMSIZE[value.dtype]
        if needed is storage.nbytes or (env := self.negative_at(storage.nbytes - needed)) is None:
            return None
        return f"{{value}} reaches to byte {needed} of {{storage}}, which has {storage.nbytes},", env

    def _find_negative(self, size: Size) -> dict[str, int] | None:
        if size.is_nonnegative:
            return None
        if size.is_constant:
            return {}
        if not is_readable(self._domain):
            return None  # where the domain is cannot be known: only what is proven counts
        if self._points is None:
            self._points = points(self._dims, self._domain, _TRIED, spread=True)
        for env in self._points:
            if size.symbols() <= env.keys() and size.fraction(env) < 0:
                return {s: env[s] for s in self._dims if s in size.symbols()}
        return None
