"""What `--gpu` says: a card by its name, `a100-80gb`, or an amount of memory, `80GiB`."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from memir.errors import UsageError
from memir.hardware.cards import Card, cards

UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
MOST = 2**40  # bytes; no single GPU has more, so a larger amount is a typing error
_AMOUNT = re.compile(r"(\d+)(?:\.(\d+))?\s*([A-Za-z]*)")
_MAKERS = ("nvidia", "geforce", "tesla", "quadro")  # words that are left out as often as they are typed
_NEAREST = 6  # names in a hint


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as it was named, the bytes of its memory that a step may take, and its card if it is one of the table's."""

    name: str
    nbytes: int
    card: Card | None = None


def parse_gpu(text: str) -> Gpu:
    """The GPU that `text` names: a card of `memir gpus`, or an amount of memory with its unit, `80GiB`, `23.5GiB`, `40960MiB`.

    UsageError for anything else, with the nearest names; GB and the like are refused, for makers and tools mean 10^9 or 2^30
    bytes by them; so is an amount of nothing or of more than 1 TiB.
    """
    card = find_card(text)
    if card is not None:
        return Gpu(text.strip(), card.capacity, card)
    match = _AMOUNT.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"--gpu: {text!r} is no amount of memory and no known GPU", hint=_hint(text))
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
    if nbytes > MOST:
        raise UsageError(
            f"--gpu: {text!r} is more than the memory of any GPU", hint="write the memory of one GPU:  --gpu 80GiB"
        )
    return Gpu(text.strip(), nbytes)


def find_card(text: str) -> Card | None:
    """The card of that name or alias; capitals, blanks, dashes, underscores and the maker's name do not matter."""
    return _by_spelling().get(_spelling(text))


def _by_spelling() -> dict[str, Card]:
    return {_spelling(name): card for card in cards() for name in (card.key, card.name, *card.aliases)}


def _spelling(text: str) -> str:
    words = re.split(r"[\s_\-/]+", text.strip().lower())
    return "".join(word for word in words if word not in _MAKERS)


def _hint(text: str) -> str:
    """The cards whose names begin as the text does (`a100` is four of them); else those that contain it or look like it."""
    wanted = _spelling(text)
    names = {_spelling(name): card.key for card in cards() for name in (card.key, *card.aliases)}
    close = [key for name, key in names.items() if wanted and name.startswith(wanted)]
    if not close:
        close = [key for name, key in names.items() if len(wanted) > 1 and wanted in name]
        close += [names[name] for name in difflib.get_close_matches(wanted, names, n=_NEAREST, cutoff=0.6)]
    nearest = list(dict.fromkeys(close))[:_NEAREST]
    amount = "or write an amount:  --gpu 80GiB"
    return (f"nearest: {', '.join(nearest)}" if nearest else "memir gpus  lists them") + f"; {amount}"
