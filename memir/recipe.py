"""What is trained and how: the options of one training step, as plain data."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Any

from memir.errors import UsageError

DTYPES = ("bf16", "f16", "f32")
KERNELS = ("flash", "efficient", "cudnn", "math")  # of scaled_dot_product_attention on CUDA
TRAINERS_CLIP = 1.0  # transformers/training_args.py, TrainingArguments.max_grad_norm
CHOICES = {
    "target": ("cuda", "cpu"),
    "dtype": DTYPES,
    "attention": ("sdpa", *KERNELS, "flash-attn-2", "eager"),
    "optimizer_impl": ("default", "foreach", "fused", "for-loop"),
    "amp": ("none", "bf16", "f16"),
    "checkpoint": ("none", "full"),
    "loss": ("model", "fused-linear", "fused-linear-fp32", "fused-linear-0.4", "chunked"),
    "mode": ("train", "forward"),
    "loop": ("plain", "trainer"),
    "zero_grad": ("first", "last"),
    "batch_kind": ("full", "padded"),
}


@dataclass(frozen=True, slots=True)
class Lora:
    """Low-rank adapters as PEFT injects them. `targets` empty means PEFT's own default for the model type."""

    r: int = 16
    alpha: int = 32
    dropout: float = 0.0
    targets: tuple[str, ...] = ()

    @staticmethod
    def parse(text: str) -> Lora:
        """`r=16,alpha=32,dropout=0.05,targets=q_proj,v_proj`; a word without `=` continues the list before it."""
        given: dict[str, list[str]] = {}
        key = ""
        for word in filter(None, (w.strip() for w in text.split(","))):
            if "=" in word:
                key, word = (part.strip() for part in word.split("=", 1))
                if key in given:
                    raise UsageError(f"--lora: {key} is given twice", where=text)
                given[key] = []
            elif not key:
                raise UsageError(f"--lora: {word!r} has no name", where=text, hint="write  --lora r=16,targets=q_proj,v_proj")
            given[key].append(word)
        known = [f.name for f in fields(Lora)]
        for key, words in given.items():
            if key not in known:
                raise UsageError(f"--lora: unknown option {key!r}", hint=f"known: {', '.join(known)}")
            if key != "targets" and len(words) != 1:
                raise UsageError(f"--lora: {key} takes one value, not {', '.join(words)}")
        try:
            lora = Lora(
                r=int(given.get("r", ["16"])[0]),
                alpha=int(given.get("alpha", ["32"])[0]),
                dropout=float(given.get("dropout", ["0"])[0]),
                targets=tuple(t for t in given.get("targets", []) if t),
            )
        except ValueError as error:
            raise UsageError(f"--lora: not a number: {error}", where=text) from None
        if lora.r < 1 or lora.alpha < 1 or not 0 <= lora.dropout < 1:
            raise UsageError("--lora: r and alpha must be positive and 0 <= dropout < 1", where=text)
        return lora

    def __str__(self) -> str:
        text = f"r={self.r},alpha={self.alpha}" + (f",dropout={self.dropout:g}" if self.dropout else "")
        return text + (f",targets={','.join(self.targets)}" if self.targets else "")


_KINDS = {
    "nf4": ("double", "keep", "trl"),
    "fp4": ("double", "keep", "trl"),
    "int8": ("keep",),
    "gptq": ("bits", "group", "kernel"),
}


