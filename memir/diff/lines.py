"""What differs between two versions of the sources: changed stretches of lines, and where an unchanged line went.

The comparison is difflib's, line by line, without looking at blanks at a line's end.
"""

from __future__ import annotations

import ast
import difflib
import io
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True)
class Hunk:
    """A changed stretch: lines `before` of the base's file and `after` of the head's, counted from 1; either may be empty."""

    base_file: str
    file: str  # the head's; the base's where the head has none
    before: range
    after: range

    neutral: bool = False  # it only renames or moves: the same attributes, calls, operators and constants stand there

    @property
    def line(self) -> int:
        """Where it stands in the head: its first line, or the line that follows what was removed."""
        return max(1, self.after.start)


@dataclass(frozen=True, slots=True)
class Source:
    """One version of a file as lines, and what is needed of its syntax."""

    lines: tuple[str, ...]
    is_code: frozenset[int]  # lines with code on them: no comment, no docstring, no blank
    functions: tuple[tuple[int, int, str], ...] = ()  # first line, last line, dotted name of functions and classes, outer first
    statements: Mapping[int, range] = field(
        default_factory=dict
    )  # line -> the lines of the simple statement that it is part of
    stores: Mapping[int, frozenset[str]] = field(default_factory=dict)  # line -> names that it gives a value, attributes too
    loads: Mapping[int, frozenset[str]] = field(default_factory=dict)  # line -> names and attributes that it reads
    contents: Mapping[int, tuple[str, ...]] = field(default_factory=dict)  # line -> what it does, without variables' names

    @staticmethod
    def read(text: str) -> Source:
        """Of Python text; of text that does not parse every line that is not blank is code."""
        lines = tuple(text.splitlines())
        try:
            tree = ast.parse(text)
            code = _code_lines(text)
        except (SyntaxError, ValueError, tokenize.TokenError):
            return Source(lines, frozenset(n for n, line in enumerate(lines, 1) if line.strip()))
        found: list[tuple[int, int, str]] = []
        _functions(tree, "", found)
        return Source(
            lines, frozenset(code - _docstrings(tree)), tuple(found), _statements(tree), *_names(tree), _contents(tree)
        )

    def statement(self, line: int) -> range:
        """The lines of the simple statement that a line is part of; the line itself where there is none."""
        return self.statements.get(line, range(line, line + 1))

    def around(self, line: int) -> tuple[str, ...]:
        """The dotted names of the functions and classes that a line lies in, innermost first."""
        return tuple(name for first, last, name in reversed(self.functions) if first <= line <= last)


def _code_lines(text: str) -> set[int]:
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in skipped:
            found.update(range(token.start[0], token.end[0] + 1))
    return found


def _docstrings(tree: ast.AST) -> set[int]:
    found: set[int] = set()
    for node in ast.walk(tree):
        for statement in getattr(node, "body", ()) if isinstance(getattr(node, "body", ()), list) else ():
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                found.update(range(statement.lineno, (statement.end_lineno or statement.lineno) + 1))
    return found


def _functions(node: ast.AST, prefix: str, found: list[tuple[int, int, str]]) -> None:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{prefix}.{child.name}" if prefix else child.name
            first = min([child.lineno, *(d.lineno for d in child.decorator_list)])
            found.append((first, child.end_lineno or child.lineno, name))
            _functions(child, name, found)
        else:
            _functions(child, prefix, found)


_REGISTERS = ("register_buffer", "register_parameter", "add_module", "register_module")  # of torch.nn.Module


def _statements(tree: ast.AST) -> dict[int, range]:
    """Of the lines of simple statements, and of the headers of compound ones."""
    found: dict[int, range] = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.stmt):
            continue
        body = getattr(node, "body", None)
        last = body[0].lineno - 1 if isinstance(body, list) and body else node.end_lineno or node.lineno
        lines = range(node.lineno, max(last, node.lineno) + 1)
        found.update(dict.fromkeys(lines, lines))
    return found


