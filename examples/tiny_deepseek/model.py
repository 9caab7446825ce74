"""A tiny DeepSeek-V3 in plain PyTorch: training, greedy decoding and draft chains.

The numerics follow vLLM 0.32.0 (`deepseek_v2.py`, `deepseek_mtp.py`), which serves the
exported checkpoint: MLA with YaRN, interleaved RoPE, sigmoid routing with a selection
bias, and one MTP layer that is fed the *normed* hidden state of the main model, or of
itself when a draft chain goes deeper.
"""

import math
from collections.abc import Callable

import torch
from config import ModelConfig
from torch import Tensor, nn

Rope = tuple[Tensor, Tensor]
# Queries, keys, values -> attention output, all [batch, heads, rows, head dim].
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def compute_rope(config: ModelConfig, positions: Tensor) -> Rope:
    """Returns YaRN's cosines and sines, each [rows, rope dim / 2], float32."""
    dim, base = config.qk_rope_head_dim, config.rope_theta
    freqs = base ** (
        -torch.arange(0, dim, 2, dtype=torch.float, device=positions.device) / dim
    )

    def find_dim(num_rotations: int) -> float:
        length = config.rope_original_max_position / (num_rotations * 2 * math.pi)
        return dim * math.log(length) / (2 * math.log(base))

    low = max(math.floor(find_dim(config.rope_beta_fast)), 0)
    high = min(math.ceil(find_dim(config.rope_beta_slow)), dim - 1)
    ramp = torch.arange(dim // 2, dtype=torch.float, device=positions.device)
    ramp = ((ramp - low) / (high - low)).clamp(0, 1)
    freqs = freqs / config.rope_factor * ramp + freqs * (1 - ramp)
    angles = positions.float()[:, None] * freqs
    return angles.cos(), angles.sin()


def rotate_interleaved(x: Tensor, rope: Rope) -> Tensor:
    """Rotates neighbouring pairs (GPT-J style), as DeepSeek does."""
    cos, sin = rope
    even, odd = x[..., 0::2], x[..., 1::2]
    pairs = (even * cos - odd * sin, odd * cos + even * sin)
    return torch.stack(pairs, dim=-1).flatten(-2).to(x.dtype)


class RMSNorm(nn.Module):
    """Root-mean-square normalisation with a learnt scale."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalises the last dimension."""
        return nn.functional.rms_norm(
            x, self.weight.shape, self.weight.to(x.dtype), self.eps
        )


def linear(num_inputs: int, num_outputs: int) -> nn.Linear:
    """Returns a linear layer without bias."""
    return nn.Linear(num_inputs, num_outputs, bias=False)


class Attention(nn.Module):
    """Multi-head latent attention in its unabsorbed form."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        heads, nope = config.num_attention_heads, config.qk_nope_head_dim
        rope, rank = config.qk_rope_head_dim, config.kv_lora_rank
        self.q_a_proj = linear(config.hidden_size, config.q_lora_rank)
        self.q_a_layernorm = RMSNorm(config.q_lora_rank, config.rms_norm_eps)
        self.q_b_proj = linear(config.q_lora_rank, heads * (nope + rope))
        self.kv_a_proj_with_mqa = linear(config.hidden_size, rank + rope)
        self.kv_a_layernorm = RMSNorm(rank, config.rms_norm_eps)
        self.kv_b_proj = linear(rank, heads * (nope + config.v_head_dim))
        self.o_proj = linear(heads * config.v_head_dim, config.hidden_size)
        mscale = 0.1 * config.rope_mscale * math.log(config.rope_factor) + 1.0
        # Scaled dot products divide by sqrt(head dim); YaRN multiplies by mscale^2.
        self.q_scale = mscale * mscale

    def forward(self, x: Tensor, rope: Rope, attend: Attend) -> Tensor:
        """Maps [batch, rows, hidden] to the same shape."""
        config, (batch, rows, _) = self.config, x.shape
        heads, nope = config.num_attention_heads, config.qk_nope_head_dim
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q = q.view(batch, rows, heads, -1).transpose(1, 2)
        q_nope, q_pe = q.split([nope, config.qk_rope_head_dim], dim=-1)
        latent, k_pe = self.kv_a_proj_with_mqa(x).split(
            [config.kv_lora_rank, config.qk_rope_head_dim], dim=-1
        )
        kv = self.kv_b_proj(self.kv_a_layernorm(latent))
        kv = kv.view(batch, rows, heads, -1).transpose(1, 2)
        k_nope, v = kv.split([nope, config.v_head_dim], dim=-1)
        k_pe = rotate_interleaved(k_pe[:, None], rope).expand(-1, heads, -1, -1)
        q = torch.cat([q_nope, rotate_interleaved(q_pe, rope)], dim=-1)
        k = torch.cat([k_nope, k_pe], dim=-1)
        out = attend(q * self.q_scale, k, v)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Gated SiLU feed-forward block."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = linear(hidden_size, intermediate_size)
        self.up_proj = linear(hidden_size, intermediate_size)
        self.down_proj = linear(intermediate_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """Maps [..., hidden] to the same shape."""
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class MoE(nn.Module):
    """Group-limited top-k experts with a selection bias, and a shared expert.

    All experts run on all tokens and unselected ones get weight zero: at this size
    that is faster than gathering.
    """

    load: Tensor
    bias: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        num, hidden = config.n_routed_experts, config.hidden_size
        inner = config.moe_intermediate_size
        self.gate = linear(hidden, num)
        self.gate_up = nn.Parameter(torch.empty(num, 2, inner, hidden))
        self.down = nn.Parameter(torch.empty(hidden, num, inner))
        self.shared_experts = MLP(hidden, inner * config.n_shared_experts)
        # `e_score_correction_bias`: picks experts, never weighs them.
        self.register_buffer("bias", torch.zeros(num))
        self.register_buffer("load", torch.zeros(num), persistent=False)

    def compute_weights(self, x: Tensor) -> Tensor:
        """Returns [..., experts], float32: zero for experts that are not selected."""
        config = self.config
        scores = self.gate(x).float().sigmoid()
        biased = (scores.detach() + self.bias).unflatten(-1, (config.n_group, -1))
        group_scores = biased.topk(2, dim=-1).values.sum(-1)
        groups = group_scores.topk(config.topk_group, dim=-1).indices
        kept = torch.zeros_like(group_scores).scatter_(-1, groups, 1.0)
        biased = biased.masked_fill(kept.unsqueeze(-1) == 0, -math.inf).flatten(-2)
        chosen = biased.topk(config.num_experts_per_tok, dim=-1).indices
        mask = torch.zeros_like(scores).scatter_(-1, chosen, 1.0)
        if self.training:
            self.load += mask.flatten(0, -2).sum(0)
        weights = scores * mask
        weights = weights / weights.sum(-1, keepdim=True)
        return weights * config.routed_scaling_factor

    def forward(self, x: Tensor) -> Tensor:
        """Maps [..., hidden] to the same shape."""
        weights = self.compute_weights(x)
        gate, up = (
            nn.functional.linear(x, self.gate_up.flatten(0, 2))
            .unflatten(-1, self.gate_up.shape[:3])
            .unbind(-2)
        )
        inner = nn.functional.silu(gate) * up * weights.unsqueeze(-1).to(gate.dtype)
        routed = nn.functional.linear(inner.flatten(-2), self.down.flatten(1))
        return routed + self.shared_experts(x)

    @torch.no_grad()
    def update_bias(self, rate: float) -> None:
        """Nudges the selection bias towards even load (no auxiliary loss)."""
        self.bias += rate * (self.load.mean() - self.load).sign()
        self.load.zero_()


class DecoderLayer(nn.Module):
    """Pre-norm transformer layer."""

    def __init__(self, config: ModelConfig, index: int, dropout: float) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.dropout = nn.Dropout(dropout)
        self.input_layernorm = RMSNorm(size, eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp: nn.Module = (
            MLP(size, config.intermediate_size)
            if index < config.first_k_dense_replace
            else MoE(config)
        )

    def forward(self, x: Tensor, rope: Rope, attend: Attend) -> Tensor:
        """Maps [batch, rows, hidden] to the same shape."""
        attended = self.self_attn(self.input_layernorm(x), rope, attend)
        x = x + self.dropout(attended)
        return x + self.dropout(self.mlp(self.post_attention_layernorm(x)))


class MTPLayer(DecoderLayer):
    """The multi-token-prediction layer; embedding and head are the main model's."""

    def __init__(self, config: ModelConfig, index: int, dropout: float) -> None:
        super().__init__(config, index, dropout)
        size, eps = config.hidden_size, config.rms_norm_eps
        self.enorm = RMSNorm(size, eps)
        self.hnorm = RMSNorm(size, eps)
        self.eh_proj = linear(2 * size, size)
        self.shared_head_norm = RMSNorm(size, eps)

    def predict(
        self,
        embeds: Tensor,
        positions: Tensor,
        hidden: Tensor,
        rope: Rope,
        attend: Attend,
    ) -> Tensor:
        """Runs one draft depth.

        Args:
            embeds: [batch, rows, hidden], the embedded *next* tokens.
            positions: [rows], the positions of the rows, not of the next tokens.
            hidden: [batch, rows, hidden], normed hidden states of the step before.
            rope: Cosines and sines of `positions`.
            attend: The attention over this layer's keys and values.

        Returns:
            [batch, rows, hidden], normed: input of the head and of the next depth.
        """
        embeds = embeds.masked_fill((positions == 0)[:, None], 0)
        mixed = torch.cat([self.enorm(embeds), self.hnorm(hidden)], dim=-1)
        return self.shared_head_norm(self(self.eh_proj(mixed), rope, attend))


def attend_causally(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention over rows that all belong to this call."""
    return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


class CachedAttend:
    """Attention of a growing sequence: keeps the keys and values of past calls."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Appends k and v; q must be a first prompt or a single row."""
        first = not self.keys
        self.keys, self.values = [*self.keys, k], [*self.values, v]
        self.keys = [torch.cat(self.keys, dim=2)]
        self.values = [torch.cat(self.values, dim=2)]
        return nn.functional.scaled_dot_product_attention(
            q, self.keys[0], self.values[0], is_causal=first
        )


class TinyDeepseek(nn.Module):
    """The main model and its MTP layer."""

    def __init__(self, config: ModelConfig, dropout: float = 0.0) -> None:
        super().__init__()
        self.config = config
        size = config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, size)
        self.layers = nn.ModuleList(
            DecoderLayer(config, index, dropout)
            for index in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(size, config.rms_norm_eps)
        self.lm_head = linear(size, config.vocab_size)
        self.mtp = MTPLayer(config, config.num_hidden_layers, dropout)
        self.apply_init()

    @torch.no_grad()
    def apply_init(self) -> None:
        """Draws fresh weights from torch's default generator."""
        depth_scale = (2 * self.config.num_hidden_layers) ** -0.5
        for name, weight in self.named_parameters():
            if weight.ndim == 1:
                continue
            std = 0.05 if "embed" in name else 0.7 * weight.shape[-1] ** -0.5
            if "o_proj" in name or "down" in name:
                std = 0.7 * weight[0].numel() ** -0.5 * depth_scale
            weight.normal_(std=std)

    def moe_layers(self) -> list[MoE]:
        """Returns the expert blocks, those of the MTP layer included."""
        return [module for module in self.modules() if isinstance(module, MoE)]

    def forward(
        self, ids: Tensor, start: int = 0, attends: list[Attend] | None = None
    ) -> Tensor:
        """Returns normed hidden states [batch, rows, hidden] of the main model.

        Args:
            ids: [batch, rows], token ids at positions `start` and on.
            start: Position of the first row.
            attends: One attention for each layer; causal over `ids` by default.
        """
        positions = torch.arange(start, start + ids.shape[1], device=ids.device)
        rope = compute_rope(self.config, positions)
        x = self.embed_tokens(ids)
        for index, layer in enumerate(self.layers):
            x = layer(x, rope, attends[index] if attends else attend_causally)
        return self.norm(x)

    def draft(
        self,
        position: int,
        next_ids: Tensor,
        hidden: Tensor,
        attend: Attend,
    ) -> Tensor:
        """Runs the MTP layer at one depth for a range of origins at once.

        Origin P is the last position with a true hidden state. Depth 0 holds position
        P and the token P + 1; depth d holds position P + d and the token P + d + 1.

        Args:
            position: Position of the first row: the first origin plus the depth.
            next_ids: [batch, rows], the tokens that this depth is given.
            hidden: [batch, rows, hidden], normed: the main model's at depth 0, else
                the result of the depth before.
            attend: See `unroll.UnrolledAttend`.

        Returns:
            [batch, rows, hidden], normed: input of the head and of the next depth.
        """
        rows = next_ids.shape[1]
        positions = torch.arange(position, position + rows, device=hidden.device)
        rope = compute_rope(self.config, positions)
        embeds = self.embed_tokens(next_ids)
        return self.mtp.predict(embeds, positions, hidden, rope, attend)
