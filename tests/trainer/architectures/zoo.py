"""Architectures as tiny random models: their configuration classes with sizes that compute in milliseconds."""

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

VOCABULARY = 48
PAD, END = 0, 1
QKVO = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")

SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 48,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "pad_token_id": PAD,
    "eos_token_id": END,
    "bos_token_id": None,
}
HEAD = {"head_dim": 16}
GPT = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 256, "n_inner": 48}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
DELTA = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
}
LATENT = {
    "kv_lora_rank": 12,
    "q_lora_rank": 12,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": 2,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
}
MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_chunk_size": 8,
    "mamba_d_ssm": 64,
    "head_dim": 16,
}


@dataclass(frozen=True)
class Architecture:
    """A model type of transformers at a tiny size.

    Attributes:
        changes: to `SHAPE`.
        targets: sets of target modules to try.
    """

    model_type: str
    changes: dict[str, Any] = field(default_factory=dict)
    targets: tuple[tuple[str, ...], ...] = (QKVO + MLP,)

    def config(self) -> PretrainedConfig:
        return CONFIG_MAPPING[self.model_type](**(SHAPE | self.changes))

    def model(self) -> PreTrainedModel:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(self.config())
        return model.eval()


ARCHITECTURES = {
    "Llama": Architecture("llama", HEAD),
    "Qwen2": Architecture("qwen2", {"tie_word_embeddings": True}),
    "Qwen3": Architecture("qwen3", HEAD),
    "Qwen2-MoE": Architecture(
        "qwen2_moe",
        EXPERTS | {"shared_expert_intermediate_size": 24, "num_experts": 4},
        (QKVO, QKVO + MLP, ("gate_proj",)),
    ),
    "Qwen3-MoE": Architecture("qwen3_moe", EXPERTS | HEAD | {"mlp_only_layers": [0]}, (QKVO, QKVO + MLP)),
    "Qwen3-Next": Architecture(
        "qwen3_next",
        EXPERTS | HEAD | DELTA | {"shared_expert_intermediate_size": 24},
        (QKVO, QKVO + MLP, ("in_proj_qkvz", "out_proj")),
    ),
    "Qwen3.5": Architecture("qwen3_5_text", HEAD | DELTA, (QKVO + MLP,)),
    "Mistral": Architecture("mistral", HEAD | {"sliding_window": 4}),
    "Mixtral": Architecture("mixtral", EXPERTS | HEAD, (QKVO,)),
    "Ministral 3": Architecture(
        "ministral3",
        HEAD
        | {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "max_position_embeddings": 256,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "llama_4_scaling_beta": 0.1,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            }
        },
    ),
    "Gemma": Architecture("gemma", HEAD),
    "Gemma 2": Architecture(
        "gemma2",
        HEAD
        | {
            "sliding_window": 4,
            "query_pre_attn_scalar": 16,
            "layer_types": ["sliding_attention", "full_attention"],
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "Gemma 3": Architecture(
        "gemma3_text",
        HEAD
        | {"sliding_window": 4, "query_pre_attn_scalar": 16, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "Gemma 3n": Architecture(
        "gemma3n_text",
        HEAD
        | {
            "intermediate_size": [48, 48],
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention"],
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 48,
            "laurel_rank": 8,
            "num_kv_shared_layers": 0,
            "activation_sparsity_pattern": [0.0, 0.0],
        },
    ),
    "Gemma 4": Architecture(
        "gemma4_text",
        HEAD
        | {
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention"],
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 48,
        },
    ),
    "Phi": Architecture("phi", {"num_key_value_heads": 2}, (("q_proj", "k_proj", "v_proj", "dense", "fc1", "fc2"),)),
    "Phi-3": Architecture("phi3", {}, (("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),)),
    "Phi-MoE": Architecture("phimoe", EXPERTS, (QKVO,)),
    "Falcon": Architecture(
        "falcon",
        {"num_kv_heads": 1, "alibi": False},
        (("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),),
    ),
    "Falcon with ALiBi": Architecture("falcon", {"num_kv_heads": 1, "alibi": True}, (("query_key_value", "dense"),)),
    "Falcon-H1": Architecture("falcon_h1", MAMBA2, (QKVO + MLP,)),
    "OLMo": Architecture("olmo", {}),
    "OLMo 2": Architecture("olmo2", {}),
    "OLMo 3": Architecture("olmo3", {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}),
    "OLMoE": Architecture("olmoe", EXPERTS | {"num_key_value_heads": 2}, (QKVO,)),
    "StarCoder2": Architecture("starcoder2", {}, ((*QKVO, "c_fc", "c_proj"),)),
    "GPT-2": Architecture("gpt2", GPT, (("c_attn", "c_proj", "c_fc"),)),
    "GPT-BigCode": Architecture("gpt_bigcode", GPT | {"num_key_value_heads": 1}, (("c_attn", "c_proj", "c_fc"),)),
    "GPT-Neo": Architecture(
        "gpt_neo",
        {"num_layers": 2, "num_heads": 2, "attention_types": [[["global", "local"], 1]], "window_size": 4},
        (("q_proj", "k_proj", "v_proj", "out_proj", "c_fc", "c_proj"),),
    ),
    "GPT-NeoX": Architecture("gpt_neox", {}, (("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),)),
    "GPT-J": Architecture(
        "gptj", GPT | {"rotary_dim": 8}, (("q_proj", "k_proj", "v_proj", "out_proj", "fc_in", "fc_out"),)
    ),
    "GPT-OSS": Architecture(
        "gpt_oss",
        EXPERTS
        | HEAD
        | {
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
        (QKVO,),
    ),
    "CodeGen": Architecture(
        "codegen",
        GPT | {"n_head": 4, "num_attention_heads": 4, "rotary_dim": 4},
        (("qkv_proj", "out_proj", "fc_in", "fc_out"),),
    ),
    "BLOOM": Architecture(
        "bloom", {"n_layer": 2, "n_head": 2}, (("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),)
    ),
    "OPT": Architecture(
        "opt",
        {"ffn_dim": 48, "word_embed_proj_dim": 32, "init_std": 0.2},
        (("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"),),
    ),
    "MPT": Architecture(
        "mpt",
        {"d_model": 32, "n_heads": 2, "n_layers": 2, "max_seq_len": 256},
        (("Wqkv", "out_proj", "up_proj", "down_proj"),),
    ),
    "Granite": Architecture("granite", {"logits_scaling": 4.0, "attention_multiplier": 0.2}),
    "Granite-MoE": Architecture("granitemoe", EXPERTS, (QKVO,)),
    "Granite 4": Architecture(
        "granitemoehybrid",
        EXPERTS | MAMBA2 | {"layer_types": ["linear_attention", "full_attention"], "shared_intermediate_size": 24},
        (QKVO,),
    ),
    "SmolLM3": Architecture("smollm3", {"no_rope_layers": [1, 0]}),
    "GLM": Architecture("glm", HEAD, ((*QKVO, "gate_up_proj", "down_proj"),)),
    "GLM-4": Architecture("glm4", HEAD, ((*QKVO, "gate_up_proj", "down_proj"),)),
    "GLM-4-MoE": Architecture("glm4_moe", HEAD | LATENT | {"num_key_value_heads": 1}, (QKVO, QKVO + MLP)),
    "LFM2": Architecture(
        "lfm2",
        {"layer_types": ["conv", "full_attention"], "block_multiple_of": 8},
        (("q_proj", "k_proj", "v_proj", "out_proj", "w1", "w2", "w3", "in_proj"),),
    ),
    "StableLM": Architecture("stablelm", {}),
    "Cohere": Architecture("cohere", {"logit_scale": 0.0625}),
    "Cohere 2": Architecture(
        "cohere2",
        HEAD | {"logit_scale": 0.25, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "DeepSeek-V2": Architecture(
        "deepseek_v2", LATENT, (("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"), MLP)
    ),
    "DeepSeek-V3": Architecture(
        "deepseek_v3",
        LATENT,
        (("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"), MLP, ("gate_proj",)),
    ),
    "Llama 4": Architecture(
        "llama4_text",
        EXPERTS
        | HEAD
        | {
            "intermediate_size_mlp": 48,
            "attention_chunk_size": 8,
            "no_rope_layers": [1, 0],
            "moe_layers": [1],
            "layer_types": ["chunked_attention", "full_attention"],
        },
        (QKVO + MLP,),
    ),
    "MiniMax": Architecture(
        "minimax",
        EXPERTS | HEAD | {"layer_types": ["linear_attention", "full_attention"], "block_size": 8},
        (QKVO, ("qkv_proj", "out_proj")),
    ),
    "MiniMax-M2": Architecture("minimax_m2", EXPERTS | HEAD, (QKVO,)),
    "Mamba": Architecture(
        "mamba",
        {"state_size": 4, "time_step_rank": 4, "intermediate_size": 64},
        (("in_proj", "x_proj", "out_proj"), ("in_proj", "x_proj")),
    ),
    "Mamba 2": Architecture(
        "mamba2",
        {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 8},
        (("in_proj", "out_proj"), ("in_proj",)),
    ),
    "Jamba": Architecture(
        "jamba",
        EXPERTS
        | {
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "mamba_d_state": 4,
            "mamba_dt_rank": 4,
            "use_mamba_kernels": False,
        },
        (QKVO, ("in_proj",)),
    ),
    "Bamba": Architecture("bamba", MAMBA2 | {"attn_layer_indices": [1]}, (QKVO + MLP,)),
    "Zamba2": Architecture(
        "zamba2",
        {
            "num_hidden_layers": 3,
            "mamba_d_state": 8,
            "mamba_ngroups": 1,
            "n_mamba_heads": 8,
            "mamba_headdim": 8,
            "chunk_size": 8,
            "num_key_value_heads": 2,
            "attention_head_dim": 32,
            "adapter_rank": 4,
            "num_query_groups": 2,
            "layers_block_type": ["linear_attention", "hybrid", "linear_attention"],
        },
        (QKVO, ("in_proj",)),
    ),
    "Nemotron": Architecture("nemotron", HEAD, ((*QKVO, "up_proj", "down_proj"),)),
    "Nemotron-H": Architecture(
        "nemotron_h",
        HEAD
        | {
            "layers_block_type": ["linear_attention", "full_attention", "mlp"],
            "ssm_state_size": 8,
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "n_groups": 2,
            "chunk_size": 8,
        },
        ((*QKVO, "up_proj", "down_proj"),),
    ),
    "EXAONE 4": Architecture("exaone4", {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}),
    "ERNIE 4.5": Architecture("ernie4_5", HEAD),
    "Hunyuan": Architecture("hunyuan_v1_dense", HEAD),
    "Helium": Architecture("helium", HEAD),
    "Apertus": Architecture(
        "apertus", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, ((*QKVO, "up_proj", "down_proj"),)
    ),
    "Arcee": Architecture("arcee", HEAD, ((*QKVO, "up_proj", "down_proj"),)),
    "Seed-OSS": Architecture("seed_oss", HEAD),
    "nanochat": Architecture("nanochat", {"final_logit_softcapping": 3.0}, ((*QKVO, "fc1", "fc2"),)),
    "BitNet": Architecture("bitnet", {}),
    "Persimmon": Architecture("persimmon", {}, (("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),)),
    "XGLM": Architecture(
        "xglm",
        {"d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 2, "init_std": 0.2, "dropout": 0.0},
        (("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"),),
    ),
    "RecurrentGemma": Architecture(
        "recurrent_gemma",
        {"lru_width": 32, "attention_window_size": 8, "head_dim": 16, "num_hidden_layers": 3},
        (QKVO,),
    ),
    "RWKV": Architecture(
        "rwkv", {"attention_hidden_size": 32, "context_length": 256}, (("key", "value", "receptance", "output"),)
    ),
}
