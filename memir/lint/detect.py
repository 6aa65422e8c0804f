"""The rules as functions from a step to the bytes that each place would give back."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from memir.analysis.inventory import collapse
from memir.analysis.liveness import LiveRange
from memir.findings.finding import Rule
from memir.ir.core import Kind
from memir.ir.size import Size
from memir.lint import rules
from memir.lint.step import BACKWARD, FORWARD, NARROW, OPTIMIZER, WIDE, Cut, LintStep, grows_as

Place = tuple[str, str]  # module with layer numbers as *, and line
Found = tuple[Place, list[Cut]]
_COPIES = ("aten.clone", "aten._to_copy", "aten.copy", "aten.contiguous")
_SOFTMAX = ("aten._softmax", "aten._safe_softmax", "aten.softmax", "aten.exp")
_LOSS = ("aten._log_softmax", "aten.nll_loss", "aten.logsumexp", "aten.log_softmax")


def _storages(step: LintStep, wanted: Callable[[LiveRange], bool], cut: Callable[[LiveRange], Cut]) -> Iterator[Found]:
    """The storages that a condition holds for, by place."""
    found: dict[Place, list[Cut]] = {}
    for live in step.ranges:
        if live.storage.nbytes.terms and wanted(live):
            _, module, source = step.source(live)
            found.setdefault((collapse(module), source), []).append(cut(live))
    yield from found.items()


def logits(step: LintStep) -> Iterator[Found]:
    """Copies to 32 bits, as long as the vocabulary, that the loss reads: they, and half of all that the loss makes from them,
    which has their type (log-probabilities, their gradients)."""
    vocabularies = set()
    for one in step.steps:
        if one.op.opcode.startswith(_LOSS):
            for operand in one.op.operands[:1]:
                value = step.values.get(step.storage_of.get(operand, ""))
                if value is not None and value.shape:
                    vocabularies.add(value.shape[-1])

    def is_wide(live: LiveRange) -> bool:
        value = step.values.get(live.storage.name)
        fits = value is not None and value.dtype in WIDE and bool(value.shape) and value.shape[-1] in vocabularies
        return fits and grows_as(live.storage.nbytes, B=1) and live.made is not None

    def wanted(live: LiveRange) -> bool:
        opcode, _, _ = step.source(live)
        read = [step.values[name] for name in step.operands(live) if name in step.values]
        return is_wide(live) and opcode.startswith("aten._to_copy") and any(other.dtype in NARROW for other in read)

    for place, cuts in _storages(step, wanted, step.whole):
        copies = {cut.storage for cut in cuts}
        rest = [live for live in step.ranges if is_wide(live) and live.storage.name not in copies]
        first = min(cut.first or 0 for cut in cuts)
        yield place, cuts + [step.whole(live, _half(live.storage.nbytes)) for live in rest if (live.made or 0) > first]


def _half(nbytes: Size) -> Size:
    return Size((m, c // 2) for m, c in nbytes.terms)


def outputs(step: LintStep) -> Iterator[Found]:
    """Not for the next step's use, alive before the step and freed in it."""

    def wanted(live: LiveRange) -> bool:
        return live.storage.live_in and not live.storage.live_out and live.storage.kind not in (Kind.GRADIENT, Kind.INPUT)

    yield from _storages(step, wanted, step.whole)
    made = _storages(
        step, lambda live: live.made is not None and live.storage.live_out and _is_activation(live), step.after_use
    )
    yield from made


def _is_activation(live: LiveRange) -> bool:
    return live.storage.kind in (Kind.ACTIVATION, Kind.TEMPORARY)


def probabilities(step: LintStep) -> Iterator[Found]:
    """Results of a softmax over S*S that are kept for backward."""

    def wanted(live: LiveRange) -> bool:
        opcode, _, _ = step.source(live)
        return opcode.startswith(_SOFTMAX) and live.saved is not None and grows_as(live.storage.nbytes, S=2)

    yield from _storages(step, wanted, step.whole)


def twice(step: LintStep) -> Iterator[Found]:
    """Saved copies of what is saved as well."""
    saved = {live.storage.name for live in step.ranges if live.saved is not None and not live.storage.live_in}

    def wanted(live: LiveRange) -> bool:
        opcode, _, _ = step.source(live)
        return live.storage.name in saved and opcode.startswith(_COPIES) and bool(saved & set(step.operands(live)))

    yield from _storages(step, wanted, step.whole)


def variable(step: LintStep) -> Iterator[Found]:
    """Made in this step, not saved, and alive after the last use until a later operator."""

    def wanted(live: LiveRange) -> bool:
        if live.made is None or live.saved is not None or live.storage.live_out or not _is_activation(live):
            return False
        if live.last_use is None or live.freed is None:
            return False
        return live.freed > live.last_use and step.phase(live.made) == FORWARD

    yield from _storages(step, wanted, step.after_use)


