"""What is printed as `none` is accepted as such."""

from __future__ import annotations

from tests.cli.test_frame import request_of


def test_none_is_no_adapters_and_no_quantization() -> None:
    recipe = request_of("gpt2", "--lora", "none", "--quantize", "none").recipe
    assert recipe.lora is None
    assert recipe.quantize is None
