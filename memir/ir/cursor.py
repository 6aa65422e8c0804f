"""Reading one line of text from left to right, with an error that shows the line and a caret."""

from __future__ import annotations

import json
import re
from typing import NoReturn

from memir.errors import ParseError

_END = re.compile(r"[ \t]*(?:#.*)?\r?$")
_QUOTED = r'"(?:[^"\\]|\\.)*"'

# What needs no quotes. A name may end in indices, `h[i-1]`, `kv[m, L-1-i]`, `w[:32]`.
_WORD = r"[\w.\-/+:]+"
_NAME = r"[\w.\-/+*]+(?:\[[\w +\-*/,:()^]*\])*"
WORD = re.compile(rf"[ \t]*({_WORD}|{_QUOTED})")
STORAGE = re.compile(rf"[ \t]*\$({_NAME}|{_QUOTED})")
VALUE = re.compile(rf"[ \t]*%({_NAME}|{_QUOTED})")
AT = re.compile(rf"[ \t]*@([^\s\"]\S*|{_QUOTED})")
PLACE = re.compile(rf"[ \t]*([^\s\"#]\S*|{_QUOTED})")
# Several bare names as the printer writes them; no name holds a sigil, so splitting at `, $` or `, %` is exact.
STORAGES = re.compile(rf" \$({_NAME}(?:, \${_NAME})*)(?![^\s#])")
OPERANDS = re.compile(rf"\((?:%({_NAME}(?:, %{_NAME})*))?\)")
TYPED = re.compile(rf"[ \t]*%({_NAME}): ([^%$\"=]+?) in \$({_NAME})(?![^\s,#])")
_BARE_WORD = re.compile(_WORD)
_BARE_NAME = re.compile(_NAME)


def quoted(text: str) -> str:
    """A JSON string; escapes whatever is not printable."""
    return json.dumps(text, ensure_ascii=not text.isprintable())


def word(text: str) -> str:
    """A word (device, stream, opcode, dimension), quoted when it must be."""
    return text if _BARE_WORD.fullmatch(text) else quoted(text)


def name(text: str) -> str:
    """A storage's or value's name without its sigil, quoted when it must be."""
    return text if _BARE_NAME.fullmatch(text) else quoted(text)


def place(text: str) -> str:
    """A module path or file:line; anything without blanks stays bare."""
    return text if text[:1] not in ("", '"', "#") and text.isprintable() and " " not in text else quoted(text)


class Cursor:
    """A position in one line. `number` is the line's, from 1."""

    __slots__ = ("file", "number", "position", "text")

    def __init__(self, text: str, number: int = 1, file: str = "<text>", position: int = 0) -> None:
        self.text = text
        self.number = number
        self.file = file
        self.position = position

    def fail(self, message: str, *, at: int | None = None, hint: str = "") -> NoReturn:
        """Raise a ParseError at the next character that is not blank, or at column `at` (from 0)."""
        if at is None:
            at = self.skip_blank()
        shown = self.text.rstrip("\r").replace("\t", " ")
        raise ParseError(message, file=self.file, line=self.number, column=at + 1, text=shown, hint=hint)

    def skip_blank(self) -> int:
        """Move to the next character that is not blank and return its position."""
        while self.text.startswith((" ", "\t"), self.position):
            self.position += 1
        return self.position

    def try_match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """Move past `pattern` if it stands here."""
        found = pattern.match(self.text, self.position)
        if found:
            self.position = found.end()
        return found

    def take(self, pattern: re.Pattern[str], expected: str) -> str:
        """Group 1 of `pattern`, which must stand here; unquoted if it is in quotes."""
        found = pattern.match(self.text, self.position)
        if found is None:
            self.fail(f"expected {expected}")
        text = found.group(1)
        if text[0] == '"':
            text = self._unquote(text, found.start(1))
        self.position = found.end()
        return text

    def try_take(self, pattern: re.Pattern[str]) -> str | None:
        """Group 1 of `pattern` if it stands here."""
        return self.take(pattern, "") if pattern.match(self.text, self.position) else None

    def _unquote(self, text: str, start: int) -> str:
        try:
            loaded = json.loads(text, strict=False)
        except json.JSONDecodeError as error:
            self.fail(f"not a valid string: {error.msg.lower()}", at=start + error.pos)
        assert isinstance(loaded, str)
        return loaded

    def sign(self, sign: str) -> bool:
        """Move past `sign` (and blanks before it) if it stands here."""
        start = self.position
        if self.text.startswith(sign, self.skip_blank()):
            self.position += len(sign)
            return True
        self.position = start
        return False

    def expect(self, sign: str, after: str = "") -> None:
        """Move past `sign`, which must stand here."""
        if not self.sign(sign):
            self.fail(f"expected `{sign}`" + (f" after {after}" if after else ""))

    def at_end(self) -> bool:
        """Whether nothing but blanks and a comment is left."""
        return _END.match(self.text, self.position) is not None

    def end(self, expected: str = "the end of the line") -> None:
        """Fail unless nothing but blanks and a comment is left."""
        if not self.at_end():
            self.fail(f"expected {expected}")
