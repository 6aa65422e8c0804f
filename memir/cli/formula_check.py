"""`memir formula --check`: the formula's value beside a fresh concrete analysis of the same model at the same widths."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from memir.cli.options import Request
from memir.errors import EXIT_NO, EXIT_OK, UsageError

if TYPE_CHECKING:
    from memir.derivation.derive import Quantity
    from memir.derivation.step import Shown


def checked(
    request: Request,
    cut: int | str,
    over: Sequence[Shown],
    quantities: Sequence[Quantity],
    point: dict[str, int],
    stage: Callable[[str], None],
) -> tuple[str, int]:
    """A line for each quantity, and the exit code: 1 where one differs. `cut`: frozen layers, or their symbol."""
    from memir.analysis.domain import check
    from memir.derivation.bounds import DEPTH, without_cut
    from memir.derivation.step import POINT
    from memir.one_rank_widths import with_degrees

    shown = over[0]
    for name in point:
        if name not in shown.env:
            raise UsageError(f"--check: {name} is no symbol of the formula", hint=f"it has: {', '.join(shown.env)}")
    env = {**shown.env, **point}
    if isinstance(cut, str):
        depth = (env | shown.hidden)[DEPTH]
        env[cut] = point.get(cut, depth // 2)
        quantities = [q for q in quantities if q.cuts is not None and q.cuts.holds(env[cut], depth)]
        if not quantities:
            raise UsageError(f"--check: no formula is for {cut}={env[cut]} of {depth} layers")
        shown = quantities[0].shown
    header = shown.header
    if isinstance(cut, str):  # its range holds, and 0 is no value of a symbol
        header = replace(header, dims=tuple(d for d in header.dims if d != cut), domain=tuple(without_cut(header.domain)))
    check(env | shown.hidden, header)
    fields = {symbol: field for field, symbol in shown.step.fields}
    changed = {name: value for name, value in env.items() if name not in POINT and value != shown.env[name]}
    sets = {}
    degrees = {symbol: env[symbol] for symbol, _, _ in shown.step.degrees}
    if degrees:
        request = replace(request, parallel=with_degrees(request.parallel, degrees))
    for name, value in changed.items():
        if name in degrees:
            continue
        if not fields.get(name):
            raise UsageError(f"--check: no field of the model's configuration is {name}", hint="leave it out")
        sets[fields[name]] = value
    if changed:  # what is a number in the formula stays that number, where a configuration would follow the widths
        sets |= {fields[name]: value for name, value in shown.fixed.items() if fields.get(name)}
    stage("analyzing the model at " + ", ".join(f"{name}={value}" for name, value in env.items()))
    frozen = env[cut] if isinstance(cut, str) else cut
    if frozen:
        passes = ",".join(filter(None, (f"freeze{{cut={frozen}}}", request.parallel)))
        request = replace(request, parallel=passes)
    values = concrete_values(request, env["B"], env["S"], sets, [q.name for q in quantities], stage)
    lines = [f"{shown.step.name} at {', '.join(f'{name}={value}' for name, value in env.items())}", ""]
    lines.append(f"  {'':14}{'formula':>20}{'analysis':>20}{'difference':>14}")
    same = True
    for quantity in quantities:
        ours, theirs = max(size.evaluate(env) for size in quantity.every), values[quantity.name]
        same = same and ours == theirs
        lines.append(f"  {quantity.name:14}{ours:>20,}{theirs:>20,}{ours - theirs:>+14,}")
    return "\n".join(lines) + "\n", EXIT_OK if same else EXIT_NO


def concrete_values(
    request: Request, batch: int, seq: int, sets: Mapping[str, object], names: Sequence[str], stage: Callable[[str], None]
) -> dict[str, int]:
    """The quantities in bytes of the model with these options, traced at B and S without symbols for widths."""
    from memir.api import peak, program_of
    from memir.derivation.derive import Derivation
    from memir.derivation.step import Shown, WideStep

    keywords = {
        **request.keywords(),
        "batch": batch,
        "seq": seq,
        "sets": {**request.sets, **sets},
        "parallel": request.parallel,
    }
    traced = program_of(request.model, request.recipe, **keywords, progress=stage)
    env = {"B": batch, "S": seq, **traced.env}
    subject = traced.subject
    step = WideStep(
        program=traced.program,
        symbols=(),
        fields=(),
        env=env,
        name=subject.name,
        source=subject.source,
        num_parameters=subject.num_parameters or 0,
        recipe=(),
        versions=(),
        numbers=(),
        assumptions=(),
        traced_at=(),
        verified_at=(),
    )
    derivation = Derivation(Shown(step, traced.program, env, {}, ()))
    found = {}
    for name in names:
        if name == "logits":
            raise UsageError("--check: logits are told by the vocabulary's symbol, which a concrete analysis does not have")
        found[name] = peak(traced.program, **traced.env) if name == "peak" else derivation.quantity(name).value
    return found
