"""A small byte-level decoder, with the kinds of parameter that a real one has."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

NUM_BYTES = 256


class Block(nn.Module):
    """Causal attention with a fused qkv weight, then a feed-forward part: `[batch, time, dim]` in and out."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.RMSNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.attention_out = nn.Linear(dim, dim, bias=False)
        self.mlp_norm = nn.RMSNorm(dim)
        self.mlp_in = nn.Linear(dim, 4 * dim)
        self.mlp_out = nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, dim = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, time, 3, self.num_heads, dim // self.num_heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(batch, time, dim))
        return x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))


class ByteTransformer(nn.Module):
    """Bytes `[batch, time]` in, logits of the next byte `[batch, time, 256]` out; the head is not tied."""

    def __init__(self, *, dim: int, num_layers: int, num_heads: int, context: int) -> None:
        super().__init__()
        self.byte_embedding = nn.Embedding(NUM_BYTES, dim)
        self.position_embedding = nn.Embedding(context, dim)
        self.blocks = nn.ModuleList(Block(dim, num_heads) for _ in range(num_layers))
        self.final_norm = nn.RMSNorm(dim)
        self.lm_head = nn.Linear(dim, NUM_BYTES)
        for table in (self.byte_embedding, self.position_embedding):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.byte_embedding(tokens) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.final_norm(x))


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats per byte, a 0-d float32 tensor."""
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
