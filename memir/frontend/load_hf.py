"""Hugging Face models: from a config dictionary to a module on the meta device, without weights and without the network."""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext, redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from memir.errors import UsageError
from memir.frontend import flash_attn
from memir.frontend.device import build_device
from memir.frontend.load_hf_config import first_lines, make_config, offline, refuse_non_decoders
from memir.frontend.load_layers import decoder_layers, mask_limit, position_limit, stated_limit
from memir.frontend.load_values import plain_dict
from memir.frontend.loaded import Call, LoadedModel
from memir.frontend.trainer import sets_cache_off
from memir.recipe import Recipe

DTYPE = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}


def load_hf(
    config_dict: Mapping[str, Any],
    *,
    recipe: Recipe,
    sets: Mapping[str, str],
    target: str,
    name: str = "",
    source: str = "",
    trust_remote_code: bool = False,
    repository: str = "",
) -> LoadedModel:
    """Build the decoder that a Hugging Face config describes, on the meta device, in the recipe's dtype.

    `repository` is the folder or cached id that the config comes from: its own code (`auto_map`) runs only with
    `trust_remote_code`. Buffers such as inv_freq keep the dtype that `from_config` gives them (float32).
    UsageError: unknown model type, unknown or ill-typed option, encoder-only or encoder-decoder model, remote code.
    """
    assumptions: list[str] = []
    with ExitStack() as scope:
        scope.enter_context(redirect_stdout(sys.stderr))
        scope.enter_context(offline())
        scope.enter_context(torch.random.fork_rng(devices=[]))
        config = make_config(config_dict, sets, target, trust_remote_code, repository, assumptions)
        refuse_non_decoders(config, target)
        module = _build(config, recipe, target, trust_remote_code, assumptions)
    module.train()
    text_config = config.get_text_config()
    values = plain_dict(text_config.to_dict() if text_config is not config else config.to_dict())
    return LoadedModel(
        module=module,
        call=call_of(module, recipe, assumptions),
        name=name or type(module).__name__,
        target=target,
        source=source or _class_source(type(module)),
        config=values,
        max_seq=max_seq_of(module),
        layers=decoder_layers(module),
        is_hf=True,
        roots=_roots(module),
        assumptions=assumptions,
    )


def _build(config: Any, recipe: Recipe, target: str, trust: bool, assumptions: list[str]) -> nn.Module:
    import transformers
    from transformers import AutoModelForCausalLM

    major, minor = (int(part) for part in transformers.__version__.split(".")[:2])
    # `torch_dtype` became `dtype` in transformers 4.56 (PreTrainedModel._from_config takes both since).
    dtype_name = "dtype" if (major, minor) >= (4, 56) else "torch_dtype"
    implementation = {"eager": "eager", "flash-attn-2": "flash_attention_2"}.get(recipe.attention, "sdpa")
    options: dict[str, Any] = {dtype_name: DTYPE[recipe.dtype], "attn_implementation": implementation}
    if trust:
        options["trust_remote_code"] = True

    def build(**changes: Any) -> nn.Module:
        default_dtype = torch.get_default_dtype()
        try:
            with torch.device(build_device()), _flash_attn(recipe):
                module = AutoModelForCausalLM.from_config(copy.deepcopy(config), **{**options, **changes})
        finally:
            torch.set_default_dtype(default_dtype)
        assert isinstance(module, nn.Module)
        return module

    try:
        try:
            return build()
        except (ValueError, ImportError) as error:
            if implementation != "sdpa" or "scaled_dot_product" not in str(error):
                raise
            module = build(attn_implementation="eager")
            if getattr(config.get_text_config(), "num_attention_heads", None) is not None:  # a state-space model has none
                assumptions.append(f"eager attention: transformers has no sdpa attention for {config.model_type}")
            return module
    except UsageError:
        raise
    except ImportError as error:
        raise UsageError(f"{target}: a package that {config.model_type} needs is missing", where=first_lines(error)) from None
    except Exception as error:  # a boundary: a model's constructor may raise anything on a config that does not fit it
        raise UsageError(
            f"{target}: the {config.model_type} model cannot be built from its config",
            where=f"{type(error).__name__}: {first_lines(error)}\n{_last_place(error)}".rstrip(),
        ) from None


def _flash_attn(recipe: Recipe) -> AbstractContextManager[None]:
    """flash-attn 2, described; where the model is built to really run, the package itself."""
    return flash_attn.installed() if recipe.attention == flash_attn.NAME and build_device() == "meta" else nullcontext()


def call_of(module: nn.Module, recipe: Recipe, assumptions: list[str]) -> Call:
    """The call of a transformers model with input_ids and labels, without a cache; the mask where the batch has one."""
    parameters = inspect.signature(module.forward).parameters
    ids = "input_ids" if "input_ids" in parameters else next(iter(parameters))
    has_labels = "labels" in parameters
    if not has_labels:
        assumptions.append("the model computes no loss: F.cross_entropy over the shifted logits is added")
    without_cache = "use_cache" in parameters and (recipe.loop == "plain" or sets_cache_off())
    constants: tuple[tuple[str, Any], ...] = (("use_cache", False),) if without_cache else ()
    masked = recipe.masked and "attention_mask" in parameters
    return Call(
        ids=ids,
        targets="labels" if has_labels else None,
        mask="attention_mask" if masked else None,
        constants=constants,
        loss="attr:loss" if has_labels else "logits:attr:logits",
    )


def max_seq_of(module: nn.Module) -> int | None:
    """The limit that really holds: learned positions, or a table of that many positions; rotary models have none."""
    config = module.config.get_text_config()  # type: ignore[operator, union-attr]
    learned = position_limit(module)
    if learned is not None:
        return learned
    stated = stated_limit({name: getattr(config, name, None) for name in ("max_position_embeddings", "n_positions")})
    return mask_limit(module, stated) if stated is not None else None


def _roots(module: nn.Module) -> tuple[str, ...]:
    """The directory of the model's own code, and transformers' loss functions."""
    roots = [str(Path(inspect.getfile(type(module))).resolve().parent)]
    spec = find_spec("transformers.loss")
    roots += [str(Path(place).resolve()) for place in (spec.submodule_search_locations or [])] if spec else []
    return tuple(roots)


def _class_source(cls: type) -> str:
    return f"{Path(inspect.getfile(cls)).name}:{inspect.getsourcelines(cls)[1]}"


def _last_place(error: BaseException) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return ""
    return f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}"
