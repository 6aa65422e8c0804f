"""GPUs as far as memory goes: an amount that is typed, `80GiB`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from memir.errors import UsageError

UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_AMOUNT = re.compile(r"(\d+)(?:\.(\d+))?\s*([A-Za-z]*)")


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as it was named, and the bytes of its memory that a step may take."""

    name: str
    nbytes: int


def parse_gpu(text: str) -> Gpu:
    """The GPU that `text` names: an amount of memory with its unit, `80GiB`, `23.5GiB`, `40960MiB`.

    UsageError for anything else; GB and the like are refused, for makers and tools mean 10^9 or 2^30 bytes by them.
    """
    match = _AMOUNT.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"--gpu: {text!r} is no amount of memory", hint="write  --gpu 80GiB")
    whole, fraction, unit = match[1], match[2] or "", match[3]
    factor = {name.lower(): size for name, size in UNITS.items()}.get(unit.lower())
    if factor is None:
        number = text.strip().removesuffix(unit).rstrip()
        what = "has an unknown unit" if unit else "has no unit"
        if unit.upper() in ("KB", "MB", "GB", "TB"):
            what = f"is 10^{3 * 'KMGT'.index(unit[0].upper()) + 3} or 2^{10 * 'KMGT'.index(unit[0].upper()) + 10} bytes each"
        raise UsageError(f"--gpu: {text!r} {what}", hint=f"write  --gpu {number}GiB  (or {', '.join(UNITS)})")
    nbytes = int(whole + fraction) * factor // 10 ** len(fraction)
    if nbytes < 1:
        raise UsageError(f"--gpu: {text!r} is no memory at all")
    return Gpu(text.strip(), nbytes)