@dataclass(frozen=True, slots=True)
class Quantize:
    """Frozen base weights in few bits; what is trained are adapters (QLoRA). nf4, fp4 and int8 are bitsandbytes'."""

    kind: str = "nf4"  # "nf4" or "fp4": the values differ, the bytes do not; "int8"; "gptq"
    double: bool = False  # 4 bits: the scales are quantized too (bnb_4bit_use_double_quant)
    keep: bool = False  # the rest stays in the recipe's dtype; else fp32, as prepare_model_for_kbit_training has it
    trl: bool = False  # 4 bits: embeddings and the head are bf16 again, as TRL's SFTTrainer has them with bf16
    bits: int = 4  # gptq: 2, 3 (torch only), 4 or 8
    group: int = 128  # gptq: inputs that share a scale; -1: all of a layer
    kernel: str = "triton"  # gptq: "triton" dequantizes again in backward, "torch" keeps the matrix

    @staticmethod
    def parse(text: str) -> Quantize:
        """`nf4`, `nf4,double,keep`, `int8`, `gptq,bits=4,group=128,kernel=torch`."""
        kind, *words = (word.strip() for word in text.split(","))
        if kind not in _KINDS:
            hint = "known: nf4, fp4  with  ,double  (scales quantized too) and  ,keep  (norms and embeddings stay 16-bit);"
            hint += "\nor  ,trl  (norms fp32, embeddings and head bf16);"
            hint += "\nint8  with  ,keep;  gptq  with  ,bits=4,group=128,kernel=triton"
            raise UsageError(f"--quantize: {kind!r} is no kind of quantization", hint=hint)
        known = _KINDS[kind]
        given: dict[str, Any] = {}
        for word in words:
            name, equals, value = word.partition("=")
            if name not in known or bool(equals) != (kind == "gptq"):
                example = ", ".join(f"{name}=..." if kind == "gptq" else name for name in known)
                raise UsageError(f"--quantize: {word!r} is no option of {kind}", hint=f"known: {example}")
            if name in given:
                raise UsageError(f"--quantize: {name!r} is given twice")
            given[name] = value if equals else True
        for name in ("bits", "group"):
            if name in given:
                try:
                    given[name] = int(given[name])
                except ValueError:
                    raise UsageError(f"--quantize: {name} is a whole number, not {given[name]!r}") from None
        return Quantize(kind, **given)

    def __post_init__(self) -> None:
        if self.keep and self.trl:
            raise UsageError("--quantize: keep widens nothing, trl all but embeddings and head: give one of them")
        if self.kernel not in ("triton", "torch"):
            raise UsageError(f"--quantize: kernel is triton or torch, not {self.kernel!r}")
        if self.bits not in (2, 3, 4, 8) or (self.bits == 3 and self.kernel == "triton"):
            raise UsageError(f"--quantize: bits is 2, 4 or 8, and 3 with kernel=torch; not {self.bits}")
        if self.group != -1 and (self.group < 1 or self.group % 16):
            raise UsageError(f"--quantize: group is -1 (one scale a column) or a multiple of 16, not {self.group}")

    def __str__(self) -> str:
        if self.kind == "gptq":
            return f"gptq,bits={self.bits},group={self.group},kernel={self.kernel}"
        return ",".join([self.kind, *(name for name in ("double", "keep", "trl") if getattr(self, name))])


