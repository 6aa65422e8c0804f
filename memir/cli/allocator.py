"""The options that describe the caching allocator, shared by every command that plays it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click


def allocator_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """`--alloc-conf` and `--steps`, given to the command as `alloc_conf` and `steps`."""
    text = "Training steps that are played; the first one makes the optimizer's state."
    command = click.option("--steps", type=click.IntRange(min=1), default=3, show_default=True, help=text)(command)
    return alloc_conf_option(command)


def alloc_conf_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """`--alloc-conf`, given to the command as `alloc_conf`."""
    text = "Allocator settings, as in the variable PYTORCH_CUDA_ALLOC_CONF: expandable_segments:True,max_split_size_mb:128."
    return click.option("--alloc-conf", metavar="TEXT", default="", help=text)(command)
