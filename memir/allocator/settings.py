"""The allocator's settings: a PYTORCH_CUDA_ALLOC_CONF string as PyTorch reads it.

    expandable_segments:True,max_split_size_mb:128,roundup_power2_divisions:[256:1,512:2,>:4]

Source: AcceleratorAllocatorConfig (c10/core/AllocatorConfig.{h,cpp}) for what every device has, CUDAAllocatorConfig
(c10/cuda/CUDAAllocatorConfig.{h,cpp}) for the rest, torch 2.13. PyTorch ignores a misspelt separator, reads `128abc` as 128 and
takes whatever comes last of a key given twice; here these are errors.
"""

from __future__ import annotations

import difflib
import math
import re
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NoReturn

from memir.errors import ParseError

VARIABLE = "PYTORCH_CUDA_ALLOC_CONF"
MIB = 2**20
INTERVALS = 16  # kRoundUpPowerOfTwoIntervals: one from 1 MiB on, one from 2 MiB on, ..., the last from 32 GiB on
MIN_LARGE_SEGMENT = 10  # kMinLargeAlloc in MiB: large_segment_size_mb has to be more


@dataclass(frozen=True, slots=True)
class Settings:
    """What of the settings decides about device memory; sizes in bytes. The defaults are PyTorch's."""

    expandable_segments: bool = False
    max_split_size: int | None = None  # blocks of this size and more are neither split nor given to smaller requests
    max_non_split_rounding_size: int = 20 * MIB  # how much larger than the request such a block may be
    large_segment_size: int = 20 * MIB  # segment for requests from 1 to 10 MiB; granule of expandable segments
    roundup_power2_divisions: tuple[int, ...] = (0,) * INTERVALS  # by power of two of the request from 1 MiB; 0 or 1: none
    garbage_collection_threshold: float = 0.0  # of the allowed memory, above which cached blocks are freed; 0: never
    per_process_memory_fraction: float = 1.0  # of the device's memory that is allowed; 1: no limit but the device
    backend: str = "native"

    def divisions(self, nbytes: int) -> int:
        """Into how many parts a power of two is divided to round a request of `nbytes` up; 0 or 1: it is not.

        AcceleratorAllocatorConfig::roundup_power2_divisions(size).
        """
        interval = max(0, nbytes.bit_length() - 1 - 20)
        return self.roundup_power2_divisions[min(interval, INTERVALS - 1)]


def parse_settings(text: str) -> Settings:
    """The settings that PyTorch would take from `text`; an empty one is the defaults.

    UsageError, with the place in the text, for an unknown key, a value that is malformed or out of range, a key given twice,
    and settings that contradict each other.
    """
    reader = _Reader(text)
    found: dict[str, object] = {}
    places: dict[str, int] = {}
    while not reader.at_end:
        column, key = reader.word("the name of a setting")
        known = KEYS.get(key)
        if known is None:
            near = difflib.get_close_matches(key, KEYS, n=3)
            hint = f"did you mean  {', '.join(near)}?" if near else textwrap.fill(f"known: {', '.join(KEYS)}", 96)
            reader.fail(f"{VARIABLE} has no setting {key!r}", column, hint=hint)
        if key in places:
            reader.fail(f"{key} is given twice", column)
        places[key] = column
        reader.sign(":")
        field, read = known
        value = read(reader, key)
        if field:
            found[field] = value
        if not reader.at_end:
            reader.sign(",")
    settings = Settings(**found)  # type: ignore[arg-type]  # each reader of KEYS gives its field's type
    _check(settings, reader, places)
    return settings


def _check(settings: Settings, reader: _Reader, places: Mapping[str, int]) -> None:
    """PyTorch checks both against the large segment, but only one that it has read before them."""
    segment = settings.large_segment_size
    limits = {
        "max_split_size_mb": settings.max_split_size,
        "max_non_split_rounding_mb": settings.max_non_split_rounding_size,
    }
    for key, size in limits.items():
        if key in places and size is not None and size < segment:
            reader.fail(
                f"{key}:{size // MIB} is less than a segment for requests from 1 to 10 MiB, {segment // MIB} MiB",
                places[key],
                hint=f"give {segment // MIB} or more, or a smaller large_segment_size_mb",
            )
    native = [key for key in places if key not in ("backend", "per_process_memory_fraction")]
    if settings.backend != "native" and native:
        reader.fail(f"backend:{settings.backend} ignores {', '.join(native)}", places["backend"], hint="leave out one of them")


