"""What PyTorch's choices on CUDA depend on: the GPU's compute capability, PyTorch's version and cuDNN's.

A release of PyTorch on PyPI names the cuDNN and CUDA that it comes with (`Requires-Dist` of the Linux wheel's metadata). A
build with others, or a system's cuDNN found first, may choose otherwise.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from memir.errors import UsageError
from memir.hardware.cards import cards

Version = tuple[int, int]

DEFAULT_CAPABILITY: Version = (8, 0)  # of a recipe that names no GPU
_THREADS = {(7, 5): 1024, (8, 6): 1536, (8, 7): 1536, (8, 9): 1536, (12, 0): 1536, (12, 1): 1536}
# PyTorch -> cuDNN as `cudnnGetVersion` has it (9.10.2 is 91002), CUDA; wheels of PyPI, Requires-Dist
_WHEELS: dict[Version, tuple[int, Version]] = {
    (2, 6): (90100, (12, 4)),
    (2, 7): (90501, (12, 6)),
    (2, 8): (91002, (12, 8)),
    (2, 9): (91002, (12, 8)),
    (2, 10): (91002, (12, 8)),
    (2, 11): (91900, (13, 0)),
    (2, 12): (92000, (13, 0)),
    (2, 13): (92000, (13, 0)),
    (2, 14): (92400, (13, 0)),
}


@dataclass(frozen=True, slots=True)
class Platform:
    """A GPU's compute capability under a release of PyTorch with its cuDNN and CUDA."""

    capability: Version
    torch: Version
    cudnn: int  # 91002 is 9.10.2
    cuda: Version

    @property
    def sm(self) -> str:
        """As PyTorch's messages name the GPU: sm80."""
        return f"sm{self.capability[0]}{self.capability[1]}"


def platform(gpu: str = "", torch: str = "2.13") -> Platform:
    """The platform of a recipe's `gpu`, a compute capability such as "9.0" (empty: 8.0), under a version of PyTorch.

    Versions before the first and after the last that are known count as those. UsageError: text that is not such a number.
    """
    version = _version(torch, "torch")
    known = min(max(version, min(_WHEELS)), max(_WHEELS))
    cudnn, cuda = _WHEELS[known]
    return Platform(_version(gpu, "gpu") if gpu else DEFAULT_CAPABILITY, version, cudnn, cuda)


def multiprocessors(gpu: str = "") -> int:
    """Streaming multiprocessors of the largest card of that compute capability (empty: 8.0); an A100's where none is known."""
    capability = _version(gpu, "gpu") if gpu else DEFAULT_CAPABILITY
    return max((card.sms for card in cards() if card.capability == capability), default=108)


def threads_of_multiprocessor(gpu: str = "") -> int:
    """cudaDeviceProp::maxThreadsPerMultiProcessor (CUDA C++ Programming Guide, technical specifications by capability)."""
    capability = _version(gpu, "gpu") if gpu else DEFAULT_CAPABILITY
    return _THREADS.get(capability, 2048)


def _version(text: str, what: str) -> Version:
    match = re.match(r"(\d+)\.(\d+)", text)
    if match is None:
        raise UsageError(f"{what}: {text!r} is not a number with two parts", hint="such as  9.0")
    return int(match[1]), int(match[2])
