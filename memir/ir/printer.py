"""A program as text. `memir.ir.parser` reads it back: parse(to_text(p)) == p. docs/ir.md has the grammar."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from memir.ir.core import Op, Program, Repeat, Storage, Value
from memir.ir.cursor import name, place, quoted, word
from memir.ir.layout import contiguous
from memir.ir.size import ZERO, Size
from memir.ir.sizetext import IDENTIFIER

VERSION = 1


def to_text(program: Program) -> str:
    """The text form, ending in a newline; the same for equal programs. ValueError if a symbol is not an identifier."""
    return "\n".join(Printer(program.dims).program(program)) + "\n"


class Printer:
    """Prints the parts of a program, with the factors of sizes in the order of `dims`. Keeps what it has printed once."""

    def __init__(self, dims: Sequence[str] = ()) -> None:
        self._dims = tuple(dims)
        self._sizes: dict[Size, str] = {}
        self._groups: dict[tuple[Size, ...], str] = {}
        self._types: dict[tuple[str, tuple[Size, ...], tuple[Size, ...], Size], str] = {}

    def program(self, program: Program) -> list[str]:
        """The lines of a whole program."""
        lines = [f"memir {VERSION}", f"program @{place(program.name)}"]
        if program.dims:
            lines.append("dim " + ", ".join(word(d) for d in program.dims))
        lines += [f"domain {condition(text)}" for text in program.domain]
        lines += [f"mesh {word(axis)} = {self.size(degree)}" for axis, degree in program.mesh]
        lines += [self.storage(storage) for storage in program.storages]
        lines += [f"value {self.value(value)}" for value in program.values]
        for phase in program.phases:
            lines.append(f"phase {word(phase.name)}")
            self._ops(phase.ops, "  ", lines)
        return lines

    def size(self, size: Size) -> str:
        """One size."""
        text = self._sizes.get(size)
        if text is None:
            for symbol in sorted(size.symbols()):
                if not IDENTIFIER.fullmatch(symbol) or symbol.strip() != symbol:
                    raise ValueError(f"the symbol {symbol!r} is not an identifier and has no text form")
            text = self._sizes[size] = size.text(self._dims)
        return text

    def storage(self, storage: Storage) -> str:
        """`storage $w : 8192 parameter of $p live_in live_out`."""
        parts = [f"storage ${name(storage.name)} : {self.size(storage.nbytes)} {word(storage.kind)}"]
        if storage.device != "gpu":
            parts.append(f"on {word(storage.device)}")
        if storage.of is not None:
            parts.append(f"of ${name(storage.of)}")
        if storage.live_in:
            parts.append("live_in")
        if storage.live_out:
            parts.append("live_out")
        return " ".join(parts)

    def value(self, value: Value) -> str:
        """`%h: bf16[B, S, 64] strides[S, 1, 0] offset 64 in $h`; strides when not contiguous, offset when not zero."""
        key = (value.dtype, value.shape, value.strides, value.offset)
        text = self._types.get(key)
        if text is None:
            text = word(value.dtype) + self._group(value.shape)
            if value.strides != contiguous(value.shape):
                text += f" strides{self._group(value.strides)}"
            if value.offset is not ZERO:
                text += f" offset {self.size(value.offset)}"
            self._types[key] = text
        return f"%{name(value.name)}: {text} in ${name(value.storage)}"

    def op(self, op: Op) -> str:
        """One operator on one line."""
        text = word(op.opcode) + "(" + ", ".join([f"%{name(o)}" for o in op.operands]) + ")"
        if op.results:
            text = ", ".join([self.value(r) for r in op.results]) + " = " + text
        if op.saves:
            text += " saves " + _storages(op.saves)
        if op.drops:
            text += " drops " + _storages(op.drops)
        if op.frees:
            text += " frees " + _storages(op.frees)
        if op.scratch is not ZERO:
            text += " scratch " + self.size(op.scratch)
        if op.stream:
            text += " stream " + word(op.stream)
        if op.forward_of is not None:
            text += " forward of %" + name(op.forward_of)
        if op.path:
            text += " at @" + place(op.path)
        if op.source:
            text += " from " + place(op.source)
        return text

    def repeat(self, repeat: Repeat) -> str:
        """The line that opens a Repeat."""
        return f"repeat {word(repeat.index)} < {self.size(repeat.count)}"

    def _ops(self, ops: Iterable[Op | Repeat], indent: str, lines: list[str]) -> None:
        for op in ops:
            if isinstance(op, Op):
                lines.append(indent + self.op(op))
            else:
                lines.append(indent + self.repeat(op))
                self._ops(op.body, indent + "  ", lines)

    def _group(self, sizes: tuple[Size, ...]) -> str:
        text = self._groups.get(sizes)
        if text is None:
            text = self._groups[sizes] = "[" + ", ".join([self.size(s) for s in sizes]) + "]"
        return text


def condition(text: str) -> str:
    """A condition of the domain: bare when it is one plain line."""
    bare = text.isprintable() and text == text.strip() and text[:1] not in ("", '"') and "#" not in text
    return text if bare else quoted(text)


def _storages(names: Iterable[str]) -> str:
    return ", ".join([f"${name(n)}" for n in names])