def _names(tree: ast.AST) -> tuple[dict[int, frozenset[str]], dict[int, frozenset[str]]]:
    """Names by line: those that get a value there (keyword arguments and parameters too), and those that are read."""
    stores: dict[int, set[str]] = {}
    loads: dict[int, set[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            (loads if isinstance(node.ctx, ast.Load) else stores).setdefault(node.lineno, set()).add(node.id)
        elif isinstance(node, ast.Attribute):
            line = node.end_lineno or node.lineno
            (loads if isinstance(node.ctx, ast.Load) else stores).setdefault(line, set()).add(node.attr)
        elif isinstance(node, ast.arg | ast.keyword) and node.arg:
            stores.setdefault(node.lineno, set()).add(node.arg)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _REGISTERS:
            given = next((a.value for a in node.args[:1] if isinstance(a, ast.Constant)), "*")  # "*": a name that is computed
            stores.setdefault(node.lineno, set()).add(str(given))
    return {n: frozenset(names) for n, names in stores.items()}, {n: frozenset(names) for n, names in loads.items()}


@dataclass(frozen=True, slots=True)
class Sources:
    """Both versions of the files that differ. Files that are not in it are alike."""

    base: Mapping[str, Source]  # by the path as an operator's `source` shows it
    head: Mapping[str, Source]
    pairs: Mapping[str, str]  # a base's file -> the head's file that it became
    hunks: tuple[Hunk, ...]
    _moved: Mapping[tuple[str, int], int] = field(default_factory=dict)

    def to_head(self, source: str) -> str:
        """`file:line` of the base as it stands in the head; "" where the line was changed or removed."""
        file, line = split(source)
        if file not in self.pairs:
            return "" if file in self.base else source
        number = self._moved.get((file, line))
        return "" if number is None else f"{self.pairs[file]}:{number}"

    def text(self, hunk: Hunk, line: int, *, removed: bool = False) -> str:
        """A line of a hunk without its indentation."""
        source = self.base.get(hunk.base_file) if removed else self.head.get(hunk.file)
        return source.lines[line - 1].strip() if source and 0 < line <= len(source.lines) else ""


def split(source: str) -> tuple[str, int]:
    """`file:line` as both; line 0 where there is none."""
    file, _, line = source.rpartition(":")
    return (file, int(line)) if line.isdigit() else (source, 0)


def compare_sources(pairs: Iterable[tuple[str, str | None, str, str | None]]) -> Sources:
    """The differences of files: each as the base's name, its text, the head's name, its text; None where there is no such file.

    Hunks without a line of code in them (comments, docstrings) are left out.
    """
    base: dict[str, Source] = {}
    head: dict[str, Source] = {}
    names: dict[str, str] = {}
    moved: dict[tuple[str, int], int] = {}
    hunks: list[Hunk] = []
    for base_file, base_text, file, text in sorted(pairs, key=lambda pair: (pair[2], pair[0])):
        old = base[base_file] = Source.read(base_text or "")
        new = head[file] = Source.read(text or "")
        if base_text is not None and text is not None:
            names[base_file] = file
        for tag, i, j, k, m in _opcodes(old.lines, new.lines):
            if tag == "equal":
                moved.update({(base_file, i + n + 1): k + n + 1 for n in range(j - i)})
                continue
            before, after = range(i + 1, j + 1), range(k + 1, m + 1)
            if old.is_code.intersection(before) or new.is_code.intersection(after):
                hunks.append(Hunk(base_file, file, before, after))
    return Sources(base, head, names, tuple(_judged(hunks, base, head)), moved)


def _judged(hunks: Sequence[Hunk], base: Mapping[str, Source], head: Mapping[str, Source]) -> Iterator[Hunk]:
    """The hunks, each with whether it is neutral: by itself, or together with another one of its file (a line that moved)."""
    bags = [(_bag(base[h.base_file], h.before), _bag(head[h.file], h.after)) for h in hunks]
    for number, hunk in enumerate(hunks):
        before, after = bags[number]
        scope = _scope(hunk, base, head)
        others = [bags[k] for k, other in enumerate(hunks) if k != number and _scope(other, base, head) == scope]
        moved = any(before + b == after + a and before != after for b, a in others)
        yield replace(hunk, neutral=before == after or moved)


def _scope(hunk: Hunk, base: Mapping[str, Source], head: Mapping[str, Source]) -> tuple[str, str]:
    """The file and innermost function or class of a hunk."""
    source, lines = (head[hunk.file], hunk.after) if hunk.after else (base[hunk.base_file], hunk.before)
    return hunk.file, (source.around(lines.start) or ("",))[0]


def _bag(source: Source, lines: range) -> Counter[str]:
    total: Counter[str] = Counter()
    for line in lines:
        total.update(source.contents.get(line, ()))
    return total


def _contents(tree: ast.AST) -> dict[int, tuple[str, ...]]:
    """What a line does, whatever its variables are called: attributes, global names, operators, constants, kinds of statement.

    Local variables are left out, so that one that is renamed, or is new for a part of an expression, changes nothing.
    """
    found: dict[int, list[str]] = {}
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    local = {
        inner.id for f in functions for inner in ast.walk(f) if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store)
    }
    local |= {a.arg for f in functions for a in ast.walk(f.args) if isinstance(a, ast.arg)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.expr | ast.stmt | ast.keyword):
            continue
        words = [type(op).__name__ for op in (getattr(node, "op", None), *getattr(node, "ops", ())) if isinstance(op, ast.AST)]
        line = node.end_lineno if isinstance(node, ast.Attribute) else node.lineno
        found.setdefault(line or 0, []).extend(filter(None, [_word(node, local), *words]))
    return {line: tuple(words) for line, words in found.items()}


def _word(node: ast.AST, local: set[str]) -> str:
    if isinstance(node, ast.Attribute):
        return f"{'=' if isinstance(node.ctx, ast.Store) else ''}.{node.attr}"
    if isinstance(node, ast.Name) and node.id not in local:
        return f"{'=' if isinstance(node.ctx, ast.Store) else ''}{node.id}"
    if isinstance(node, ast.Constant):
        return repr(node.value)
    if isinstance(node, ast.keyword):
        return f"{node.arg}="
    plain = (ast.Assign, ast.AnnAssign, ast.Expr, ast.Return)
    return type(node).__name__ if isinstance(node, ast.stmt | ast.Subscript | ast.Slice) and not isinstance(node, plain) else ""


def _opcodes(before: Sequence[str], after: Sequence[str]) -> Sequence[tuple[str, int, int, int, int]]:
    old, new = [line.rstrip() for line in before], [line.rstrip() for line in after]
    return difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
