"""Losses that never hold all logits, against the published algorithms in plain PyTorch, really run on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.accuracy_cpu.cases import Case
from benchmarks.accuracy_cpu.models import CONFIGS
from benchmarks.accuracy_cpu.pool import each_in_fresh_process
from benchmarks.accuracy_cpu.run import Figures, predicted
from memir.ir.core import Value
from memir.ir.liger import RULES
from memir.ir.size import Size
from memir.recipe import Recipe
from memir.runtime.measure import measure_cpu
from tests.figures import assert_same

TOLERANCE = 256  # bytes: scalars, and the maximum and sum of 32 rows


@dataclass(frozen=True)
class Shape:
    """One call: BT tokens, hidden size H, vocabulary V, fp32."""

    tokens: int
    hidden: int
    vocabulary: int
    trained: bool = True
    wide: bool = False
    release: str = "0.8"


SHAPES = (
    Shape(256, 64, 2048),  # 32 chunks of 8 rows
    Shape(250, 64, 2000),  # the last chunk is not full
    Shape(1000, 64, 640),  # 8 chunks of 128, the last of 104
    Shape(384, 128, 256),  # two chunks, of 256 and 128 rows
    Shape(300, 128, 384),  # three times the hidden size: 128, 128, 44
    Shape(512, 256, 128),  # one chunk: fewer words than hidden units
    Shape(1024, 64, 640, trained=False),
    Shape(384, 128, 256, trained=False),
    Shape(1000, 64, 640, wide=True),
    Shape(1000, 64, 640, release="0.4"),
    Shape(384, 128, 256, release="0.4"),
)


def softmax_gradient(logits: torch.Tensor, losses: torch.Tensor, targets: torch.Tensor, count: int) -> None:
    """Liger's kernel: the logits become their gradient in place, 32 rows at once."""
    for part, loss, target in zip(logits.split(32), losses.split(32), targets.split(32), strict=True):
        part.sub_(part.amax(1, keepdim=True)).exp_()
        part.div_(part.sum(1, keepdim=True))
        loss.copy_(part[0, 0])
        part[0].select(0, int(target[0])).sub_(1.0)  # one row's target is as good as all for what is allocated
        part.div_(count)


def fused(given: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, shape: Shape) -> tuple[torch.Tensor | None, ...]:
    """`fused_linear_cross_entropy_forward` at v0.8.2 (and v0.4.2), without bias: its variables, as long as there."""
    total = given.shape[0]
    factor = -(-weight.shape[0] // given.shape[1])
    size = 1 << (-(-total // factor) - 1).bit_length()
    grad_input = torch.zeros_like(given)
    grad_weight = torch.zeros_like(weight) if shape.trained else None
    losses = torch.zeros(total)
    mask = targets != -100
    count = int(mask.sum())
    for start in range(0, total, size):
        chunk = given[start : start + size]
        logits = chunk @ weight.t()
        softmax_gradient(logits, losses[start : start + size], targets[start : start + size], count)
        if shape.release == "0.4":
            grad_logits = logits * 1.0
            grad_input[start : start + size] = grad_logits @ weight
            if grad_weight is not None:
                torch.addmm(grad_weight, logits.t(), chunk, out=grad_weight)
            continue
        grad_logits = logits
        grad_input[start : start + size] = grad_logits @ weight
        if grad_weight is not None:
            transposed = grad_logits.t()  # lives until the next chunk's
            if shape.wide:
                torch.addmm(grad_weight, transposed, chunk, out=grad_weight)
            else:
                grad_weight += torch.mm(grad_logits.t(), chunk).float()
    return losses.sum(), grad_input, grad_weight


def measured_call(shape: Shape) -> int:
    """Bytes that one call has alive at most beyond what was there before it."""

    def build() -> Callable[[], object]:
        torch.manual_seed(0)
        given, weight = torch.randn(shape.tokens, shape.hidden), torch.randn(shape.vocabulary, shape.hidden)
        targets = torch.randint(0, shape.vocabulary, (shape.tokens,))

        def step() -> None:
            fused(given, weight, targets, shape)

        return step

    found = measure_cpu(build)
    return found.peak - found.at_start


def told(shape: Shape) -> int:
    """Results and workspace by the rule."""

    def value(name: str, *extents: int) -> Value:
        sizes = tuple(map(Size.of, extents))
        return Value(name, "f32", sizes, sizes, Size.of(0), name)

    given, weight = value("x", shape.tokens, shape.hidden), value("w", shape.vocabulary, shape.hidden)
    results = [value("loss"), given, *([weight] if shape.trained else [])]
    name = "fused_linear_cross_entropy" + {"0.4": "_0_4"}.get(shape.release, "_fp32" if shape.wide else "")
    scratch = RULES["cuda", f"liger.{name}"]([given, weight], results).evaluate({})
    return scratch + 4 * (shape.tokens * shape.hidden + shape.trained * shape.vocabulary * shape.hidden)


def test_the_fused_loss_takes_what_its_algorithm_takes() -> None:
    for shape, real in zip(SHAPES, each_in_fresh_process(measured_call, SHAPES, jobs=2), strict=True):
        assert abs(told(shape) - real) <= TOLERANCE, shape


CHUNKED = Case("llama", "chunked", Recipe(target="cpu", dtype="bf16", loss="chunked"), 2, 128)


def measured_chunked(case: Case) -> Figures:
    """torchtune's loop: the head on 8 chunks of the hidden states, each widened and compared in its turn."""

    def build() -> Callable[[], object]:
        torch.manual_seed(0)
        config = AutoConfig.for_model(**CONFIGS[case.model])
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        ids = torch.randint(0, config.vocab_size, (case.batch, case.seq))
        labels = ids.clone()

        def loss_of(hidden: torch.Tensor) -> torch.Tensor:
            padded = F.pad(labels, (0, 1), value=-100)  # a variable, as in transformers/loss/loss_utils.py
            shifted = padded[..., 1:].contiguous()
            chunks = [model.lm_head(chunk) for chunk in hidden.tensor_split(8, dim=1)]
            total = (shifted != -100).sum()
            targets = [part.reshape(-1) for part in shifted.tensor_split(8, dim=1)]
            chunks = [chunk.reshape(-1, chunk.size(-1)) for chunk in chunks]
            loss = 0.0
            for chunk, target in zip(chunks, targets, strict=True):
                loss += F.cross_entropy(chunk.float(), target, ignore_index=-100, reduction="sum")
            return loss / total

        def step() -> None:
            hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
            loss = loss_of(hidden)
            del hidden
            loss.backward()
            del loss
            optimizer.step()
            optimizer.zero_grad()

        return step

    found = measure_cpu(build)
    return Figures(case.name, found.at_start, found.peak, found.at_end)


def test_the_chunked_loss_takes_what_its_loop_takes() -> None:
    (real,) = each_in_fresh_process(measured_chunked, [CHUNKED], jobs=1)
    assert_same(real, predicted(CHUNKED), 1024)
