"""`--fsdp 8` and its like as the text of passes."""

from __future__ import annotations

import pytest

from memir.errors import UsageError
from memir.parallel.recipes import expanded
from memir.parallel.shorthand import Shorthand


def test_the_order_is_that_of_application() -> None:
    assert Shorthand(tp=2, pp=4).passes() == "tensor-parallel{degree=2},pipeline-parallel{degree=4}"
    text = "tensor-parallel{placed-gradients degree=2},pipeline-parallel{degree=4},fsdp{degree=8}"
    assert Shorthand(fsdp=8, tp=2, pp=4).passes() == text
    assert Shorthand(zero=3, ddp=4).passes() == "zero{stage=3 degree=4}"
    assert Shorthand(ddp=4, cp=2).passes() == "context-parallel{degree=2},data-parallel{degree=4}"
    assert Shorthand(ep=8).passes() == "expert-parallel{degree=8}"
    assert Shorthand().passes() == ""
    assert Shorthand().passes("fsdp1{degree=2}") == "fsdp1{degree=2}"


def test_recipes_are_lists_of_passes() -> None:
    assert expanded("llmem-cdp") == "data-parallel{degree=4}"
    assert expanded("llmem-adp{degree=8}") == "fsdp{degree=8 reshard=false param-dtype=f16}"
    assert expanded("llmem-tp{degree=2}") == "tensor-parallel{degree=2}"
    both = "tensor-parallel{degree=4 placed-gradients},fsdp{degree=2 reshard=false param-dtype=f16}"
    assert expanded("bind{L=9},llmem-dp-tp{degree=8 tp=4}") == f"bind{{L=9}},{both}"
    assert expanded("fsdp{degree=2}") == "fsdp{degree=2}"
    for text in ("llmem-zdp", "llmem-tp{tp=2}", "llmem-adp{degree=x}", "llmem-dp-tp{degree=4 tp=3}"):
        with pytest.raises(UsageError, match="llmem"):
            expanded(text)


@pytest.mark.parametrize(
    ("given", "parallel", "message"),
    [
        (Shorthand(fsdp=8), "fsdp{degree=8}", "--parallel and --fsdp at once"),
        (Shorthand(zero=1, ddp=8), "fsdp{degree=8}", "--parallel and --zero at once"),
        (Shorthand(fsdp=8, ddp=2), "", "--fsdp and --ddp at once"),
        (Shorthand(zero=4, ddp=2), "", "stages 1, 2 and 3"),
        (Shorthand(zero=2), "", "over how many ranks"),
    ],
)
def test_what_cannot_be_meant(given: Shorthand, parallel: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        given.passes(parallel)
