"""What an operator means: the single table that lowering, passes and the verifier read.

So far it holds workspace (`scratch`): bytes alive only while the operator runs, on top of its results, by target. Each rule
names its source in PyTorch. On the CPU, kernels' scratch grows with the threads; the rules are for one, as `memir verify` runs.
Operators that are known to need none are in `FREE_OF_WORKSPACE`; on `cuda` what is in neither table is counted and reported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from memir.ir import bitsandbytes, liger
from memir.ir.attention import efficient_backward, efficient_forward, flash_attn_backward, flash_backward
from memir.ir.core import Op, Value
from memir.ir.dtypes import ITEMSIZE
from memir.ir.layout import product
from memir.ir.size import ONE, ZERO, Gen, Size, min_of
from memir.ir.workspaces import foreach_norm, norm_backward

Scratch = Callable[[Sequence[Value], Sequence[Value]], Size]  # (operands, results) -> bytes

_HALF = ("bf16", "f16")


def numel(value: Value) -> Size:
    """Number of elements of a tensor."""
    return product(value.shape)


def _step_at(extent: Size, limits: Sequence[tuple[int, int]], otherwise: int) -> Size:
    """A number that depends on the extent: of the first (threshold, number) whose threshold the extent reaches.

    For a symbol it is written with floor: min(1, floor(extent/threshold)) is 1 from the threshold on.
    """
    total, rest = Size.of(otherwise), otherwise
    for threshold, number in sorted(limits):
        reached = min_of(1, Size.of(Gen("floor", extent, Size.of(threshold))))
        total = total + reached * (number - rest)
        rest = number
    return total


def _flash_blocks(query: Value, key: Value) -> tuple[Size, Size]:
    """cpu/FlashAttentionKernel.cpp, flash_attention_kernel_impl: query blocks of 256, 64 or 32 rows, key blocks of 512."""
    rows, columns = query.shape[2], key.shape[2]
    return min_of(rows, _step_at(rows, [(192, 64), (768, 256)], 32)), min_of(columns, 512)


def _flash_cpu(operands: Sequence[Value], results: Sequence[Value]) -> Size:
    """aten/src/ATen/native/cpu/FlashAttentionKernel.cpp, cpu_flash_attention: qk, max, sum, dst in fp32, qk in 16 bit."""
    query, key = operands[0], operands[1]
    q, k = _flash_blocks(query, key)
    total = (q * k + 2 * q + q * query.shape[3]) * 4
    return total + q * k * 2 if query.dtype in _HALF else total


def _flash_cpu_backward(operands: Sequence[Value], results: Sequence[Value]) -> Size:
    """The same file, cpu_flash_attention_backward: two blocks of scores in fp32, their 16-bit copies, and dsum.

    A gradient that is not contiguous as [B, S, H, D] is copied first.
    """
    grad, query, key = operands[0], operands[1], operands[2]
    q, k = _flash_blocks(query, key)
    total = (2 * q * k + q) * 4
    if query.dtype in _HALF:
        total = total + 2 * q * k * 2
    batch, heads, length, head = grad.shape
    if grad.strides != (length * heads * head, head, heads * head, ONE):
        total = total + batch * heads * length * head * ITEMSIZE[grad.dtype]
    return total


def _layer_norm_backward_cpu(operands: Sequence[Value], results: Sequence[Value]) -> Size:
    """aten/src/ATen/native/cpu/layer_norm_kernel.cpp, LayerNormBackwardKernelImplInternal: partial sums of dgamma and dbeta."""
    if len(results) < 2:
        return ZERO
    return 2 * numel(results[1]) * ITEMSIZE[operands[0].dtype]


def _safe_softmax(operands: Sequence[Value], results: Sequence[Value]) -> Size:
    """aten/src/ATen/native/transformers/attention.cpp, _safe_softmax: isneginf, its all() over rows, and a scalar."""
    rows = ONE
    for extent in operands[0].shape[:-1]:
        rows = rows * extent
    return numel(operands[0]) + rows + 4


def _cast_operands_cpu(operands: Sequence[Value], results: Sequence[Value]) -> Size:
    """aten/src/ATen/TensorIterator.cpp, compute_types: on the CPU operands of another dtype are cast into temporaries."""
    wide = [v for v in operands if v.shape]  # zero-dimensional tensors do not take part in promotion
    dtypes = {v.dtype for v in wide}
    if len(dtypes) < 2 or not results:
        return ZERO
    common = results[0].dtype
    if results[0].storage == operands[0].storage:  # in place: into the wider of the two, then back
        common = max(dtypes, key=lambda d: (d.startswith(("f", "b")) and d != "bool", ITEMSIZE[d]))
    total = ZERO
    for value in wide:
        if value.dtype != common:
            total = total + numel(value) * ITEMSIZE[common]
    if results[0].dtype != common:
        total = total + numel(results[0]) * ITEMSIZE[common]
    return total


def _cast_input_cpu(operands: Sequence[Value], results: Sequence[Value]) -> Size:
    """aten/src/ATen/native/ReduceOpsUtils.h, make_reduction; ReduceOps.cpp, cumsum: the input is cast."""
    if not operands or not results or operands[0].dtype == results[0].dtype:
        return ZERO
    return numel(operands[0]) * ITEMSIZE[results[0].dtype]


def _sort_cpu(operands: Sequence[Value], results: Sequence[Value]) -> Size:
    """aten/src/ATen/native/cpu/SortingKernel.cpp: the indices of a one-dimensional sort are made apart."""
    return numel(operands[0]) * 8 if len(operands[0].shape) == 1 else ZERO


def _softmax_backward_cuda(operands: Sequence[Value], results: Sequence[Value]) -> Size:
    """aten/src/ATen/native/cuda/SoftMax.cu, softmax_backward_cuda_out: the product of gradient and output is made first."""
    return numel(operands[0]) * ITEMSIZE[operands[0].dtype]


_ELEMENTWISE = ("add", "sub", "mul", "div", "pow", "where", "maximum", "minimum", "eq", "ne", "lt", "le", "gt", "ge", "rsub")

_SCRATCH: dict[tuple[str, str], Scratch] = {
    **bitsandbytes.RULES,
    **liger.RULES,
    ("cuda", "aten._softmax_backward_data"): _softmax_backward_cuda,
    ("cpu", "aten._scaled_dot_product_flash_attention_for_cpu"): _flash_cpu,
    ("cpu", "aten._scaled_dot_product_flash_attention_for_cpu_backward"): _flash_cpu_backward,
    ("cpu", "aten.native_layer_norm_backward"): _layer_norm_backward_cpu,
    ("cpu", "aten._safe_softmax"): _safe_softmax,
    ("cuda", "aten._safe_softmax"): _safe_softmax,
    ("cpu", "aten.sort"): _sort_cpu,
    ("cuda", "aten._scaled_dot_product_flash_attention_backward"): flash_backward,
    ("cuda", "flash_attn._flash_attn_backward"): flash_attn_backward,
    ("cuda", "aten.native_layer_norm_backward"): norm_backward,
    ("cuda", "aten._fused_rms_norm_backward"): norm_backward,
    ("cuda", "aten._foreach_norm.Scalar"): foreach_norm,
    ("cuda", "aten._scaled_dot_product_efficient_attention"): efficient_forward,
    ("cuda", "aten._scaled_dot_product_efficient_attention_backward"): efficient_backward,
    **{("cpu", f"aten.{name}.Tensor"): _cast_operands_cpu for name in _ELEMENTWISE},
    **{("cpu", f"aten.{name}_.Tensor"): _cast_operands_cpu for name in _ELEMENTWISE},
    **{("cpu", f"aten.{name}"): _cast_input_cpu for name in ("sum", "cumsum", "sum.dim_IntList", "mean.dim", "mean", "prod")},
}

# Views, copies, factories and elementwise kernels of CUDA write their results and nothing else
# (aten/src/ATen/native/cuda/Loops.cuh, ForeachFunctors.cuh). Matrix products use the workspaces of cuBLAS, which the process
# holds (memir/cuda/context.py). Reductions to one number or of the last dimension keep within a few KiB, and so do scans and
# the k largest of less than 20,000 (TensorTopK.cu); those over rows are told apart (workspaces.py, `shared_sum`), and so is the
# embedding's backward. flash attention's forward splits the keys where there are less than 0.8 blocks of 64 queries for half
# a multiprocessor (flash_api.cpp, `num_splits_heuristic`): a few MiB that are not counted. NCCL's collectives on one tensor
# allocate nothing of PyTorch's (ProcessGroupNCCL.cpp), and FSDP's copies a few KiB of pointers (cuda/TensorShape.cu). Names are
# without the overload.
_FREE = """
view _unsafe_view reshape _reshape_alias t transpose permute expand expand_as squeeze unsqueeze slice select split
split_with_sizes chunk unbind as_strided alias detach unfold diagonal flatten view_as_real view_as_complex lift_fresh
movedim clone copy_ _to_copy contiguous cat stack empty empty_like empty_strided zeros zeros_like ones ones_like full
full_like arange scalar_tensor new_zeros new_ones new_empty new_full fill_ zero_ tril triu tril_ triu_ pad
constant_pad_nd slice_backward select_backward expand_backward add sub mul div neg pow sqrt rsqrt exp log sin cos tanh
sigmoid silu gelu relu abs sign reciprocal erf clamp clamp_min clamp_max maximum minimum where eq ne lt le gt ge rsub
addcmul addcdiv lerp logical_not logical_and logical_or bitwise_and bitwise_or bitwise_not masked_fill square softplus
floor ceil round sub_ add_ mul_ div_ neg_ pow_ sqrt_ rsqrt_ exp_ clamp_ clamp_min_ masked_fill_ addcmul_ addcdiv_ lerp_
relu_ sigmoid_ silu_ native_dropout native_dropout_backward embedding_dense_backward silu_backward gelu_backward tanh_backward
sigmoid_backward threshold_backward softplus_backward _softmax _log_softmax _log_softmax_backward_data
nll_loss_forward nll_loss_backward embedding native_layer_norm _fused_rms_norm gather _local_scalar_dense _foreach_add_
_foreach_sub_ _foreach_mul_ _foreach_div_ _foreach_lerp_ _foreach_addcmul_ _foreach_addcdiv_ _foreach_sqrt _foreach_add
_foreach_sub _foreach_mul _foreach_div _foreach_neg _foreach_neg_ _foreach_pow _foreach_pow_ _foreach_reciprocal_
_foreach_maximum_ _foreach_sqrt_ _foreach_sign _foreach_abs _foreach_copy_ _foreach_zero_ _fused_adamw_ _fused_adam_
_fused_sgd_ _scaled_dot_product_flash_attention _assert_async
_flash_attn_forward
mm addmm bmm baddbmm addmv mv dot sum mean amax amin linalg_vector_norm all any max min argmax argmin prod cumsum topk
index index_select index_add index_copy scatter scatter_add scatter_ scatter_add_ index_add_ index_copy_ index_fill_
bernoulli_ uniform_ normal_ isinf isnan remainder floor_divide bitwise_xor
all_gather_copy_in split_with_sizes_copy chunk_cat _allgather_base_ _reduce_scatter_base_ allreduce_
"""
FREE_OF_WORKSPACE = frozenset(_FREE.split())


def scratch_of(target: str, opcode: str, operands: Sequence[Value], results: Sequence[Value]) -> Size:
    """Bytes of workspace that the target's kernel takes beside its results; 0 where no rule is known."""
    rule = _SCRATCH.get((target, opcode))
    return rule(operands, results) if rule is not None else ZERO


def scratch_target(op: Op, operands: Sequence[Value]) -> str:
    """The target by whose rule an operator on these operands has its workspace; "" where no rule gives that."""
    return next((t for t in ("cuda", "cpu") if scratch_of(t, op.opcode, operands, op.results) is op.scratch), "")


def without_rule(target: str, ops: Iterable[tuple[Op, int]]) -> Counter[str]:
    """Opcodes whose workspace on the target is not known, and how often they run, for operators with how often each does.

    The CPU's rules cover what was measured.
    """
    unknown: Counter[str] = Counter()
    for op, count in ops:
        name = op.opcode.split(".")[1]
        if (
            target == "cuda"
            and (target, op.opcode) not in _SCRATCH
            and name not in FREE_OF_WORKSPACE
            and not op.opcode.startswith("memir.")
        ):
            unknown[op.opcode] += count
    return unknown
