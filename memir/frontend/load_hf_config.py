"""Hugging Face configurations: where they are read from, their options, and which of them are decoders."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from memir.errors import ParseError, UsageError
from memir.frontend.load_values import convert, is_none, nearest_names


@contextmanager
def offline() -> Iterator[None]:
    """Within, nothing is looked up on the network: HF_HUB_OFFLINE, also for a huggingface_hub that is already imported."""
    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, "1"))
    from huggingface_hub import constants

    was = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = was
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def read_config(path: Path) -> dict[str, Any]:
    """The config.json at `path` as a dictionary. UsageError with line and column when it is not JSON or not an object."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read", where=str(error)) from None
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        line = text.splitlines()[error.lineno - 1] if text.splitlines()[error.lineno - 1 :] else ""
        raise ParseError(
            f"{path.name} is not JSON: {error.msg}", file=str(path), line=error.lineno, column=error.colno, text=line
        ) from None
    if not isinstance(config, dict):
        raise UsageError(f"{path}: a Hugging Face config is a JSON object, not {type(config).__name__}")
    return cast("dict[str, Any]", _special_floats(config))


def _special_floats(value: Any) -> Any:
    """`{"__float__": "Infinity"}`, as transformers writes numbers that JSON lacks, as numbers."""
    if isinstance(value, dict):
        if value.keys() == {"__float__"}:
            return float(value["__float__"])
        return {name: _special_floats(item) for name, item in value.items()}
    return [_special_floats(item) for item in value] if isinstance(value, list) else value


