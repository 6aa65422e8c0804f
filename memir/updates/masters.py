"""Master weights: an optimizer that updates fp32 copies of 16-bit parameters, and copies them back.

As Megatron-LM's Float16OptimizerWithFloat16Params does it (megatron/core/optimizer/optimizer.py):
`_copy_model_grads_to_main_grads` makes an fp32 copy of every gradient, which takes its place; the inner optimizer works on the
copies; `_copy_main_params_to_model_params` writes the parameters. Parameters that are fp32 have no copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from memir.updates.choice import Choice, Update
from memir.updates.tape import Member, Tape, existing

SOURCE = "megatron/core/optimizer/optimizer.py"
_WIDE = "f32"


def updated(tape: Tape, groups: Sequence[Sequence[Member]], update: Update, choice: Choice) -> list[str]:
    """Writes down a step on copies; the storages of the gradients that die in it."""
    copies: dict[int, Member] = {}
    for member in (m for group in groups for m in group):
        if member.dtype != _WIDE:
            master = tape.keep(member, "master", member.shape, _WIDE)
            copies[id(member)] = replace(member, parameter=master, states={})
        update.states(tape, copies.get(id(member), member), choice)
    tape.source = SOURCE
    narrow = [m for group in groups for m in group if id(m) in copies]
    for member in tape.each(narrow):
        copies[id(member)].gradient = tape.make(member, "aten._to_copy", member.gradient, shape=member.shape, dtype=_WIDE)
        tape.free(member.gradient.value.storage)
    tape.source = update.source
    for group in groups:
        update.step(tape, [copies.get(id(m), m) for m in group], choice)
    tape.source = SOURCE
    for member in tape.each(narrow):
        tape.run("aten.copy_", member.parameter, copies[id(member)].parameter)
    for member in narrow:
        copies[id(member)].gradient = existing(member.gradient.value)
    return [m.gradient.value.storage for m in narrow]
