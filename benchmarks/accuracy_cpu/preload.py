"""Imports what a case needs, all of memir included: editing the tree while the benchmark runs does not change its cases."""

from __future__ import annotations

import importlib
import pkgutil

import peft  # noqa: F401
import torch.profiler  # noqa: F401
import transformers.modeling_utils
import transformers.models.auto.modeling_auto  # noqa: F401

import benchmarks.accuracy_cpu.run  # noqa: F401
import memir

for module in pkgutil.walk_packages(memir.__path__, "memir."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
