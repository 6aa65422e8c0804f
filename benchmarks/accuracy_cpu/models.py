"""The models of the benchmark: Hugging Face configurations at small widths, and the example files.

Widths are chosen so that a peak is 20 to 200 MB: large enough that a thousandth of it is more than scalars, small enough for
two CPU cores. Sizes are deliberately not powers of two everywhere, and query and key-value heads, head sizes, vocabularies and
feed-forward widths differ between the models, so that no two terms of a formula can be mistaken for each other.
"""

from __future__ import annotations

from typing import Any

_LLAMA = {
    "vocab_size": 3200,
    "hidden_size": 192,
    "intermediate_size": 520,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
_GPT2 = {"vocab_size": 3001, "n_embd": 192, "n_layer": 3, "n_head": 6, "n_positions": 512, "n_inner": 768}
_MIXTRAL = {**_LLAMA, "intermediate_size": 320, "num_local_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 2}
_QWEN2_MOE = {
    **_LLAMA,
    "num_hidden_layers": 2,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 160,
    "shared_expert_intermediate_size": 320,
}
_DEEPSEEK_V3 = {
    **_LLAMA,
    "num_key_value_heads": 6,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 160,
    "q_lora_rank": 96,
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
}

# name -> what `config.json` holds. A key of `experts_implementation` selects how mixture-of-experts layers multiply.
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {"model_type": "gpt2", **_GPT2},
    "gpt2-untied": {"model_type": "gpt2", **_GPT2, "tie_word_embeddings": False},
    "gpt2-dropout0": {"model_type": "gpt2", **_GPT2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "opt": {
        "model_type": "opt",
        "vocab_size": 96,
        "hidden_size": 160,
        "word_embed_proj_dim": 160,
        "ffn_dim": 640,
        "num_hidden_layers": 3,
        "num_attention_heads": 5,
        "max_position_embeddings": 512,
    },
    "bloom": {"model_type": "bloom", "vocab_size": 3100, "hidden_size": 192, "n_layer": 3, "n_head": 6},
    "gpt_neox": {
        "model_type": "gpt_neox",
        "vocab_size": 88,
        "hidden_size": 160,
        "intermediate_size": 640,
        "num_hidden_layers": 4,
        "num_attention_heads": 5,
        "max_position_embeddings": 512,
    },
    "gpt_neo": {
        "model_type": "gpt_neo",
        "vocab_size": 3011,
        "hidden_size": 192,
        "num_layers": 4,
        "attention_types": [[["global", "local"], 2]],
        "num_heads": 6,
        "max_position_embeddings": 512,
        "window_size": 64,
    },
    "codegen": {
        "model_type": "codegen",
        "vocab_size": 700,
        "n_embd": 192,
        "n_layer": 3,
        "n_head": 4,
        "rotary_dim": 16,
        "n_positions": 512,
    },
    "gpt_bigcode": {
        "model_type": "gpt_bigcode",
        "vocab_size": 72,
        "n_embd": 160,
        "n_layer": 3,
        "n_head": 5,
        "n_positions": 512,
    },
    "biogpt": {
        "model_type": "biogpt",
        "vocab_size": 2990,
        "hidden_size": 160,
        "intermediate_size": 600,
        "num_hidden_layers": 3,
        "num_attention_heads": 5,
        "max_position_embeddings": 512,
    },
    "llama": {"model_type": "llama", **_LLAMA},
    "llama-tied": {"model_type": "llama", **_LLAMA, "tie_word_embeddings": True},
    "mistral": {
        "model_type": "mistral",
        **_LLAMA,
        "vocab_size": 80,
        "num_key_value_heads": 3,
        "intermediate_size": 500,
        "sliding_window": None,
    },
    "mistral-window": {
        "model_type": "mistral",
        **_LLAMA,
        "num_key_value_heads": 3,
        "intermediate_size": 500,
        "sliding_window": 48,
    },
    "qwen2": {"model_type": "qwen2", **_LLAMA, "intermediate_size": 600},
    "qwen3": {"model_type": "qwen3", **_LLAMA, "vocab_size": 800, "head_dim": 48, "intermediate_size": 560},
    "gemma2": {
        "model_type": "gemma2",
        **_LLAMA,
        "head_dim": 48,
        "intermediate_size": 700,
        "num_hidden_layers": 2,
        "sliding_window": 64,
        "tie_word_embeddings": True,
    },
    "gemma3_text": {
        "model_type": "gemma3_text",
        **_LLAMA,
        "head_dim": 40,
        "intermediate_size": 660,
        "num_hidden_layers": 4,
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
        "tie_word_embeddings": True,
    },
    "falcon": {
        "model_type": "falcon",
        "vocab_size": 104,
        "hidden_size": 192,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "multi_query": True,
        "parallel_attn": True,
        "bias": False,
        "alibi": False,
    },
    "stablelm": {"model_type": "stablelm", **_LLAMA, "num_key_value_heads": 6, "partial_rotary_factor": 0.25},
    "phi": {
        "model_type": "phi",
        "vocab_size": 120,
        "hidden_size": 192,
        "intermediate_size": 700,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "partial_rotary_factor": 0.5,
        "max_position_embeddings": 512,
    },
    "mixtral": {"model_type": "mixtral", **_MIXTRAL, "experts_implementation": "grouped_mm"},
    "mixtral-batched": {"model_type": "mixtral", **_MIXTRAL, "experts_implementation": "batched_mm", "intermediate_size": 64},
    "mixtral-loop": {"model_type": "mixtral", **_MIXTRAL, "experts_implementation": "eager"},
    "mixtral-loop-all": {"model_type": "mixtral", **_MIXTRAL, "experts_implementation": "eager", "num_experts_per_tok": 4},
    "qwen2_moe": {"model_type": "qwen2_moe", **_QWEN2_MOE, "experts_implementation": "grouped_mm"},
    "qwen2_moe-loop": {"model_type": "qwen2_moe", **_QWEN2_MOE, "experts_implementation": "eager"},
    "deepseek_v3": {"model_type": "deepseek_v3", **_DEEPSEEK_V3, "experts_implementation": "grouped_mm"},
    "deepseek_v3-loop": {"model_type": "deepseek_v3", **_DEEPSEEK_V3, "vocab_size": 136, "experts_implementation": "eager"},
    "olmo2": {"model_type": "olmo2", **_LLAMA},
    "granite": {"model_type": "granite", **_LLAMA},
    "starcoder2": {"model_type": "starcoder2", **_LLAMA, "vocab_size": 112, "sliding_window": None},
}

# Example files of the repository, and the configuration fields that make them small.
FILES: dict[str, tuple[str, dict[str, str]]] = {
    "examples/gpt.py": (
        "examples/gpt.py",
        {"n_layer": "3", "n_embd": "192", "n_head": "6", "vocab_size": "3000", "block_size": "512"},
    ),
    "examples/gpt.py-dropout": (
        "examples/gpt.py",
        {"n_layer": "2", "n_embd": "160", "n_head": "5", "vocab_size": "90", "block_size": "512", "dropout": "0.1"},
    ),
    "examples/llama.py": (
        "examples/llama.py",
        {
            "n_layers": "3",
            "dim": "192",
            "n_heads": "6",
            "n_kv_heads": "2",
            "hidden_dim": "500",
            "vocab_size": "3000",
            "max_seq_len": "512",
        },
    ),
}

# Modules that LoRA adapts, by model type; the others have q_proj and v_proj.
LORA_TARGETS: dict[str, tuple[str, ...]] = {
    "gpt2": ("c_attn",),
    "gpt_bigcode": ("c_attn",),
    "bloom": ("query_key_value",),
    "gpt_neox": ("query_key_value",),
    "falcon": ("query_key_value",),
    "codegen": ("qkv_proj",),
    "deepseek_v3": ("q_b_proj", "kv_b_proj"),
    "examples/gpt.py": ("qkv",),
    "examples/gpt.py-dropout": ("qkv", "proj"),
    "examples/llama.py": ("wq", "wv"),
}

# Loops over the experts that got tokens: what they take depends on the routing. These run with a balanced load by construction,
# and once more, as "-routed", as the random router decides. In "mixtral-loop-all" every token visits every expert.
LOOPS = ("mixtral-loop", "qwen2_moe-loop", "deepseek_v3-loop")
for name in LOOPS:
    CONFIGS[f"{name}-routed"] = CONFIGS[name]

EAGER_ONLY = ("bloom", "gpt_neo", "gemma2")  # transformers has no sdpa attention for them: "plain" is eager already
WITH_DROPOUT = ("gpt2", "opt", "biogpt", "gpt_bigcode", "examples/gpt.py-dropout")  # dropout above 0 in the configuration

# (batch, sequence length) of a model's cases. Long ones with a small vocabulary peak in a layer, short ones in the optimizer.
SHAPES: dict[str, tuple[int, int]] = {
    "opt": (2, 256),
    "gpt_neox": (1, 384),
    "gpt_neo": (3, 96),
    "codegen": (2, 20),
    "gpt_bigcode": (2, 256),
    "biogpt": (4, 64),
    "llama-tied": (3, 100),
    "mistral": (2, 256),
    "mistral-window": (2, 192),
    "qwen2": (5, 64),
    "qwen3": (2, 24),
    "gemma2": (2, 100),
    "falcon": (1, 448),
    "stablelm": (3, 128),
    "phi": (2, 256),
    "mixtral-batched": (2, 64),
    "qwen2_moe": (2, 96),
    "qwen2_moe-loop": (2, 96),
    "qwen2_moe-loop-routed": (2, 96),
    "deepseek_v3-loop-routed": (2, 256),
    "deepseek_v3": (3, 64),
    "deepseek_v3-loop": (2, 256),
    "olmo2": (1, 300),
    "granite": (4, 32),
    "starcoder2": (2, 320),
    "examples/gpt.py-dropout": (2, 256),
}
DEFAULT_SHAPE = (2, 128)
