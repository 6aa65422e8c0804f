"""Quantized base weights: how they are spelled, what is refused, what they weigh; and softmax on CUDA."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import memir
from memir.errors import UsageError
from memir.ir.core import Kind, Program
from memir.ir.size import Size
from memir.recipe import Lora, Quantize, Recipe

LLAMA = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
LORA = Lora(r=4, targets=("q_proj",))


@pytest.fixture
def llama(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    return str(path)


@pytest.mark.parametrize(
    "text", ["nf4", "fp4,double", "nf4,double,keep", "nf4,double,trl", "int8", "int8,keep", "gptq,bits=3,group=-1,kernel=torch"]
)
def test_a_spelling_reads_back(text: str) -> None:
    assert str(Quantize.parse(text)) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("int3", "'int3' is no kind of quantization"),
        ("", "'' is no kind"),
        ("nf4,triple", "'triple' is no option"),
        ("nf4,double,double", "'double' is given twice"),
        ("int8,trl", "'trl' is no option of int8"),
        ("nf4,keep,trl", "give one of them"),
        ("int8,double", "'double' is no option of int8"),
        ("nf4,bits=4", "'bits=4' is no option of nf4"),
        ("gptq,keep", "'keep' is no option of gptq"),
        ("gptq,bits", "'bits' is no option of gptq"),
        ("gptq,bits=4,bits=4", "'bits' is given twice"),
        ("gptq,bits=four", "bits is a whole number, not 'four'"),
        ("gptq,bits=5", "bits is 2, 4 or 8, and 3 with kernel=torch; not 5"),
        ("gptq,bits=3", "bits is 2, 4 or 8, and 3 with kernel=torch; not 3"),
        ("gptq,group=0", "group is -1 .* not 0"),
        ("gptq,kernel=exllama", "kernel is triton or torch, not 'exllama'"),
    ],
)
def test_a_wrong_spelling_is_told(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Quantize.parse(text)


def test_quantized_weights_need_adapters_to_train() -> None:
    with pytest.raises(UsageError, match="cannot be trained"):
        Recipe(quantize=Quantize())
    Recipe(quantize=Quantize(), mode="forward")


def test_trl_casts_with_bf16_only() -> None:
    with pytest.raises(UsageError, match="with bf16 only, not f16"):
        Recipe(quantize=Quantize(trl=True), lora=LORA, dtype="f16")


def test_trl_leaves_norms_in_fp32_and_the_rest_in_bf16(llama: str) -> None:
    """Embedding and head [512, 128] in 2 bytes, five norms of 128 in 4; beside them what is quantized, and the adapters."""
    plain, trl, kept = (
        bytes_of(memir.trace(llama, Recipe(lora=LORA, quantize=quantize), batch=2, seq=32).program, Kind.PARAMETER)
        for quantize in (Quantize(), Quantize(trl=True), Quantize(keep=True))
    )
    assert plain - trl == 2 * 512 * 128 * 2
    assert trl - kept == 5 * 128 * 2


def bytes_of(program: Program, kind: Kind) -> int:
    return sum(s.nbytes.evaluate({}) for s in program.storages if s.kind == kind and s.live_in)


@pytest.mark.parametrize("double", [False, True])
def test_bytes_by_hand(llama: str, double: bool) -> None:
    """Per layer 4 matrices of 128 x 128 and 3 of 128 x 256; embedding and head [512, 128], norms [128] in fp32."""
    traced = memir.trace(llama, Recipe(lora=LORA, quantize=Quantize(double=double)), batch=2, seq=32)
    matrices = [128 * 128] * 4 + [128 * 256] * 3
    packed = 2 * sum(n // 2 for n in matrices)
    wide = 4 * (2 * 512 * 128 + 5 * 128) + 4 * 2 * (4 * 128 + 4 * 128)  # and the adapters
    assert bytes_of(traced.program, Kind.PARAMETER) == packed + wide
    scales = 2 * sum(
        n // 64 + 4 * (n // 64 // 256 + (n // 64 % 256 > 0)) + 1024 + 4 if double else 4 * (n // 64) for n in matrices
    )
    scales += 1024 if double else 0  # the table that the layers copy
    rotary = 4 * 16  # inv_freq, held twice
    assert bytes_of(traced.program, Kind.BUFFER) - scales - 14 * 64 in (rotary, 2 * rotary)
    assert traced.num_parameters == 2 * sum(matrices) + 2 * 512 * 128 + 5 * 128 + traced.num_trainable


def test_int8_bytes_by_hand(llama: str) -> None:
    traced = memir.trace(llama, Recipe(dtype="bf16", lora=LORA, quantize=Quantize("int8", keep=True)), batch=2, seq=32)
    packed = 2 * (4 * 128 * 128 + 3 * 128 * 256)
    rest = 2 * (2 * 512 * 128 + 5 * 128) + 4 * 2 * (4 * 128 + 4 * 128)  # 16-bit, and the adapters in fp32
    assert bytes_of(traced.program, Kind.PARAMETER) == packed + rest
    scales = 2 * 4 * (4 * 128 + 2 * 256 + 128)
    assert bytes_of(traced.program, Kind.BUFFER) - scales in (64, 128)  # inv_freq, once or twice
    assert traced.num_parameters == packed + 2 * 512 * 128 + 5 * 128 + traced.num_trainable


def test_int8_layers_hold_their_inputs_until_the_loss_goes(llama: str) -> None:
    """down_proj's input of the first layer, [64, 256] in bf16: made by the product before it, freed with the loss."""
    recipe = Recipe(dtype="bf16", lora=LORA, quantize=Quantize("int8", keep=True), checkpoint="full")
    program = memir.trace(llama, recipe, batch=2, seq=32).program
    ops = [(phase.name, op) for phase, op in program.ops()]
    products = [op for phase, op in ops if phase == "forward" and op.opcode == "aten.mul.Tensor"]
    forward = [op for op in products if op.path.endswith("layers.0.mlp")]
    inputs = {result.storage for op in forward for result in op.results}
    freeing = [op for _, op in ops if inputs & set(op.frees)]
    assert inputs
    assert {(op.opcode, op.source) for op in freeing} == {("memir.free", "drop_loss")}
    quantized = [op for _, op in ops if op.opcode == "bitsandbytes.int8_vectorwise_quant"]
    assert {str(op.scratch) for op in quantized} == {"384*B*S", "768*B*S"}  # 3 bytes an element of the input


