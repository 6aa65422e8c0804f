"""What `--optimizer` may name: classes of torch.optim, bitsandbytes' and transformers' optimizers, Hugging Face's own words.

A name with underscores that Hugging Face's `TrainingArguments.optim` has (`paged_adamw_8bit`) means what its Trainer builds;
one with dashes (`paged-adamw-8bit`) means the package's class with its own defaults. They differ in one thing: with 8-bit
states the Trainer keeps the states of embeddings in 32 bits (transformers/trainer.py, `create_optimizer`, through bitsandbytes'
GlobalOptimManager). Source of the words: transformers/training_args.py, `OptimizerNames`; trainer_optimizer.py,
`_get_bitsandbytes_optimizer`, `_get_adamw_torch`, `_get_adafactor`. `adafactor` is torch's class of that name, and
`transformers-adafactor` the Trainer's.
"""

from __future__ import annotations

from dataclasses import dataclass

TORCH, BITSANDBYTES, TRANSFORMERS = "torch", "bitsandbytes", "transformers"


@dataclass(frozen=True, slots=True)
class Named:
    """An optimizer by the package that has it and its class there."""

    package: str
    cls: str
    bits: int = 32  # of each state (bitsandbytes)
    paged: bool = False  # states of large parameters lie in managed memory (bitsandbytes)
    impl: str = ""  # the form that the name itself asks for
    wide_embeddings: bool = False  # as the Trainer builds it: embeddings' states in 32 bits


def _bitsandbytes() -> dict[str, Named]:
    found = {}
    for cls in ("AdamW", "Adam", "Lion", "RMSprop"):
        for paged in (False, True) if cls != "RMSprop" else (False,):
            for bits in (8, 32):
                name = f"{'paged-' if paged else ''}{cls.lower()}-{bits}bit"
                found[name] = Named(BITSANDBYTES, cls, bits, paged)
                if cls != "Adam":  # Hugging Face has AdamW only
                    words = name.replace("rmsprop-", "rmsprop-bnb-").replace("-", "_")
                    found[words] = Named(BITSANDBYTES, cls, bits, paged, wide_embeddings=bits == 8)
    return found


_OWN = {
    **_bitsandbytes(),
    "lion": Named(BITSANDBYTES, "Lion"),
    "paged-lion": Named(BITSANDBYTES, "Lion", paged=True),
    "paged-adamw": Named(BITSANDBYTES, "AdamW", paged=True),
    "paged_adamw": Named(BITSANDBYTES, "AdamW", paged=True),
    "paged-adam": Named(BITSANDBYTES, "Adam", paged=True),
    "adamw_bnb_8bit": Named(BITSANDBYTES, "AdamW", 8, wide_embeddings=True),
    "rmsprop_bnb": Named(BITSANDBYTES, "RMSprop"),
    "transformers-adafactor": Named(TRANSFORMERS, "Adafactor"),
    "adamw_torch": Named(TORCH, "AdamW"),
    "adamw_torch_fused": Named(TORCH, "AdamW", impl="fused"),
}
NAMES = tuple(sorted(_OWN))  # besides the classes of torch.optim


def named(name: str) -> Named | None:
    """What a name other than that of a torch.optim class means; case does not matter."""
    return _OWN.get(name.lower())
