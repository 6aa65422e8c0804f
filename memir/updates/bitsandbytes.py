"""bitsandbytes' optimizers: fp32 states, or one byte an element with a scale for 256 of them; one kernel a parameter.

The rules are those of `memir.frontend.optimizers_bnb`, which traces the same operators; its docstring has the sources.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from memir.errors import InconclusiveError
from memir.ir.layout import product
from memir.ir.size import Size
from memir.updates.choice import Choice, Update
from memir.updates.names import Named
from memir.updates.tape import Member, Tape, Tensor

SMALLEST_8BIT = 4096  # elements (`min_8bit_size`)
BLOCK = 256  # elements that share a scale
SMALLEST_PAGED = 100_000  # elements (`get_state_buffer`)
NUM_STATES = {"Adam": 2, "AdamW": 2, "Lion": 1, "RMSprop": 1}
KERNEL = {"Adam": "adam", "AdamW": "adam", "Lion": "lion", "RMSprop": "rmsprop"}


def tables(named: Named, on_cuda: bool) -> tuple[str, ...]:
    """The tables of 256 values that all 8-bit states share."""
    if named.bits != 8:
        return ()
    both = NUM_STATES[named.cls] == 2 or not on_cuda
    return ("optimizer.dynamic", "optimizer.udynamic") if both else ("optimizer.dynamic",)


def _states(tape: Tape, member: Member, choice: Choice, named: Named) -> None:
    count = product(member.shape)
    if not count.is_constant:
        raise InconclusiveError("bitsandbytes' states depend on the number of elements, which is a symbol", where=member.base)
    narrow = named.bits == 8 and count.constant >= SMALLEST_8BIT and not (named.wide_embeddings and member.is_embedding)
    for k in range(1, NUM_STATES[named.cls] + 1):
        host = named.paged and choice.on_cuda and count.constant >= SMALLEST_PAGED
        tape.keep(member, f"state{k}", member.shape, "u8" if narrow else "f32", host=host)
        if narrow:
            tape.keep(member, f"absmax{k}", (Size.of(-(-count.constant // BLOCK)),), "f32")


def _step(tape: Tape, members: Sequence[Member], choice: Choice, named: Named) -> None:
    shared = [tape.shared_states[name] for name in tables(named, choice.on_cuda)]
    number = NUM_STATES[named.cls]
    for m in tape.each(members):
        states = [m.states[f"state{k + 1}"] for k in range(number)]
        narrow = states[0].dtype == "u8"
        scales: list[Tensor] = [m.states[f"absmax{k + 1}"] for k in range(number)] if narrow else []
        kernel = f"{KERNEL[named.cls]}{'_8bit_blockwise' if narrow else '32bit'}"
        tape.run(f"bitsandbytes.{kernel}", m.gradient, m.parameter, states, scales, shared[:number] if narrow else [])


def described(named: Named) -> Update:
    """The optimizer of that name."""
    return Update("", partial(_states, named=named), partial(_step, named=named), forms=("for-loop",))