@pytest.mark.parametrize(("bits", "group"), [(4, 128), (4, -1), (8, 32), (2, 64)])
def test_gptq_bytes_by_hand(llama: str, bits: int, group: int) -> None:
    recipe = Recipe(dtype="f16", lora=LORA, quantize=Quantize("gptq", bits=bits, group=group))
    traced = memir.trace(llama, recipe, batch=2, seq=32)
    rest = 2 * (2 * 512 * 128 + 5 * 128) + 4 * 2 * (4 * 128 + 4 * 128)  # norms stay fp16
    assert bytes_of(traced.program, Kind.PARAMETER) == rest

    def packed(inputs: int, outputs: int) -> int:
        groups = 1 if group == -1 else -(-inputs // group)
        return inputs * outputs * bits // 8 + groups * outputs * bits // 8 + 2 * groups * outputs + 4 * inputs

    held = 2 * (4 * packed(128, 128) + 2 * packed(128, 256) + packed(256, 128))
    assert bytes_of(traced.program, Kind.BUFFER) - held in (64, 128)
    linear = 2 * (4 * 128 * 128 + 3 * 128 * 256)
    assert traced.num_parameters == linear + 2 * 512 * 128 + 5 * 128 + traced.num_trainable


@pytest.mark.parametrize(("kernel", "uses", "kept"), [("triton", 2, 0), ("torch", 1, 1)])
def test_gptq_dequantizes_again_or_keeps_the_matrix(llama: str, kernel: str, uses: int, kept: int) -> None:
    recipe = Recipe(dtype="f16", lora=LORA, quantize=Quantize("gptq", kernel=kernel))
    program = memir.trace(llama, recipe, batch=2, seq=32).program
    ops = [op for _, op in program.ops() if op.opcode == "gptq.dequantize" and "layers.1.mlp.gate" in op.path]
    assert len(ops) == uses
    made = ops[0].results[0].storage
    frees = [phase.name for phase, op in program.ops() if made in op.frees]
    assert frees == ["backward" if kept else "forward"]
    assert [s.nbytes for s in program.storages if s.name == made] == [Size.of(2 * 128 * 256)]


def test_where_gptq_is_not_described(llama: str) -> None:
    quantize = Quantize("gptq")
    with pytest.raises(UsageError, match="triton kernel computes in fp16, not bf16"):
        Recipe(lora=LORA, quantize=quantize)
    with pytest.raises(UsageError, match="gptq is described on cuda only"):
        Recipe(lora=LORA, quantize=quantize, dtype="f16", target="cpu")
    recipe = Recipe(dtype="f16", lora=LORA, quantize=quantize)
    with pytest.raises(UsageError, match=r"q_proj has 120 inputs and \d+ outputs, not multiples of 32"):
        memir.trace(llama, recipe, batch=2, seq=32, sets={"hidden_size": 120, "head_dim": 32})


def test_every_use_dequantizes_once_more_under_checkpointing(llama: str) -> None:
    for checkpoint, uses in (("none", 2), ("full", 3)):
        recipe = Recipe(lora=LORA, quantize=Quantize(), checkpoint=checkpoint)
        program = memir.trace(llama, recipe, batch=2, seq=32).program
        layer = [op for _, op in program.ops() if op.opcode == "bitsandbytes.dequantize_4bit" and "gate" in op.operands[0]]
        assert len([op for op in layer if "layers_1" in op.operands[0] or "layers.1" in op.operands[0]]) == uses


def test_a_model_without_linear_layers_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(
        "import torch\nfrom torch import nn\n\n\nclass Bag(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.table = nn.Embedding(8, 8)\n\n"
        "    def forward(self, ids, targets):\n        scores = self.table(ids).flatten(0, 1)\n"
        "        return nn.functional.cross_entropy(scores, targets.flatten())\n"
    )
    with pytest.raises(UsageError, match="no linear layer that could be quantized"):
        memir.trace(str(path), Recipe(quantize=Quantize(), mode="forward"), batch=2, seq=8)


def softmax_program(llama: str, dtype: str, target: str) -> Program:
    return memir.trace(llama, Recipe(dtype=dtype, attention="eager", target=target), batch=2, seq=32).program


def test_softmax_backward_on_cuda_makes_a_product_first(llama: str) -> None:
    ops = [op for _, op in softmax_program(llama, "f16", "cuda").ops() if op.opcode == "aten._softmax_backward_data"]
    assert [str(op.scratch) for op in ops] == ["16*B*S^2"] * 2  # 4 heads, fp32
    ops = [op for _, op in softmax_program(llama, "f16", "cpu").ops() if op.opcode == "aten._softmax_backward_data"]
    assert all(op.scratch == Size.of(0) for op in ops)


@pytest.mark.parametrize(("dtype", "copies"), [("f16", 0), ("bf16", 2)])
def test_softmax_from_fp16_to_fp32_is_one_kernel_on_cuda(llama: str, dtype: str, copies: int) -> None:
    program = softmax_program(llama, dtype, "cuda")
    forward = [op for phase, op in program.ops() if phase.name == "forward" and op.path.endswith("self_attn")]
    softmax = [i for i, op in enumerate(forward) if op.opcode == "aten._softmax"]
    assert sum(forward[i - 1].opcode == "aten._to_copy" for i in softmax) == copies