def cached_config(repo_id: str) -> Path | None:
    """The config.json of a Hugging Face id in the local cache (its `main` revision); None when it is not there. No network."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(repo_id, "config.json")
    except HFValidationError:
        return None
    return Path(found) if isinstance(found, str) else None


def make_config(
    given: Mapping[str, Any], sets: Mapping[str, str], target: str, trust: bool, repository: str, assumptions: list[str]
) -> Any:
    """The configuration object that a config dictionary and the --set options describe. UsageError as load_hf says."""
    from transformers import CONFIG_MAPPING, AutoConfig

    values: dict[str, Any] = copy.deepcopy(dict(given))
    model_type = given.get("model_type")
    remote = sorted((given.get("auto_map") or {}).keys())
    known = isinstance(model_type, str) and model_type in CONFIG_MAPPING
    if remote and not known and not trust:
        raise UsageError(
            f"{target}: model type {model_type!r} is defined by code in the repository ({', '.join(remote)})",
            hint="that code runs only when you allow it:  --trust-remote-code",
        )
    if remote and trust and "AutoConfig" in remote:
        config_class = type(AutoConfig.from_pretrained(repository, local_files_only=True, trust_remote_code=True))
    elif not known:
        if not isinstance(model_type, str):
            hint = 'a Hugging Face config has one, such as  "model_type": "llama"'
            raise UsageError(f"{target}: the config names no model_type", hint=hint)
        import transformers

        close = nearest_names(model_type, list(CONFIG_MAPPING.keys()))
        raise UsageError(
            f"{target}: unknown model type {model_type!r}",
            where=f"transformers {transformers.__version__} has {len(list(CONFIG_MAPPING.keys()))} types",
            hint=f"nearest: {', '.join(close)}" if close else "a newer transformers may know it",
        )
    else:
        config_class = CONFIG_MAPPING[model_type]
    if not trust:
        values.pop("auto_map", None)
        if remote:
            assumptions.append(f"transformers' own {model_type} code, not the repository's")
    if values.pop("quantization_config", None):
        assumptions.append("quantization_config is ignored: weights are in the recipe's dtype")
    try:
        config = config_class.from_dict(copy.deepcopy(values))
        if sets:
            config = config_class.from_dict(_with_sets(values, config, sets, target, assumptions))
    except UsageError:
        raise
    except Exception as error:  # a boundary: any check in a configuration class may raise anything
        raise UsageError(f"{target}: the {model_type} config is refused", where=first_lines(error)) from None
    if repository:
        config.name_or_path = repository
    return config


def _with_sets(
    given: dict[str, Any], config: Any, sets: Mapping[str, str], target: str, assumptions: list[str]
) -> dict[str, Any]:
    """`given` with the --set options in it; fields are checked against the built config, whose values give the types."""
    given = copy.deepcopy(given)
    aliases: dict[str, str] = getattr(type(config), "attribute_map", {})
    layer_field = aliases.get("num_hidden_layers", "num_hidden_layers")
    for key, text in sets.items():
        *outer, leaf = key.split(".")
        holder, owner = given, config
        for part in outer:
            owner = getattr(owner, part, None)
            if owner is None:
                raise UsageError(f"--set {key}: the config of {target} has no section {part!r}")
            holder = holder.setdefault(part, {})
        is_dict = isinstance(owner, dict)
        leaf = leaf if is_dict else getattr(type(owner), "attribute_map", {}).get(leaf, leaf)
        known = dict(owner) if is_dict else owner.to_dict()
        if leaf not in known and not hasattr(owner, leaf):
            text_config = config.get_text_config()
            sections = [n for n, v in vars(config).items() if v is text_config and v is not config]
            close = nearest_names(leaf, list(known))
            hint = f"nearest: {', '.join(close)}" if close else f"fields: {', '.join(sorted(known)[:40])}"
            if sections and hasattr(text_config, leaf):
                hint = f"try  --set {sections[0]}.{leaf}={text}"
            raise UsageError(f"--set {key}: the config of {target} has no such field", hint=hint)
        before = known.get(leaf, getattr(owner, leaf, None) if not is_dict else None)
        none = is_none(text) and not isinstance(before, str)  # any field may be: sliding_window=none
        value = None if none else convert(text, before, f"--set {key}")
        if leaf == layer_field and isinstance(value, int) and isinstance(before, int):
            _fit_layer_lists(holder, before, value, assumptions)
        holder[leaf] = value
    return given


def _fit_layer_lists(given: dict[str, Any], before: int, after: int, assumptions: list[str]) -> None:
    """Lists with one entry a layer (layer_types, ...) follow the new depth: cut short, or continued in their own period."""
    for name, value in given.items():
        if isinstance(value, list) and len(value) == before and before != after and before > 0:
            period = next(p for p in range(1, before + 1) if all(v == value[i % p] for i, v in enumerate(value)))
            given[name] = [value[i] if i < before else value[i % period] for i in range(after)]
            assumptions.append(f"{name} fitted to {after} layers")


def refuse_non_decoders(config: Any, target: str) -> None:
    """UsageError for encoder-only and encoder-decoder models, and for types without a causal language model."""
    from transformers.models.auto import modeling_auto as auto

    causal, masked = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    seq2seq = auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    kind = getattr(config, "model_type", "")
    if "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}):
        return
    if getattr(config, "is_encoder_decoder", False):
        if causal.get(kind, "?") in (getattr(config, "architectures", None) or ()):  # the config itself names the decoder half
            return
        hint = "memir analyzes decoder-only language models"
        if kind in causal:
            hint += "; for the decoder half alone:  --set is_encoder_decoder=false --set is_decoder=true"
        raise UsageError(f"{target}: {kind} is an encoder-decoder model", hint=hint)
    if kind in causal and kind in masked and getattr(config, "is_decoder", True) is False:
        raise UsageError(
            f"{target}: {kind} is an encoder-only model (it attends both ways and predicts masked tokens)",
            hint="memir analyzes decoder-only language models; used as a decoder:  --set is_decoder=true",
        )
    if kind not in causal:
        what = "an encoder-only" if kind in masked else "an encoder-decoder" if kind in seq2seq else "not a causal language"
        raise UsageError(
            f"{target}: {kind} is {what} model: transformers has no causal language model of this type",
            hint="memir analyzes decoder-only language models",
        )


def first_lines(error: BaseException, count: int = 6) -> str:
    """The first lines of an error\'s text."""
    return "\n".join(str(error).strip().splitlines()[:count])
