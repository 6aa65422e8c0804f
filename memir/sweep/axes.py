"""Lists and ranges as they are typed: `1,2,4,8`, `512:8192:512`, `1,2,8:64:8`."""

from __future__ import annotations

import re

from memir.errors import UsageError

MAX_VALUES = 1_000_000  # of one axis; more is a typing error
_NUMBER = re.compile(r"[-+]?\d+")


def parse_axis(text: str, option: str) -> tuple[int, ...]:
    """The positive whole numbers that `text` spells, ascending, each once; `option` ("--batch") is named in errors.

    A word is a number or a range `first:last` or `first:last:step`, with both ends: `512:2048:512` is 512, 1024, 1536, 2048.
    """
    values: set[int] = set()
    for word in (part.strip() for part in text.split(",")):
        if not word:
            raise UsageError(f"{option}: {text!r} has an empty place", hint=_example(option))
        parts = [part.strip() for part in word.split(":")]
        if len(parts) > 3 or not all(_NUMBER.fullmatch(part) for part in parts):
            raise UsageError(f"{option}: {word!r} is neither a number nor a range first:last:step", hint=_example(option))
        numbers = [int(part) for part in parts]
        for number in numbers:
            if number < 1:
                raise UsageError(f"{option}: {number} is not a positive number")
        first, last, step = numbers[0], numbers[-1] if len(numbers) < 3 else numbers[1], numbers[2] if len(numbers) == 3 else 1
        if last < first:
            raise UsageError(f"{option}: the range {word} ends below its start")
        if len(values) + (last - first) // step >= MAX_VALUES:
            raise UsageError(f"{option}: {word} gives more than {MAX_VALUES:,} values")
        values.update(range(first, last + 1, step))
    return tuple(sorted(values))


def parse_words(text: str, option: str) -> tuple[str, ...]:
    """The words between commas in the order typed; UsageError for an empty one or one that is given twice."""
    words = [word.strip() for word in text.split(",")]
    for place, word in enumerate(words):
        if not word:
            raise UsageError(f"{option}: {text!r} has an empty place", hint=f"write  {option} one,other")
        if word in words[:place]:
            raise UsageError(f"{option}: {word} is given twice")
    return tuple(words)


def _example(option: str) -> str:
    return f"write  {option} {'512:8192:512' if option == '--seq' else '1,2,4,8'}"
