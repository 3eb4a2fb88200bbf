"""The embedded base as a small network of its own for fast training, and its exact export to Qwen2.

Training packs several question-answer branches behind one program: a branch sees the program and itself, not its
siblings, so every answer is learned in the form in which it is asked later.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import Qwen2Config, Qwen2ForCausalLM

from populora_trainer.nano.tokenizer import vocabulary

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_SIZE, INTERMEDIATE = 128, 6, 2, 1, 64, 384
ROPE_THETA, NORM_EPSILON, MAX_POSITIONS = 10_000.0, 1e-6, 512


class Block(nn.Module):
    """One Qwen2 layer with fused query-key-value and gate-up projections."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.Parameter(torch.ones(HIDDEN))
        self.qkv = nn.Linear(HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD_SIZE)
        self.output = nn.Linear(HEADS * HEAD_SIZE, HIDDEN, bias=False)
        self.mlp_norm = nn.Parameter(torch.ones(HIDDEN))
        self.gate_up = nn.Linear(HIDDEN, 2 * INTERMEDIATE, bias=False)
        self.down = nn.Linear(INTERMEDIATE, HIDDEN, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        """x (batch, length, hidden); cos and sin (batch, 1, length, head size); mask (batch, 1, length, length)."""
        batch, length, _ = x.shape
        qkv = self.qkv(functional.rms_norm(x, (HIDDEN,), self.attention_norm, NORM_EPSILON))
        qkv = qkv.view(batch, length, HEADS + 2 * KV_HEADS, HEAD_SIZE).transpose(1, 2)
        rotated = qkv[:, : HEADS + KV_HEADS]
        half = HEAD_SIZE // 2
        turned = torch.cat((-rotated[..., half:], rotated[..., :half]), dim=-1)
        rotated = (rotated * cos + turned * sin).to(qkv.dtype)
        query, key = rotated[:, :HEADS], rotated[:, HEADS:]
        value = qkv[:, HEADS + KV_HEADS :]
        mixed = functional.scaled_dot_product_attention(
            query, key.expand(-1, HEADS, -1, -1), value.expand(-1, HEADS, -1, -1), attn_mask=mask
        )
        x = x + self.output(mixed.transpose(1, 2).reshape(batch, length, HEADS * HEAD_SIZE))
        gate, up = self.gate_up(functional.rms_norm(x, (HIDDEN,), self.mlp_norm, NORM_EPSILON)).chunk(2, dim=-1)
        written: Tensor = self.down(functional.silu(gate) * up)
        return x + written


class NanoNet(nn.Module):
    """A Qwen2 causal language model with tied embeddings, about one million parameters."""

    def __init__(self, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.empty(len(vocabulary()), HIDDEN))
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.Parameter(torch.ones(HIDDEN))
        inverse = ROPE_THETA ** -(torch.arange(0, HEAD_SIZE, 2, dtype=torch.float32) / HEAD_SIZE)
        angles = torch.outer(torch.arange(MAX_POSITIONS, dtype=torch.float32), inverse).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self.reset(generator)

    def reset(self, generator: torch.Generator | None) -> None:
        """Draw the initial weights: normal, fan-in scaled for matrices, zero where a block writes to the residual."""
        with torch.no_grad():
            self.embedding.normal_(0.0, 0.08, generator=generator)
            for name, parameter in self.blocks.named_parameters():
                if name.endswith("bias") or "output" in name or "down" in name:
                    parameter.zero_()
                elif parameter.ndim == 2:
                    parameter.normal_(0.0, parameter.shape[1] ** -0.5, generator=generator)

    def forward(self, ids: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """Hidden states before the tied output matrix.

        Args:
            ids: (batch, length) token ids.
            positions: (batch, length) rotary positions; a branch continues after the shared prefix.
            mask: (batch, length, length) bool, True where the row's token may see the column's token.

        Returns:
            (batch, length, hidden).
        """
        x = functional.embedding(ids, self.embedding)
        cos, sin = self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)  # type: ignore[index]
        bias = torch.zeros(mask.shape, dtype=torch.float32).masked_fill_(~mask, float("-inf")).unsqueeze(1)
        if torch.is_autocast_enabled("cpu"):
            x, cos, sin, bias = x.bfloat16(), cos.bfloat16(), sin.bfloat16(), bias.bfloat16()
        for block in self.blocks:
            x = block(x, cos, sin, bias)
        return functional.rms_norm(x, (HIDDEN,), self.norm, NORM_EPSILON)


def qwen2_config() -> Qwen2Config:
    """The configuration that the exported folder carries."""
    from populora_trainer.nano.tokenizer import build_tokenizer

    tokenizer = build_tokenizer()
    return Qwen2Config(
        vocab_size=len(vocabulary()),
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_SIZE,
        max_position_embeddings=MAX_POSITIONS,
        rms_norm_eps=NORM_EPSILON,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=True,
        use_sliding_window=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def to_qwen2(state: Mapping[str, Tensor]) -> Qwen2ForCausalLM:
    """Return the transformers model with the same weights, float32."""
    target: dict[str, Tensor] = {
        "model.embed_tokens.weight": state["embedding"],
        "lm_head.weight": state["embedding"],
        "model.norm.weight": state["norm"],
    }
    sizes = [HEADS * HEAD_SIZE, KV_HEADS * HEAD_SIZE, KV_HEADS * HEAD_SIZE]
    for layer in range(LAYERS):
        source, prefix = f"blocks.{layer}.", f"model.layers.{layer}."
        for kind in ("weight", "bias"):
            for name, part in zip("qkv", torch.split(state[f"{source}qkv.{kind}"], sizes), strict=True):
                target[f"{prefix}self_attn.{name}_proj.{kind}"] = part
        target[f"{prefix}self_attn.o_proj.weight"] = state[f"{source}output.weight"]
        gate, up = state[f"{source}gate_up.weight"].chunk(2)
        target[f"{prefix}mlp.gate_proj.weight"] = gate
        target[f"{prefix}mlp.up_proj.weight"] = up
        target[f"{prefix}mlp.down_proj.weight"] = state[f"{source}down.weight"]
        target[f"{prefix}input_layernorm.weight"] = state[f"{source}attention_norm"]
        target[f"{prefix}post_attention_layernorm.weight"] = state[f"{source}mlp_norm"]
    model = Qwen2ForCausalLM(qwen2_config())
    model.load_state_dict({name: tensor.detach().clone() for name, tensor in target.items()}, strict=True)
    return model.eval()
