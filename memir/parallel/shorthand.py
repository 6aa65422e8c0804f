"""`--fsdp 8` and its like as the text of passes, in the order in which the methods are applied.

What is within a layer comes first (tensor, context, expert), then the split into stages, then the copies of the model: as
PyTorch's own are composed (torchtitan applies them in that order).
"""

from __future__ import annotations

from dataclasses import dataclass

from memir.errors import UsageError

_NAMES = (
    ("tp", "tensor-parallel"),
    ("cp", "context-parallel"),
    ("ep", "expert-parallel"),
    ("pp", "pipeline-parallel"),
    ("fsdp", "fsdp"),
    ("ddp", "data-parallel"),
)
STAGES = (1, 2, 3)


@dataclass(frozen=True, slots=True)
class Shorthand:
    """Degrees as typed; None where the option is not there. `zero` is a stage, over as many ranks as `ddp` says."""

    tp: int | None = None
    cp: int | None = None
    ep: int | None = None
    pp: int | None = None
    fsdp: int | None = None
    ddp: int | None = None
    zero: int | None = None

    def passes(self, parallel: str = "") -> str:
        """The text of the passes: `parallel` as given, or these options; both at once, or two copies, are a UsageError."""
        given = [(option, name, degree) for option, name in _NAMES if (degree := getattr(self, option)) is not None]
        if self.zero is not None:
            given = self._zero(given)
        if parallel and given:
            option = "zero" if self.zero is not None else given[0][0]
            raise UsageError(f"--parallel and --{option} at once", hint="write all of it as  --parallel 'fsdp{degree=8},...'")
        if {"fsdp", "ddp"} <= {option for option, _, _ in given}:
            hint = f"hybrid sharding is  --parallel 'fsdp{{degree={self.fsdp} replicate={self.ddp}}}'"
            raise UsageError("--fsdp and --ddp at once: both are copies of the model", hint=hint)
        if self.fsdp is not None and self.fsdp > 1:  # FSDP places the gradients of DTensors before it reduces them
            given = [(o, f"{n}{{placed-gradients" if o == "tp" else n, d) for o, n, d in given]
        return parallel or ",".join(_text(name, degree) for _, name, degree in given)

    def _zero(self, given: list[tuple[str, str, int]]) -> list[tuple[str, str, int]]:
        if self.zero not in STAGES:
            raise UsageError(f"--zero {self.zero}: ZeRO has the stages 1, 2 and 3")
        if self.ddp is None:
            raise UsageError(f"--zero {self.zero}: over how many ranks?", hint=f"--zero {self.zero} --ddp 8")
        return [(o, f"zero{{stage={self.zero}" if o == "ddp" else n, d) for o, n, d in given]


def _text(name: str, degree: int) -> str:
    return f"{name} degree={degree}}}" if "{" in name else f"{name}{{degree={degree}}}"
