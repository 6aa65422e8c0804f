"""Text of an option to a value, and the places of a loss by names."""

from __future__ import annotations

import enum
from typing import Any, Literal, Optional

import pytest
import torch

from memir.errors import UsageError
from memir.frontend.load_returns import loss_by_names
from memir.frontend.load_values import convert, nearest_names, plain_dict


class Norm(enum.Enum):
    RMS = "rms"
    LAYER = "layer"


@pytest.mark.parametrize(
    ("text", "like", "annotation", "value"),
    [
        ("24", 12, None, 24),
        ("1_024", 12, None, 1024),
        ("1e3", 12, None, 1000),
        ("0.5", 0.1, None, 0.5),
        ("1", 0.1, None, 1.0),
        ("false", True, None, False),
        ("on", False, None, True),
        ("12", "name", None, "12"),
        ("12", None, None, 12),
        ("none", None, None, None),
        ("gelu", None, None, "gelu"),
        ("[1, 2]", (3,), None, (1, 2)),
        ("{'a': 1}", {}, None, {"a": 1}),
        ("8", None, Optional[int], 8),  # noqa: UP045
        ("none", 3, int | None, None),
        ("8", None, "int | None", 8),
        ("8", None, "Optional[int]", 8),
        ("2.5", None, int | float, 2.5),
        ("rms", None, Norm, Norm.RMS),
        ("LAYER", None, Norm, Norm.LAYER),
        ("b", None, Literal["a", "b"], "b"),
        ("float16", torch.float32, None, torch.float16),
        ("[1]", None, list[int], [1]),
        ("x", None, Any, "x"),
    ],
)
def test_convert(text: str, like: object, annotation: object, value: object) -> None:
    result = convert(text, like, "--set x", annotation)
    assert result == value
    assert type(result) is type(value)


@pytest.mark.parametrize(
    ("text", "like", "annotation"),
    [
        ("2.5", 1, None),
        ("maybe", True, None),
        ("x", 1.0, None),
        ("c", None, Literal["a", "b"]),
        ("3", [], None),
        ("q", None, Norm),
    ],
)
def test_text_that_does_not_fit(text: str, like: object, annotation: object) -> None:
    with pytest.raises(UsageError, match="--set x"):
        convert(text, like, "--set x", annotation)


def test_nearest_names() -> None:
    assert nearest_names("n_layers", ["n_layer", "n_head", "vocab"])[0] == "n_layer"
    assert nearest_names("embd", ["n_embd", "n_head"]) == ["n_embd"]
    assert nearest_names("zzz", ["n_embd"]) == []


def test_plain_dict_is_sorted_and_plain() -> None:
    values = {"z": 1, "a": torch.float32, "m": Norm.RMS, "f": print, "l": (1, 2)}
    assert list(plain_dict(values).items()) == [("a", "float32"), ("l", [1, 2]), ("m", "RMS"), ("z", 1)]


def returns_pair(self: Any, logits: Any, loss: Any) -> Any:
    def inner() -> Any:
        return loss

    return logits, inner and loss, loss


def returns_keyword(output: Any, loss: Any) -> Any:
    if loss is None:
        return output
    return output(logits=None, loss=loss)


def returns_dict(loss: Any) -> Any:
    return {"logits": None, "lm_loss": loss}


def stores(self: Any, logits: Any) -> Any:
    self.train_loss = logits.mean()
    return logits


def returns_logits(logits: Any, cache: Any) -> Any:
    return cache, logits


@pytest.mark.parametrize(
    ("forward", "place"),
    [
        (returns_pair, "item:2"),
        (returns_keyword, "attr:loss"),
        (returns_dict, "item:lm_loss"),
        (stores, "module:train_loss"),
        (returns_logits, "logits:item:1"),
        (len, ""),
    ],
)
def test_loss_by_names(forward: Any, place: str) -> None:
    assert loss_by_names(forward) == place
