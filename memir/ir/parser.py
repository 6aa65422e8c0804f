"""A program from its text form (docs/ir.md has the grammar). Never evaluates text."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from memir.errors import ParseError
from memir.ir.core import Kind, Op, Phase, Program, Repeat, Storage, Value
from memir.ir.cursor import AT, OPERANDS, PLACE, STORAGE, STORAGES, TYPED, VALUE, WORD, Cursor
from memir.ir.layout import contiguous
from memir.ir.printer import VERSION
from memir.ir.size import ZERO, Size
from memir.ir.sizetext import read_group, read_size

END = "# ---"  # what stands after such a line is not read: a golden test keeps its expected text there
_KEYWORD = re.compile(r"[ \t]*([A-Za-z_]+)")
_VERSION = re.compile(r"[ \t]*(\d+)")
_CONDITION = re.compile(r'[ \t]*("(?:[^"\\]|\\.)*"|[^\s"#](?:[^#\r]*[^\s#])?)')
_KINDS = {kind.value: kind for kind in Kind}
_HEADS = ("program", "dim", "domain", "mesh", "storage", "value", "phase")
_CLAUSES = ("saves", "drops", "frees", "scratch", "stream", "forward", "at", "from")


@dataclass(frozen=True, slots=True)
class Lines:
    """Where the parts of a program stand in its text, numbered from 1. `ops` lists operators and Repeats in textual order."""

    file: str
    text: tuple[str, ...]
    storages: tuple[int, ...]
    values: tuple[int, ...]
    ops: tuple[int, ...]


def parse(text: str, file: str = "<text>") -> Program:
    """The program that `text` spells; ParseError with line, column and caret for anything else."""
    return parse_located(text, file)[0]


def parse_located(text: str, file: str = "<text>") -> tuple[Program, Lines]:
    """The program and the line of each of its parts."""
    return _Parser(text, file).run()


@dataclass(slots=True)
class _Block:
    """The operators under one `phase` or `repeat` line, which is indented by `indent`."""

    indent: int
    close: Callable[[tuple[Op | Repeat, ...]], None]
    ops: list[Op | Repeat] = field(default_factory=list)
    inner: int | None = None  # indentation of its operators, known from the first


class _Parser:
    def __init__(self, text: str, file: str) -> None:
        self._file = file
        self._lines = text.split("\n")
        self._name: str | None = None
        self._dims: list[str] = []
        self._domain: list[str] = []
        self._mesh: list[tuple[str, Size]] = []
        self._storages: list[Storage] = []
        self._values: list[Value] = []
        self._phases: list[Phase] = []
        self._blocks: list[_Block] = []  # the open phase and, within, the open Repeats
        self._places: dict[str, list[int]] = {"storage": [], "value": [], "op": []}

    def run(self) -> tuple[Program, Lines]:
        started = False
        for number, line in enumerate(self._lines, 1):
            if line.startswith(END):
                break
            body = line.lstrip(" ")
            if not body or body[0] == "#" or body.isspace():
                continue
            cursor = Cursor(line, number, self._file, len(line) - len(body))
            if body[0] == "\t":
                cursor.fail("a tab in the indentation", at=len(line) - len(body), hint="indent with spaces")
            if not started:
                self._version(cursor)
                started = True
            elif line[0] == " ":
                self._indented(cursor)
            else:
                self._head(cursor)
        self._close_blocks(0)
        if not started or self._name is None:
            missing = f"memir {VERSION}" if not started else "program @name"
            last = Cursor(self._lines[-1], len(self._lines), self._file, len(self._lines[-1]))
            last.fail(f"the text ends without `{missing}`")
        return self._result(self._name)

    def _result(self, name: str) -> tuple[Program, Lines]:
        program = Program(
            name=name,
            dims=tuple(self._dims),
            domain=tuple(self._domain),
            mesh=tuple(self._mesh),
            storages=tuple(self._storages),
            values=tuple(self._values),
            phases=tuple(self._phases),
        )
        places = {key: tuple(numbers) for key, numbers in self._places.items()}
        return program, Lines(self._file, tuple(self._lines), places["storage"], places["value"], places["op"])

    def _version(self, cursor: Cursor) -> None:
        if cursor.try_take(_KEYWORD) != "memir":
            cursor.fail(f"not a memory program: its first line is `memir {VERSION}`", at=0)
        at = cursor.skip_blank()
        version = cursor.take(_VERSION, "the version of the text form")
        if version != str(VERSION):
            cursor.fail(f"version {version} of the text form; this memir reads version {VERSION}", at=at)
        cursor.end()

    def _head(self, cursor: Cursor) -> None:
        """A line that is not indented."""
        at = cursor.position
        keyword = cursor.take(_KEYWORD, _one_of(_HEADS))
        if keyword == "storage":
            self._before_phases(cursor, at)
            self._storages.append(_storage(cursor))
            self._places["storage"].append(cursor.number)
        elif keyword == "value":
            self._before_phases(cursor, at)
            self._values.append(_value(cursor))
            self._places["value"].append(cursor.number)
            cursor.end()
        elif keyword == "phase":
            self._close_blocks(0)
            name = cursor.take(WORD, "the phase's name")
            cursor.end()
            self._blocks.append(_Block(0, lambda ops: self._phases.append(Phase(name, ops))))
        elif keyword in ("program", "dim", "domain", "mesh"):
            self._before_phases(cursor, at)
            self._declaration(keyword, cursor, at)
            cursor.end()
        else:
            inside = "  (an operator is indented, under a phase)" if keyword == "repeat" else ""
            cursor.fail(f"unknown line `{keyword}`{inside}", at=at, hint=_nearest(keyword, _HEADS))

    def _declaration(self, keyword: str, cursor: Cursor, at: int) -> None:
        if keyword == "program":
            if self._name is not None:
                cursor.fail("a second `program` line", at=at)
            self._name = cursor.take(AT, "@name")
        elif keyword == "dim":
            self._dims.append(cursor.take(WORD, "a symbol"))
            while cursor.sign(","):
                self._dims.append(cursor.take(WORD, "a symbol"))
        elif keyword == "domain":
            self._domain.append(cursor.take(_CONDITION, "a condition such as S <= 1024"))
        else:
            axis = cursor.take(WORD, "the name of a mesh axis")
            cursor.expect("=", "the axis")
            self._mesh.append((axis, read_size(cursor)))

    def _before_phases(self, cursor: Cursor, at: int) -> None:
        if self._blocks:
            cursor.fail("this line belongs before the first phase", at=at)

    def _indented(self, cursor: Cursor) -> None:
        """An operator or a Repeat, in the innermost open block that is indented less."""
        indent = cursor.position
        if not self._blocks:
            cursor.fail("an indented line outside a phase", at=indent)
        while self._blocks[-1].indent >= indent:
            self._close_last()
        block = self._blocks[-1]
        if block.inner is None:
            block.inner = indent
        elif block.inner != indent:
            cursor.fail(f"indented by {indent}; the lines before it by {block.inner}", at=indent)
        self._places["op"].append(cursor.number)
        keyword = _KEYWORD.match(cursor.text, indent)
        if keyword and keyword.group(1) == "repeat" and not cursor.text.startswith(("(", "."), keyword.end()):
            cursor.position = keyword.end()
            index = cursor.take(WORD, "the index's name")
            cursor.expect("<", "the index")
            count = read_size(cursor)
            cursor.end()
            self._blocks.append(_Block(indent, lambda ops: block.ops.append(Repeat(index, count, ops))))
        else:
            block.ops.append(_op(cursor))

    def _close_blocks(self, keep: int) -> None:
        while len(self._blocks) > keep:
            self._close_last()

    def _close_last(self) -> None:
        block = self._blocks.pop()
        block.close(tuple(block.ops))


def _storage(cursor: Cursor) -> Storage:
    name = cursor.take(STORAGE, "the storage's name, $name")
    cursor.expect(":", "the storage's name")
    nbytes = read_size(cursor)
    at = cursor.skip_blank()
    kind = cursor.take(WORD, "the storage's kind")
    if kind not in _KINDS:
        cursor.fail(f"unknown kind `{kind}`", at=at, hint=_nearest(kind, tuple(_KINDS)))
    device, of = "gpu", None
    flags = {"live_in": False, "live_out": False}
    while not cursor.at_end():
        at = cursor.skip_blank()
        keyword = cursor.try_take(_KEYWORD)
        if keyword == "on":
            device = cursor.take(WORD, "a device: gpu or host")
        elif keyword == "of":
            of = cursor.take(STORAGE, "a storage, $name")
        elif keyword in flags:
            if flags[keyword]:
                cursor.fail(f"`{keyword}` is given twice", at=at)
            flags[keyword] = True
        else:
            cursor.fail("expected on, of, live_in, live_out or the end of the line", at=at)
    return Storage(name, nbytes, _KINDS[kind], device, of, flags["live_in"], flags["live_out"])


_Type = tuple[str, tuple[Size, ...], tuple[Size, ...], Size]
_types: dict[str, _Type] = {}  # text of a type -> dtype, shape, strides, offset


def _value(cursor: Cursor) -> Value:
    """`%h: bf16[B, S, 64] strides[S, 1, 0] offset 64 in $h`; a type that was read before is looked up."""
    typed = TYPED.match(cursor.text, cursor.position)
    known = _types.get(typed.group(2)) if typed else None
    if typed and known:
        cursor.position = typed.end()
        return Value(typed.group(1), *known, typed.group(3))
    value = _read_value(cursor)
    if typed and typed.end() == cursor.position:
        _types[typed.group(2)] = (value.dtype, value.shape, value.strides, value.offset)
    return value


def _read_value(cursor: Cursor) -> Value:
    name = cursor.take(VALUE, "a value's name, %name")
    cursor.expect(":", "the value's name")
    dtype = cursor.take(WORD, "a dtype")
    shape = read_group(cursor)
    strides = contiguous(shape)
    offset = ZERO
    keyword = cursor.take(_KEYWORD, "strides, offset or `in`")
    if keyword == "strides":
        strides = read_group(cursor)
        keyword = cursor.take(_KEYWORD, "offset or `in`")
    if keyword == "offset":
        offset = read_size(cursor)
        keyword = cursor.take(_KEYWORD, "`in`")
    if keyword != "in":
        cursor.fail("expected `in $storage`", at=cursor.position - len(keyword))
    return Value(name, dtype, shape, strides, offset, cursor.take(STORAGE, "a storage, $name"))


def _op(cursor: Cursor) -> Op:
    results: list[Value] = []
    if cursor.text.startswith("%", cursor.position):
        results.append(_value(cursor))
        while cursor.sign(","):
            results.append(_value(cursor))
        cursor.expect("=", "the results")
    opcode = cursor.take(WORD, "an operator, such as aten.mm(%x, %w)")
    operands = _operands(cursor)
    found: dict[str, tuple[str, ...] | str | Size] = {}
    end = len(cursor.text)
    while cursor.position < end and not cursor.at_end():
        clause = _KEYWORD.match(cursor.text, cursor.position)
        keyword = clause.group(1) if clause else None
        at = clause.start(1) if clause else cursor.skip_blank()
        if clause is None or keyword not in _CLAUSES:
            cursor.fail(f"expected {_one_of(_CLAUSES)} or the end of the line", at=at, hint=_nearest(keyword or "", _CLAUSES))
        if keyword in found:
            cursor.fail(f"`{keyword}` is given twice", at=at)
        cursor.position = clause.end()
        found[keyword] = _clause(cursor, keyword)
    return Op(
        opcode,
        operands,
        tuple(results),
        frees=found.get("frees", ()),  # type: ignore[arg-type]  # _clause gives each keyword its type
        drops=found.get("drops", ()),  # type: ignore[arg-type]
        saves=found.get("saves", ()),  # type: ignore[arg-type]
        scratch=found.get("scratch", ZERO),  # type: ignore[arg-type]
        stream=found.get("stream", ""),  # type: ignore[arg-type]
        path=found.get("at", ""),  # type: ignore[arg-type]
        source=found.get("from", ""),  # type: ignore[arg-type]
        forward_of=found.get("forward"),  # type: ignore[arg-type]
    )


def _operands(cursor: Cursor) -> tuple[str, ...]:
    """`(%x, %w)`."""
    bare = cursor.try_match(OPERANDS)
    if bare:
        return tuple(bare.group(1).split(", %")) if bare.group(1) else ()
    cursor.expect("(", "the operator's name")
    if cursor.sign(")"):
        return ()
    operands = [cursor.take(VALUE, "a value, %name, or `)`")]
    while cursor.sign(","):
        operands.append(cursor.take(VALUE, "a value, %name"))
    if not cursor.sign(")"):
        cursor.fail("expected `,` or `)`")
    return tuple(operands)


def _clause(cursor: Cursor, keyword: str) -> tuple[str, ...] | str | Size:
    if keyword in ("saves", "drops", "frees"):
        bare = cursor.try_match(STORAGES)
        if bare:
            return tuple(bare.group(1).split(", $"))
        names = [cursor.take(STORAGE, "a storage, $name")]
        while cursor.sign(","):
            names.append(cursor.take(STORAGE, "a storage, $name"))
        return tuple(names)
    if keyword == "scratch":
        return read_size(cursor)
    if keyword == "forward":
        at = cursor.skip_blank()
        if cursor.try_take(_KEYWORD) != "of":
            cursor.fail("expected `of %value` after `forward`", at=at)
        return cursor.take(VALUE, "a value, %name")
    if keyword == "stream":
        return cursor.take(WORD, "the stream's name")
    if keyword == "at":
        return cursor.take(AT, "a module path, @path")
    return cursor.take(PLACE, "a place in the code, file:line")


def _one_of(words: tuple[str, ...]) -> str:
    return ", ".join(words[:-1]) + " or " + words[-1]


def _nearest(word: str, known: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(word, known, n=1)
    return f"did you mean  {near[0]}?" if near else f"known: {', '.join(known)}"


__all__ = ["Lines", "ParseError", "parse", "parse_located"]