@dataclass(frozen=True, slots=True)
class Recipe:
    """One training step. Every field is printed under the answer."""

    target: str = "cuda"  # whose kernels are followed: "cuda" or "cpu"
    dtype: str = "bf16"  # of parameters and activations
    amp: str = "none"  # torch.autocast around forward and loss, in this type
    # "sdpa": PyTorch takes a kernel; one of KERNELS: only that; "flash-attn-2": the package; "eager": Hugging Face's operators
    attention: str = "sdpa"
    optimizer: str = "adamw"  # a torch.optim class, bitsandbytes' or transformers', or "none" (docs/optimizers.md)
    optimizer_impl: str = "default"  # "foreach", "fused", "for-loop"; "default" is what PyTorch picks on the target
    clip: float | None = None  # max norm for clip_grad_norm_; 0 is none. None becomes the loop's own: 1 in trainer, 0 in plain
    accumulate: int = 1  # micro-batches a step
    checkpoint: str = "none"  # "none" or "full": torch.utils.checkpoint (use_reentrant=False) around every layer
    lora: Lora | None = None
    quantize: Quantize | None = None  # base weights in few bits; they need adapters to train
    loss: str = "model"  # the model's own; "fused-linear...": Liger's for head and loss; "chunked": torchtune's
    dropout: bool = True  # False sets every dropout probability to 0
    mode: str = "train"  # "train", or "forward": one forward pass without gradients
    loop: str = "plain"  # "trainer": the step as Hugging Face's Trainer runs it; "plain": written by hand
    keep_outputs: bool = False  # the caller's variable holds the outputs during backward and through the next forward
    function: bool = False  # the step is a function of its own: outputs that are kept die at its end, not in the next forward
    zero_grad: str = "last"  # zero_grad(set_to_none=True) "first" (before forward) or "last" (after the optimizer step)
    batch_kind: str = "full"  # "full": no padding mask is passed; "padded": an attention_mask with padding is passed
    gpu: str = ""  # compute capability whose kernels are taken, "9.0"; empty: 8.0

    def __post_init__(self) -> None:
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise UsageError(f"{name.replace('_', '-')}: {getattr(self, name)!r} is none of {', '.join(allowed)}")
        if self.quantize is not None and self.lora is None and self.mode == "train":
            hint = "add  --lora r=16"
            raise UsageError("quantize: quantized weights cannot be trained, and there are no adapters", hint=hint)
        if self.quantize is not None and self.quantize.trl and self.dtype != "bf16":
            raise UsageError(
                f"quantize: TRL narrows embeddings and head with bf16 only, not {self.dtype}", hint="leave out trl"
            )
        if self.quantize is not None and self.quantize.kind == "gptq":
            if self.target != "cuda":
                raise UsageError("quantize: gptq is described on cuda only")
            if self.quantize.kernel == "triton" and self.dtype != "f16":
                hint = "write  --dtype f16,  or  --quantize gptq,kernel=torch"
                raise UsageError(f"quantize: gptq's triton kernel computes in fp16, not {self.dtype}", hint=hint)
        if self.loss.startswith("fused-linear"):
            if self.target != "cuda":
                raise UsageError(f"loss: {self.loss} is Liger's kernel for cuda, and the target is {self.target}")
            if self.amp != "none":
                raise UsageError(f"loss: {self.loss} under autocast is not described", hint="amp none, or loss chunked")
        if self.gpu and not re.fullmatch(r"\d{1,2}\.\d", self.gpu):
            raise UsageError(f"gpu: {self.gpu!r} is no compute capability", hint='write it as  "9.0"')
        self._check_attention()
        if self.clip is None:
            object.__setattr__(self, "clip", TRAINERS_CLIP if self.loop == "trainer" and self.mode == "train" else 0.0)
        if self.loop == "trainer":
            self._check_trainer()
        self._check_numbers()

    @property
    def masked(self) -> bool:
        """Whether the batch has an attention mask: a padded one has, and Trainer's collators always make one."""
        return self.batch_kind == "padded" or self.loop == "trainer"

    def _check_numbers(self) -> None:
        if self.accumulate < 1:
            raise UsageError(f"accumulate: {self.accumulate} is not a positive number of micro-batches")
        if self.clip is not None and self.clip < 0:
            raise UsageError(f"clip: {self.clip:g} is negative")

    def _check_attention(self) -> None:
        """UsageError for a kernel that the target or the GPU does not have."""
        if self.attention in KERNELS and self.target != "cuda":
            raise UsageError(f"attention: {self.attention} is a kernel of cuda, and the target is {self.target}")
        if self.attention == "flash-attn-2" and self.target != "cuda":
            raise UsageError(f"attention: flash-attn 2 is a package for cuda, and the target is {self.target}")
        if self.attention == "flash-attn-2" and self.gpu and float(self.gpu) < 8:
            raise UsageError(f"attention: flash-attn 2 needs compute capability 8.0, and the GPU has {self.gpu}")

    def _check_trainer(self) -> None:
        """UsageError for what Hugging Face's Trainer does not do."""
        hint = "use  --loop plain"
        if self.mode != "train":
            raise UsageError("loop: trainer is a training step, and the mode is forward", hint=hint)
        if self.keep_outputs or self.function:
            raise UsageError("loop: Trainer drops the outputs before backward; it is no loop that keeps them", hint=hint)
        if self.zero_grad == "first":
            raise UsageError("loop: Trainer frees gradients after the optimizer step, not before forward", hint=hint)


def summary(recipe: Recipe) -> str:
    """The options in a line, those at their defaults left out: `bf16 adamw, checkpoint full`."""
    said = [recipe.dtype, recipe.optimizer]
    plain = Recipe()
    for field in fields(Recipe):
        value = getattr(recipe, field.name)
        if field.name not in ("dtype", "optimizer") and value != getattr(plain, field.name):
            said.append(f"{field.name.replace('_', '-')} {str(value).lower() if isinstance(value, bool) else value}")
    return ", ".join(said)
