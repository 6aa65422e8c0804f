"""A tiny config of every causal-LM model type of the installed transformers: same architecture, under two megabytes of weights.

The default config of a type is shrunk by the rules below (field name -> largest value allowed), keeping one layer of every
kind that the default has; what the rules cannot know stands in `overrides.py`, one entry a type.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from benchmarks.coverage.overrides import FIXED_FIELDS, OVERRIDES

VOCAB = 256
MAX_SEQ = 512

# Largest value of an integer field. A field that is smaller by default keeps its default.
_CAPS: tuple[tuple[int, str], ...] = (
    # widths
    (
        64,
        "hidden_size n_embd d_model emb_dim embedding_dim word_embed_proj_dim lru_width",
    ),
    (64, "attention_hidden_size hidden_size_global"),
    (32, "embedding_size input_embedding_size output_embedding_size"),
    (128, "intermediate_size dense_intermediate_size intermediate_size_mlp ffn_dim ffn_hidden_size decoder_ffn_dim"),
    (128, "encoder_ffn_dim dff dim_ff d_ff d_inner feed_forward_size mlp_dim"),
    (32, "moe_intermediate_size expert_ffn_hidden_size shared_intermediate_size shared_expert_intermediate_size"),
    (32, "shared_experts_intermediate_size moe_shared_expert_intermediate_size router_hidden_size"),
    (8, "hidden_size_per_layer_input laurel_rank adapter_rank gated_norm_rank loop_gate_rank d_rel"),
    # heads
    (4, "num_attention_heads n_head n_heads num_heads attention_heads swa_num_attention_heads decoder_attention_heads"),
    (4, "encoder_attention_heads num_decoder_attention_heads num_encoder_attention_heads linear_num_heads index_n_heads"),
    (16, "head_dim swa_head_dim global_head_dim kv_channels attention_head_dim attention_head_size d_head d_kv dim_head"),
    (16, "linear_head_dim linear_key_head_dim linear_value_head_dim index_head_dim"),
    (16, "qk_nope_head_dim qk_rope_head_dim v_head_dim index_topk"),
    (8, "rotary_dim"),
    (32, "q_lora_rank kv_lora_rank o_lora_rank"),
    (2, "linear_num_key_heads"),
    (4, "linear_num_value_heads"),
    # depth
    (2, "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_decoder_layers num_encoder_layers"),
    (2, "depth num_blocks"),
    (1, "first_k_dense_replace num_dense_layers"),
    # experts
    (4, "num_experts n_routed_experts num_local_experts moe_num_experts"),
    (2, "num_experts_per_tok num_experts_per_token moe_topk moe_k n_group num_expert_group"),
    (1, "topk_group zero_expert_num"),
    # state-space and recurrent mixers
    (16, "mamba_d_state ssm_state_size state_size"),
    (32, "mamba_d_head mamba_headdim mamba_head_dim chunk_size mamba_chunk_size block_size"),
    (4, "mamba_n_heads mamba_num_heads n_mamba_heads"),
    (8, "mamba_dt_rank time_step_rank"),
    (128, "mamba_d_ssm"),
    # lengths
    (MAX_SEQ, "max_position_embeddings n_positions n_ctx max_seq_len model_max_length context_length"),
    (MAX_SEQ, "max_target_positions max_source_positions"),
    (32, "sliding_window sliding_window_size attention_window_size window_size local_attention attention_chunk_size"),
    # vocabularies
    (VOCAB, "vocab_size vocab_size_per_layer_input decoder_vocab_size unpadded_vocab_size"),
)
CAPS = {name: cap for cap, names in _CAPS for name in names.split()}
KV_HEADS = ("num_key_value_heads", "swa_num_key_value_heads", "num_kv_heads", "num_global_key_value_heads", "num_query_groups")
DEPTH = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
TOKENS = ("token_id", "token_index")


def model_types() -> tuple[str, ...]:
    """Every model type with a causal-LM class, sorted by name (not by class): 196 in transformers 5.24."""
    return tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))


def tiny_config(model_type: str) -> PretrainedConfig:
    """The tiny config of a model type: sequences of up to 512 tokens out of 256."""
    return CONFIG_MAPPING[model_type](**tiny_fields(model_type))


def tiny_fields(model_type: str) -> dict[str, Any]:
    """The constructor's arguments of `tiny_config`: what differs from the type's default config."""
    fixed = FIXED_FIELDS.get(model_type, {})
    default = CONFIG_MAPPING[model_type](**fixed)
    return merge(merge(fixed, shrink(default)), OVERRIDES.get(model_type, {}))


def shrink(config: PretrainedConfig) -> dict[str, Any]:
    """Fields of `config` that the rules make smaller, with those of its sub-configs in nested dictionaries."""
    fields = config.to_dict()
    mapped = getattr(config, "attribute_map", {})
    found: dict[str, Any] = {}
    for name, value in fields.items():
        if name in mapped:
            continue
        if name in (config.sub_configs or {}) and isinstance(getattr(config, name), PretrainedConfig):
            kind = {"model_type": value["model_type"]} if value.get("model_type") else {}
            found[name] = {**kind, **shrink(getattr(config, name))}
        elif isinstance(value, int) and not isinstance(value, bool) and value > CAPS.get(name, value):
            found[name] = CAPS[name]
    found.update(_kv_heads(fields))
    found.update(_tokens(fields))
    found.update(_layers(fields))
    if "is_decoder" in fields:
        found["is_decoder"] = True
    if fields.get("is_encoder_decoder"):  # the causal-LM class is the decoder alone
        found["is_encoder_decoder"] = False
    return found


def _kv_heads(fields: Mapping[str, Any]) -> dict[str, int]:
    """Grouped heads stay grouped (2 for 4), one head stays one, one a query head stays that."""
    heads = max(
        (fields[n] for n in ("num_attention_heads", "n_head", "n_heads", "num_heads") if isinstance(fields.get(n), int)),
        default=4,
    )
    found = {}
    for name in KV_HEADS:
        value = fields.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 1:
            found[name] = 4 if value >= heads else 2
    return found


def _tokens(fields: Mapping[str, Any]) -> dict[str, int]:
    """Special tokens beyond the small vocabulary are renumbered from 2 in the order of their names."""
    far = [n for n, v in fields.items() if n.endswith(TOKENS) and isinstance(v, int) and v >= VOCAB]
    return {name: 2 + place for place, name in enumerate(sorted(far))}


def _layers(fields: Mapping[str, Any]) -> dict[str, Any]:
    """One layer of each kind, where lists as long as the model is deep say what kind a layer is; two at least."""
    depth_name = next((n for n in DEPTH if isinstance(fields.get(n), int)), None)
    if depth_name is None:
        return {}
    depth = fields[depth_name]
    lists = {n: v for n, v in fields.items() if isinstance(v, (list, tuple)) and len(v) == depth and not _is_index_list(v)}
    if not lists:
        return {}
    kinds = list(zip(*lists.values(), strict=True))
    keep = sorted({kinds.index(kind) for kind in kinds})
    while len(keep) < 2:
        keep.append(keep[-1] + 1)
    return {depth_name: len(keep), **{n: [v[i] for i in keep] for n, v in lists.items()}}


def _is_index_list(values: Sequence[Any]) -> bool:
    """True for a list of layer numbers such as [0, 1, 2, 5]; those are derived anew by the config."""
    return len(values) > 1 and all(isinstance(v, int) for v in values) and sorted(set(values)) == list(values)


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` laid on `base`, nested dictionaries too; a field given as `...` is left to its default."""
    out = dict(base)
    for name, value in over.items():
        if value is ...:
            out.pop(name, None)
        elif isinstance(value, dict) and isinstance(out.get(name), dict):
            out[name] = merge(out[name], value)
        else:
            out[name] = value
    return out