def mask(step: LintStep) -> Iterator[Found]:
    """Of every sequence, S*S, and made from no parameter."""

    def wanted(live: LiveRange) -> bool:
        made_in_forward = step.phase(live.made) == FORWARD
        return made_in_forward and live.storage.name not in step.learned and grows_as(live.storage.nbytes, B=1, S=2)

    yield from _storages(step, wanted, step.whole)


def tables(step: LintStep) -> Iterator[Found]:
    """Buffers of one name, shape and type in several layers; all but one of them."""
    groups: dict[tuple[str, Size, str], list[LiveRange]] = {}
    for live in step.ranges:
        value = step.values.get(live.storage.name)
        if live.storage.kind == Kind.BUFFER and value is not None and "*" in collapse(live.storage.name):
            groups.setdefault((collapse(live.storage.name), live.storage.nbytes, value.dtype), []).append(live)
    for (name, _, _), members in groups.items():
        if len(members) > 1:
            yield (name, ""), [step.whole(live) for live in members[1:]]


def dead(step: LintStep) -> Iterator[Found]:
    """Kept by autograd, and read by no backward operator."""
    end = step.end_of_forward

    def wanted(live: LiveRange) -> bool:
        if live.saved is None or live.storage.live_in or live.storage.live_out or step.phase(live.freed) != BACKWARD:
            return False
        return live.made is not None and live.made <= end and (live.last_use is None or live.last_use <= end)

    yield from _storages(step, wanted, step.after_use)


def foreach(step: LintStep) -> Iterator[Found]:
    """Temporaries of foreach operators in the optimizer's phase."""

    def wanted(live: LiveRange) -> bool:
        opcode, _, _ = step.source(live)
        return opcode.startswith("aten._foreach") and step.phase(live.made) == OPTIMIZER and live.storage.kind == Kind.TEMPORARY

    found = [cut for _, cuts in _storages(step, wanted, step.whole) for cut in cuts]
    if found:
        largest = max(found, key=lambda cut: cut.nbytes.evaluate(step.side.point))
        source = step.steps[largest.first or 0].op.source
        yield ("the optimizer", source), [cut for cut in found if cut is not largest]  # one at a time is needed


def gradients(step: LintStep) -> Iterator[Found]:
    """Gradients that the step begins with."""
    yield from _storages(step, lambda live: live.storage.kind == Kind.GRADIENT and live.storage.live_in, step.whole)


def unused(step: LintStep) -> Iterator[Found]:
    """Parameters without a gradient, where all are trained; else those that no operator reads."""
    with_gradient = {s.of for s in step.side.flat.storages if s.kind == Kind.GRADIENT}
    if not with_gradient:
        return

    def wanted(live: LiveRange) -> bool:
        if live.storage.kind != Kind.PARAMETER or live.storage.name in with_gradient:
            return False
        return live.last_use is None or not step.has_frozen

    yield from _storages(step, wanted, step.whole)


def buffers(step: LintStep) -> Iterator[Found]:
    """Buffers of 32 bits in a model whose parameters are mostly of 16; half of each. Small ones are no habit."""
    parameters = [live for live in step.ranges if live.storage.kind == Kind.PARAMETER]
    narrow = sum(_bytes(step, live) for live in parameters if _dtype(step, live) in NARROW)
    if 2 * narrow < sum(_bytes(step, live) for live in parameters):
        return

    def wanted(live: LiveRange) -> bool:
        return live.storage.kind == Kind.BUFFER and _dtype(step, live) in WIDE and _bytes(step, live) >= 1024

    yield from _storages(step, wanted, lambda live: step.whole(live, _half(live.storage.nbytes)))


def _bytes(step: LintStep, live: LiveRange) -> int:
    return live.storage.nbytes.evaluate(step.side.point)


def _dtype(step: LintStep, live: LiveRange) -> str:
    value = step.values.get(live.storage.name)
    return "" if value is None else value.dtype


DETECTORS: tuple[tuple[Rule, Callable[[LintStep], Iterator[Found]]], ...] = (
    (rules.LOGITS, logits),
    (rules.OUTPUTS, outputs),
    (rules.PROBABILITIES, probabilities),
    (rules.TWICE, twice),
    (rules.VARIABLE, variable),
    (rules.MASK, mask),
    (rules.TABLES, tables),
    (rules.DEAD, dead),
    (rules.FOREACH, foreach),
    (rules.GRADIENTS, gradients),
    (rules.UNUSED, unused),
    (rules.BUFFERS, buffers),
)
_IGNORE = re.compile(r"#\s*memir:\s*ignore(?:\[([^\]]*)\])?")


def is_silenced(line: str, rule: Rule) -> bool:
    """Whether a line has `# memir: ignore` or `# memir: ignore[name, CODE]` for a rule."""
    found = _IGNORE.search(line)
    if found is None:
        return False
    names = [word.strip() for word in (found[1] or "").split(",") if word.strip()]
    return not names or rule.name in names or rule.code in names
