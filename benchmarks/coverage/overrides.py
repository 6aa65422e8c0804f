"""What the general rules of `tiny.py` cannot know: constructor arguments laid over the shrunk ones, one entry a model type.

`...` leaves a field to its default. A comment says why an entry is more than a smaller number.
"""

from __future__ import annotations

from typing import Any

_GEMMA4_DRAFT = {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}}
_DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}

# Arguments without which a type's default config cannot be built.
FIXED_FIELDS: dict[str, dict[str, Any]] = {
    # the defaults contradict the type's own validation
    "gemma4_assistant": _GEMMA4_DRAFT,
}

_DOTS3_NOTE = {
    # the sliding layers have their own head sizes, given under these names
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_q_lora_rank": 32,
    "swa_kv_lora_rank": 32,
    "swa_head_dim": 32,
    "swa_qk_nope_head_dim": 16,
    "swa_v_head_dim": 16,
}
_LLAMA4 = {
    # dense and expert layers, with and without rotary positions; layer_types follows from no_rope_layers
    "num_hidden_layers": 4,
    "moe_layers": [1, 3],
    "no_rope_layers": [1, 1, 1, 0],
    "layer_types": ...,
}
_QWEN4_EXP = {
    # the indexer has no defaults
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
    "hc_lowrank": 16,
}
_ZAMBA = {
    # the shared block is tied, so it must occur twice; heads span twice the hidden size
    "num_hidden_layers": 4,
    "layers_block_type": ["linear_attention", "hybrid"] * 2,
    "attention_hidden_size": 128,
    "attention_head_dim": 32,
}

OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},  # none by default
    "blt": {"encoder_hash_byte_group_vocab": 512, "encoder_hash_byte_group_size": [3, 4]},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {**_DEFAULT_ROPE, "mrope_section": [4, 2, 2]}}},  # no default
    "dbrx": {
        # attention reads a rope_theta that its config does not declare, and clamps by a bound without default
        "attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0},
        "ffn_config": {"moe_top_k": 2},
    },
    "deepseek_v2": {
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 32,
    },  # no default for the first
    "deepseek_v4": {"compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}},
    "dory": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "full_attention"],
        "n_input_layers": 1,
        "n_recurrent_layers": 2,
        "n_output_layers": 1,
    },
    "dots1": {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
    },  # no defaults
    "dots3_note": {
        "text_config": _DOTS3_NOTE,
        "vision_config": {
            "adapter_in_dim": 64,
            "adapter_out_dim": 64,
            "mlp_layer_types": ["dense", "sparse"],
            "per_layer_config": {1: {"num_local_experts": 4, "num_experts_per_tok": 2}},
        },
        "audio_config": {"adapter_input_size": 64, "adapter_out_dim": 64, "downsample_hidden_size": 32},
    },
    "dots3_note_text": _DOTS3_NOTE,
    "emu3": {"vq_config": {"base_channels": 32, "codebook_size": 64, "channel_multiplier": [1, 1]}},
    "gemma3n_text": {
        # two layers keep keys and values, two use theirs
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
        "intermediate_size": [128] * 4,
    },
    "git": {
        # with labels, forward expects this many images' patches before the text: none
        "num_image_with_embedding": 0,
        "vision_config": {"image_size": 32},
    },
    "got_ocr2": {"vision_config": {"image_size": 64, "global_attn_indexes": [1], "output_channels": 16, "window_size": 2}},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},  # all linear by default
    "hrm_text": {"num_layers_per_stack": 2},
    "hunyuan_v1_dense": {"head_dim": 16},  # no default
    "hunyuan_v1_moe": {"head_dim": 16, "num_experts": 4, "moe_topk": 2},  # no default; one expert is none
    "jamba": {"num_hidden_layers": 4, "attn_layer_period": 4, "attn_layer_offset": 2},  # kinds of layer follow from periods
    "laguna": {"num_attention_heads_per_layer": [4, 4]},
    "lfm2": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"], "full_attn_idxs": ..., "block_multiple_of": 32},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},  # no default
    "llama4": {"text_config": _LLAMA4},
    "llama4_text": _LLAMA4,
    "mamba2": {"num_heads": 4, "head_dim": 32, "n_groups": 2},  # num_heads * head_dim = expand * hidden_size
    "ministral": {"head_dim": 16},  # no default
    "nemotron": {"num_key_value_heads": 2},  # no default
    "nemotron_h": {"n_groups": 2},
    "phi4_multimodal": {
        "audio_config": {
            "nemo_conv_channels": 64,
            "ext_pw_out_channel": 64,
            "depthwise_separable_out_channel": 64,
            "bias_max_distance": 64,
        },
        "vision_config": {"image_size": 56, "crop_size": 56},
    },
    "qwen4_exp": {"text_config": _QWEN4_EXP},
    "qwen4_exp_text": _QWEN4_EXP,
    "recurrent_gemma": {"num_hidden_layers": 3},  # two recurrent, one attention
    "reformer": {
        # axial positions demand one length of training sequences; plain ones take any
        "axial_pos_embds": False,
        "attn_layers": ["local", "lsh"],
        "local_attn_chunk_length": 16,
        "lsh_attn_chunk_length": 16,
        "num_buckets": 4,
    },
    "roc_bert": {"shape_vocab_size": 64, "pronunciation_vocab_size": 64, "shape_embed_dim": 16, "pronunciation_embed_dim": 16},
    "xmod": {"default_language": "en_XX"},  # a language adapter must be chosen
    "zamba": _ZAMBA,
    "zamba2": _ZAMBA,
}
