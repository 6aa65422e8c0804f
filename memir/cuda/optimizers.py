"""Which implementation of an optimizer runs: foreach (one kernel for many tensors), fused (one for a whole update), for-loop.

Source: torch/optim/optimizer.py, `_default_to_fused_or_foreach`, which every class calls with `use_fused=False` where neither
`foreach` nor `fused` is given: foreach if all parameters are plain tensors on a CUDA device, else the for-loop. So nothing is
fused unless it is asked for. torch/optim/_adafactor.py does not call it and keeps the for-loop; LBFGS, Muon and SparseAdam have
one form. The forms differ in memory: foreach holds temporaries of all parameters at once, the for-loop of one, fused none.
"""

from __future__ import annotations

from collections.abc import Collection

FOREACH, FUSED, FOR_LOOP = "foreach", "fused", "for-loop"
_LOOPS_BY_DEFAULT = ("adafactor",)


def forms(options: Collection[str]) -> tuple[str, ...]:
    """The forms that a class has, by the options of its constructor."""
    return (*(form for form in (FOREACH, FUSED) if form in options), FOR_LOOP)


def default_form(name: str, options: Collection[str], target: str) -> str:
    """The form that runs where none is asked for. `name` is the class's, `target` "cuda" or "cpu"."""
    if target != "cuda" or name.lower() in _LOOPS_BY_DEFAULT:
        return FOR_LOOP
    return FOREACH if FOREACH in options else FOR_LOOP


def trainer_default(transformers: str, torch: str) -> str:
    """What Hugging Face's Trainer takes where `optim` is not given, in its own word, by the two releases ("5.24.0", "2.13.0").

    transformers/training_args.py: adamw_torch_fused with torch 2.8 or newer, since transformers 4.54 (pull request 37358);
    before, adamw_torch, whose form is PyTorch's default.
    """
    fused = _release(transformers) >= (4, 54) and _release(torch) >= (2, 8)
    return "adamw_torch_fused" if fused else "adamw_torch"


def _release(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)
