"""What PyTorch's process holds on a GPU beside a step's tensors: the CUDA context, and the workspaces of cuBLAS.

The context lies outside of PyTorch's allocator: `nvidia-smi` shows it, no figure of `torch.cuda` does. The workspaces come from
the allocator: once a matrix product has run they belong to allocated bytes until the process ends.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from memir.cuda.platform import Platform, platform
from memir.hardware import Card
from memir.ir.core import Op

MIB = 2**20
CUBLASLT_WORKSPACE = MIB  # bytes; aten/src/ATen/cuda/CublasHandlePool.cpp, `parseCUDABlasLtWorkspaceSize`: 1024 KiB


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes that are held from the first step on, with what holds them: once for each phase whose thread takes it."""

    name: str
    each: int  # bytes of one
    phases: tuple[str, ...] = ("forward",)  # in which a thread takes it first: autograd's in the backward

    @property
    def nbytes(self) -> int:
        """All of them together."""
        return self.each * len(self.phases)


@dataclass(frozen=True, slots=True)
class Context:
    """What a CUDA context with the kernels of a training step takes, where it was measured. `key` "" stands for other cards."""

    key: str  # of the card
    low: float  # MiB
    high: float
    source: str


# With lazy loading of kernels, which CUDA has since 11.7 and every PyTorch since 2.6. Before, all were loaded: 1,343 MiB on
# a V100 with CUDA 11.2 (transformers, docs/source/en/perf_train_gpu_one.mdx of January 2022).
_LAZY = "about 300 MB (pytorch issue 107667), about 400 MB (issue 109888); other GPUs differ"
CONTEXTS = (
    Context(
        "t4",
        140.9,
        286.1,
        "total - free - reserved after a step, torch 2.10.0+cu128 and 2.14.0+cu130: 140.9 MiB (fitcheck-llm 0.3.1, 40 runs); "
        + _LAZY,
    ),
    Context("rtx-6000-ada", 426, 426, "nvidia-smi, torch 2.10.0+cu130: 426 MiB (unslothai/unsloth-zoo pull request 1053)"),
    Context("", 286.1, 426, _LAZY + "; 426 MiB is the RTX 6000 Ada's"),
)


def context(card: Card | None) -> tuple[int, int]:
    """The least and the most bytes that the CUDA context takes on a card, as far as sources say; of no card, of most cards."""
    rows = {row.key: row for row in CONTEXTS}
    row = rows.get(card.key if card is not None else "", rows[""])
    return round(row.low * MIB), round(row.high * MIB)


def cublas_workspace(gpu: str = "", torch: str = "2.13") -> int:
    """Bytes of the workspace of one cuBLAS handle and stream; `gpu` is a compute capability, "9.0".

    aten/src/ATen/cuda/CublasHandlePool.cpp, `parseChosenWorkspaceSize`: 2 buffers of 4096 KiB and 8 of 16 KiB; 32 MiB on
    Hopper, and since 2.12 on Blackwell (pull request 175344). CUBLAS_WORKSPACE_CONFIG, which changes it, is taken to be unset.
    """
    where = platform(gpu, torch)
    major = where.capability[0]
    if major == 9 or (major in (10, 12) and where.torch >= (2, 12)):
        return 32 * MIB
    return (2 * 4096 + 8 * 16) * 1024


def workspaces(where: Platform, ops: Iterable[Op], *, trains: bool) -> tuple[Held, ...]:
    """The workspaces that a step's operators make PyTorch hold.

    Each thread has a cuBLAS handle: the main thread, and in training autograd's (ATen/cuda/detail/DeviceThreadHandles.h;
    torch/csrc/autograd/engine.cpp). The forward's addmm takes cuBLASLt, whose workspace is one of its own from 2.8 (pull
    request 151163; before it is freed after the product) until 2.11, and cuBLAS's since 2.12 (175879).
    """
    opcodes = {op.opcode for op in ops}
    products = {"aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten.addmv", "aten.mv", "aten.dot"}
    if not opcodes & products:
        return ()
    version = f"{where.torch[0]}.{where.torch[1]}"
    one = cublas_workspace(f"{where.capability[0]}.{where.capability[1]}", version)
    phases = ("forward", "backward") if trains else ("forward",)
    found = [Held(f"cuBLAS workspace of {len(phases)} thread{'s' if trains else ''}", one, phases)]
    if "aten.addmm" in opcodes and (2, 8) <= where.torch < (2, 12):
        found.append(Held("cuBLASLt workspace", CUBLASLT_WORKSPACE))
    return tuple(found)
