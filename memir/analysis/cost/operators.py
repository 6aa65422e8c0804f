"""How long a program's operators take at some sizes: products by shape, attention by its kernel, the rest by bytes moved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from memir.analysis.cost.attention import attention_seconds
from memir.analysis.cost.device import DISPATCH, LAUNCH, Device
from memir.analysis.cost.product import product_seconds
from memir.analysis.flops import Work

Env = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds of one or more operators by what takes them. `host` is the time that the host needs to launch them."""

    product: float = 0.0
    attention: float = 0.0
    memory: float = 0.0
    launch: float = 0.0
    host: float = 0.0

    @property
    def total(self) -> float:
        """On the GPU, or on the host where launching takes longer."""
        return max(self.product + self.attention + self.memory + self.launch, self.host)

    def __add__(self, other: Spent) -> Spent:
        return Spent(
            self.product + other.product,
            self.attention + other.attention,
            self.memory + other.memory,
            self.launch + other.launch,
            self.host + other.host,
        )

    def __mul__(self, times: float) -> Spent:
        return Spent(self.product * times, self.attention * times, self.memory * times, self.launch * times, self.host * times)


def once(work: Work, env: Env, device: Device) -> Spent:
    """One execution of an operator."""
    form = work.shape.form
    dims = [d.evaluate(env) for d in work.shape.dims]
    if not form:
        return Spent(memory=work.nbytes.evaluate(env) / device.bandwidth, launch=LAUNCH, host=DISPATCH)
    if form in ("forward", "backward"):
        operands = len(work.op.operands) - (0 if form == "forward" else 1)
        masked = "efficient" in work.op.opcode and operands > (3 if form == "forward" else 5)
        flops = work.flops.evaluate(env)
        moved = work.nbytes.evaluate(env) / device.bandwidth
        taken = attention_seconds(form, work.op.opcode, masked, flops, dims[2], dims[3], device)
        return Spent(attention=max(taken, moved), launch=LAUNCH, host=DISPATCH)
    batch, m, n, k = dims
    if form == "groups":
        m = -(-m // batch)
    elif form == "weights":
        k = -(-k // batch)
    return Spent(product=product_seconds(batch, m, n, k, work.dtype, device), launch=LAUNCH, host=DISPATCH)


def spent(works: Sequence[Work], env: Env, device: Device) -> dict[str, Spent]:
    """All executions of some operators, by phase."""
    found: dict[str, Spent] = {}
    for work in works:
        times = work.times.evaluate(env)
        if times:
            found[work.phase] = found.get(work.phase, Spent()) + once(work, env, device) * times
    return found
