"""The optimizers that are described, by the names that `--optimizer` takes."""

from __future__ import annotations

from memir.cuda.optimizers import default_form
from memir.errors import UsageError
from memir.updates import bitsandbytes
from memir.updates.adafactor import ADAFACTOR, TRAINERS
from memir.updates.adam import ADAM, ADAMW
from memir.updates.choice import Choice, Update
from memir.updates.muon import MUON
from memir.updates.names import BITSANDBYTES, TORCH, TRANSFORMERS, Named, named
from memir.updates.plain import ADAGRAD, RMSPROP, SGD

_TORCH = {
    "adam": ADAM,
    "adamw": ADAMW,
    "sgd": SGD,
    "adagrad": ADAGRAD,
    "rmsprop": RMSPROP,
    "adafactor": ADAFACTOR,
    "muon": MUON,
}


def found(name: str) -> tuple[Named, Update]:
    """The optimizer of that name; UsageError where it is not described."""
    what = named(name) or Named(TORCH, name)
    if what.package == BITSANDBYTES:
        return what, bitsandbytes.described(what)
    if what.package == TRANSFORMERS:
        return what, TRAINERS
    update = _TORCH.get(what.cls.lower())
    if update is None:
        known = ", ".join(sorted(_TORCH))
        raise UsageError(
            f"optimizer: a step of {name!r} is not described",
            hint=f"described: none, {known}, the words of docs/optimizers.md;\ntrace it:  memir ir TARGET --optimizer {name}",
        )
    return what, update


def chosen(what: Named, update: Update, form: str, target: str, *, decays: bool | None, momentum: bool) -> Choice:
    """What a step depends on. UsageError for a form or an option that the optimizer has not.

    `form`: "default" is what PyTorch takes on the target, or what the name says (`adamw_torch_fused`).
    """
    cls = what.cls.lower()
    if form == "default":
        form = what.impl or default_form(cls, update.forms, target)
    if form not in update.forms:
        raise UsageError(f"optimizer: {what.cls} has no {form} form", hint=f"it has: {', '.join(update.forms)}")
    if momentum and cls not in ("sgd", "rmsprop"):
        raise UsageError(f"optimizer: momentum is an option of sgd and rmsprop, not of {what.cls}")
    if decays is not None and cls not in ("adam", "adamw", "sgd", "adagrad", "rmsprop"):
        raise UsageError(f"optimizer: {what.cls} with another weight decay is not described")
    return Choice(form, target == "cuda", update.decays if decays is None else decays, momentum)
