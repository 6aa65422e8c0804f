"""How a model's forward is called: which parameter takes the token ids, which the targets, and where the loss comes back.

`--inputs` names what guessing cannot know. Its text is a list of NAME=VALUE with commas between them:

    ids=PARAMETER       the parameter of forward that takes the token ids, int64 [B, S]
    targets=PARAMETER   the one that takes the targets, int64 [B, S]; `targets=none`: the model is not given any
    mask=PARAMETER      the one that takes the padding mask (passed with --batch-kind padded only)
    loss=PLACE          where the loss is: return, item:1, item:loss, attr:loss, module:last_loss,
                        or where the logits are, when the loop computes it: logits:return, logits:item:0, logits:attr:logits
    OTHER=VALUE         any other parameter of forward, passed as this Python literal: start_pos=0
"""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from typing import Any

from torch import nn

from memir.errors import UsageError
from memir.frontend.discover import IDS_NAMES
from memir.frontend.load_values import convert, nearest_names

_TARGETS_NAMES = ("targets", "labels", "target", "label", "target_ids", "y", "ys", "tgt", "next_tokens", "lm_labels")
_MASK_NAMES = ("attention_mask", "padding_mask", "attn_mask", "mask")
_KNOWN_CONSTANTS: dict[str, Any] = {
    "start_pos": 0,
    "past_key_values": None,
    "use_cache": False,
    "cache": None,
    "kv_cache": None,
}
_LOSS = re.compile(r"return|item:[\w-]+|attr:\w+|module:[\w.]+|logits:(return|item:[\w-]+|attr:\w+)")


@dataclass(frozen=True, slots=True)
class Entry:
    """The parameters of forward that are known, before the loss is found. `loss` is what the user said, or empty."""

    ids: str
    targets: str | None
    mask: str | None
    constants: tuple[tuple[str, Any], ...]
    loss: str = ""


def parse_inputs(text: str) -> dict[str, str]:
    """`--inputs` as a dictionary. UsageError: a word without `=`, a name given twice, a place of the loss that is none."""
    given: dict[str, str] = {}
    for word in filter(None, (w.strip() for w in _split_outside_brackets(text))):
        name, equals, value = (part.strip() for part in word.partition("="))
        if not equals or not name.isidentifier() or not value:
            raise UsageError(
                f"--inputs: {word!r} is not NAME=VALUE", hint="for example  --inputs ids=idx,targets=targets,loss=item:1"
            )
        if name in given:
            raise UsageError(f"--inputs: {name} is given twice", where=text)
        given[name] = value
    if "loss" in given and not _LOSS.fullmatch(given["loss"]):
        raise UsageError(
            f"--inputs: loss={given['loss']} names no place",
            hint="places: return, item:1, item:loss, attr:loss, module:last_loss, logits:return, logits:attr:logits",
        )
    return given


def _split_outside_brackets(text: str) -> list[str]:
    words, depth, start = [], 0, 0
    for i, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth <= 0:
            words.append(text[start:i])
            start = i + 1
    return [*words, text[start:]]


def find_entry(module: nn.Module, inputs: str | None, *, padded: bool, where: str) -> Entry:
    """The entry that the names in forward's signature say, or `--inputs`.

    UsageError: a parameter that forward does not have, no parameter for the ids, a required one that nothing is known about.
    """
    given = parse_inputs(inputs) if inputs else {}
    parameters = {
        p.name: p
        for p in inspect.signature(module.forward).parameters.values()
        if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD, p.POSITIONAL_ONLY)
    }
    shown = f"forward({', '.join(parameters)}) of {type(module).__name__}"
    roles = {role: given.pop(role) for role in ("ids", "targets", "mask") if role in given}
    loss = given.pop("loss", "")
    for name in [*(v for r, v in roles.items() if not (r == "targets" and v == "none")), *given]:
        if name not in parameters:
            close = nearest_names(name, parameters) or list(parameters)
            raise UsageError(f"--inputs: {shown} has no parameter {name!r}", where=where, hint=f"it has: {', '.join(close)}")
    free = [name for name in parameters if name not in given and name not in roles.values()]
    ids = roles.get("ids") or next((n for n in IDS_NAMES if n in free), None) or next(iter(free), None)
    if ids is None:
        raise UsageError(f"{shown} takes no token ids", where=where, hint="say which parameter:  --inputs ids=NAME")
    targets = roles.get("targets") or next((n for n in _TARGETS_NAMES if n in free and n != ids), None)
    mask = roles.get("mask") or next((n for n in _MASK_NAMES[:2] if n in free and n != ids), None)
    constants = [(name, convert(text, None, f"--inputs {name}")) for name, text in given.items()]
    unknown = []
    for name, parameter in parameters.items():
        if parameter.default is not parameter.empty or name in (ids, targets, *given) or (padded and name == mask):
            continue
        if name in _KNOWN_CONSTANTS or name in _MASK_NAMES:
            constants.append((name, _KNOWN_CONSTANTS.get(name)))
        else:
            unknown.append(name)
    if unknown:
        raise UsageError(
            f"{shown} needs {', '.join(unknown)}, and memir cannot know {'its value' if len(unknown) == 1 else 'their values'}",
            where=where,
            hint=f"say what the loop passes:  --inputs {','.join(f'{name}=VALUE' for name in unknown)}",
        )
    return Entry(ids, None if targets == "none" else targets, mask if padded else None, tuple(constants), loss)
