"""All stages of a pipeline: the same passes once for each, as reports show them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

P = TypeVar("P")
PIPELINE = "pipeline-parallel"


def num_stages(passes: Sequence[Any]) -> int:
    """How many ranks the pipeline among these passes has; 1 where there is none."""
    return next((p.degree for p in passes if _is_pipeline(p)), 1)


def of_each_stage(passes: Sequence[P]) -> tuple[tuple[P, ...], ...]:
    """The passes for rank 0 of the pipeline, for rank 1, ...; as they are, once, where there is no pipeline."""
    return tuple(tuple(_at(p, stage) for p in passes) for stage in range(num_stages(passes)))


def names_stage(text: str) -> bool:
    """Whether the text of the passes says which stage: without it, it is all of them."""
    return re.search(rf"{PIPELINE}\{{[^}}]*\bstage\s*=", text) is not None


def _is_pipeline(one: Any) -> bool:
    return getattr(type(one), "name", "") == PIPELINE and {"degree", "stage"} <= {f.name for f in fields(one)}


def _at(one: Any, stage: int) -> Any:
    return replace(one, stage=stage) if _is_pipeline(one) else one