class _Reader:
    """The tokens of the text and their columns, as ConfigTokenizer makes them: blanks count nowhere."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._tokens: list[tuple[int, str]] = []
        for match in re.finditer(r"[,:\[\]]|[^,:\[\]]+", text):
            token = "".join(match.group().split())
            if token:
                self._tokens.append((match.start() + len(match.group()) - len(match.group().lstrip()) + 1, token))
        self._place = 0

    @property
    def at_end(self) -> bool:
        return self._place == len(self._tokens)

    def fail(self, message: str, column: int | None = None, hint: str = "") -> NoReturn:
        """ParseError that points to a column (from 1); without one to the next token."""
        if column is None:
            column = len(self.text) + 1 if self.at_end else self._tokens[self._place][0]
        raise ParseError(message, file=VARIABLE, line=1, column=column, text=self.text, hint=hint)

    def peek(self, sign: str) -> bool:
        """Whether the next token is this one."""
        return not self.at_end and self._tokens[self._place][1] == sign

    def sign(self, sign: str) -> None:
        """Go past this sign."""
        if not self.peek(sign):
            got = "the end" if self.at_end else repr(self._tokens[self._place][1])
            self.fail(f"expected {sign!r}, not {got}")
        self._place += 1

    def word(self, what: str) -> tuple[int, str]:
        """Go past a word; its column and text."""
        if self.at_end or self._tokens[self._place][1] in ",:[]":
            self.fail(f"expected {what}")
        self._place += 1
        return self._tokens[self._place - 1]

    def whole(self, what: str) -> tuple[int, int]:
        """Go past a whole number of at most 18 digits (PyTorch: std::stoull); its column and value."""
        column, word = self.word(what)
        if not re.fullmatch(r"[0-9]{1,18}", word):
            self.fail(f"expected {what}, a whole number, not {word!r}", column)
        return column, int(word)


def _boolean(reader: _Reader, key: str) -> bool:
    column, word = reader.word("True or False")
    if word not in ("True", "False"):
        reader.fail(f"{key} is True or False, not {word!r}", column, hint="with a capital letter, as in Python")
    return word == "True"


def _mebibytes(reader: _Reader, key: str) -> int:
    return reader.whole("a number of MiB")[1] * MIB


def _large_segment(reader: _Reader, key: str) -> int:
    column, number = reader.whole("a number of MiB")
    if number <= MIN_LARGE_SEGMENT:
        reader.fail(f"{key} has to be more than {MIN_LARGE_SEGMENT}, not {number}", column)
    return number * MIB


def _count(reader: _Reader, key: str) -> int:
    return reader.whole("a number")[1]


def _fraction(reader: _Reader, key: str) -> float:
    column, word = reader.word("a number from 0 to 1")
    try:
        number = float(word)
    except ValueError:
        number = math.nan
    open_ends = key == "garbage_collection_threshold"
    if not 0 <= number <= 1 or (open_ends and number in (0, 1)):
        reader.fail(f"{key} is a number from 0 to 1{', neither of them' if open_ends else ''}, not {word!r}", column)
    return number


def _backend(reader: _Reader, key: str) -> str:
    column, word = reader.word("native or cudaMallocAsync")
    if word not in ("native", "cudaMallocAsync"):
        reader.fail(f"{key} is native or cudaMallocAsync, not {word!r}", column)
    return word


def _divisions(reader: _Reader, key: str) -> tuple[int, ...]:
    """A power of two for all sizes, or a list of `interval:divisions`, interval the MiB of a power of two or `>`.

    The first entry holds for smaller sizes too, `>` for all above the one before it; what no entry names is not rounded.
    AcceleratorAllocatorConfig::parseRoundUpPower2Divisions.
    """
    if not reader.peek("["):
        column, number = reader.whole("a power of two, or a list [256:1,512:2,>:4]")
        if not _is_power_of_two(number):
            reader.fail(f"{key} is a power of two, not {number}", column)
        return (number,) * INTERVALS
    reader.sign("[")
    divisions = [0] * INTERVALS
    last, first = 0, True
    while not reader.peek("]"):
        column, word = reader.word("an interval such as 256, or >")
        reader.sign(":")
        place, number = reader.whole("a number of divisions")
        if number and not _is_power_of_two(number):
            reader.fail(f"{key}: a number of divisions is a power of two, or 0 for no rounding, not {number}", place)
        if word == ">":
            divisions[last + 1 :] = [number] * (INTERVALS - last - 1)
        elif re.fullmatch(r"[0-9]{1,18}", word) and _is_power_of_two(int(word)):
            last = min(int(word).bit_length() - 1, INTERVALS - 1)
            if first:
                divisions[:last] = [number] * last
                first = False
            divisions[last] = number
        else:
            reader.fail(f"{key}: an interval is a power of two in MiB, or > for all above, not {word!r}", column)
        if not reader.peek("]"):
            reader.sign(",")
    reader.sign("]")
    return tuple(divisions)


def _is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


Read = Callable[[_Reader, str], object]

KEYS: Mapping[str, tuple[str, Read]] = {
    "expandable_segments": ("expandable_segments", _boolean),
    "max_split_size_mb": ("max_split_size", _mebibytes),
    "max_non_split_rounding_mb": ("max_non_split_rounding_size", _mebibytes),
    "large_segment_size_mb": ("large_segment_size", _large_segment),
    "roundup_power2_divisions": ("roundup_power2_divisions", _divisions),
    "garbage_collection_threshold": ("garbage_collection_threshold", _fraction),
    "per_process_memory_fraction": ("per_process_memory_fraction", _fraction),
    "backend": ("backend", _backend),
    "graph_capture_record_stream_reuse": ("", _boolean),
    "pinned_free_catch_all": ("", _boolean),
    "pinned_max_cached_size_mb": ("", _mebibytes),
    "pinned_max_round_threshold_mb": ("", _mebibytes),
    "pinned_num_register_threads": ("", _count),
    "pinned_reserve_segment_size_mb": ("", _mebibytes),
    "pinned_use_background_threads": ("", _boolean),
    "pinned_use_cuda_host_register": ("", _boolean),
    "release_lock_on_cudamalloc": ("", _boolean),
    "throw_on_cudamalloc_oom": ("", _boolean),
}  # setting -> (field of Settings, or none where it concerns neither device memory nor its figures; how its value is read)
