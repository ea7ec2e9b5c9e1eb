"""A mixture-of-experts decoder over bytes: grouped attention, shared and routed experts, a load-balancing loss."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CONFIGS = Path(__file__).parent / "configs"
ROPE_BASE = 10_000.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig:
    """A model's sizes, and how it is trained; one JSON file each in `configs/`.

    Args:
        vocab_size: Rows of the embedding and of the head; bytes need 256.
        dim: Width of the residual stream.
        num_layers: Blocks, the first `num_dense_layers` of which have no experts.
        num_heads: Query heads; `num_kv_heads` share keys and values among them.
        dense_dim: Inner width of blocks without experts.
        num_experts: Routed experts per block, of which each token visits `num_active`.
        num_shared: Experts that every token visits.
        expert_dim: Inner width of one expert.
        balance: Weight of the load-balancing loss.
        context: Bytes per window.
        batch: Windows per step, over all ranks.
        lr, adamw_lr, weight_decay, momentum: Of Muon, and AdamW's own rate.
        warm_up: Steps of linear warm-up.
    """

    vocab_size: int
    dim: int
    num_layers: int
    num_dense_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dense_dim: int
    num_experts: int
    num_active: int
    num_shared: int
    expert_dim: int
    balance: float
    context: int
    batch: int
    lr: float
    adamw_lr: float
    weight_decay: float
    momentum: float
    warm_up: int

    @classmethod
    def named(cls, name: str) -> MoeConfig:
        """The configuration of a file in `configs/`."""
        path = CONFIGS / f"{name}.json"
        if not path.is_file():
            raise ValueError(f"expected one of {names()}, got {name!r}")
        return cls(**json.loads(path.read_text(encoding="utf-8")))


def names() -> list[str]:
    """Names of the configurations, by size of the file's model."""
    order = ("tiny", "study", "small", "1b", "30b-a3b", "100b")
    return sorted((path.stem for path in CONFIGS.glob("*.json")), key=order.index)


class Attention(nn.Module):
    """Causal attention whose query heads share keys and values; queries and keys are normalized."""

    def __init__(self, config: MoeConfig) -> None:
        super().__init__()
        self.shape = (config.num_heads, config.num_kv_heads, config.head_dim)
        heads, shared, width = self.shape
        self.query = nn.Linear(config.dim, heads * width, bias=False)
        self.key = nn.Linear(config.dim, shared * width, bias=False)
        self.value = nn.Linear(config.dim, shared * width, bias=False)
        self.out = nn.Linear(heads * width, config.dim, bias=False)
        self.query_norm, self.key_norm = nn.RMSNorm(width), nn.RMSNorm(width)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        batch, time, _ = x.shape
        heads, shared, width = self.shape
        query = self.query_norm(self.query(x).view(batch, time, heads, width)).transpose(1, 2)
        key = self.key_norm(self.key(x).view(batch, time, shared, width)).transpose(1, 2)
        value = self.value(x).view(batch, time, shared, width).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(
            rotated(query, rotation), rotated(key, rotation), value, is_causal=True, enable_gqa=heads != shared
        )
        return self.out(mixed.transpose(1, 2).reshape(batch, time, heads * width))


def rotation_of(time: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of rotary positions, `[time, width / 2]` each."""
    rates = ROPE_BASE ** (-torch.arange(0, width, 2, device=device, dtype=torch.float32) / width)
    angles = torch.arange(time, device=device, dtype=torch.float32)[:, None] * rates
    return angles.cos(), angles.sin()


def rotated(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = (part.to(x.dtype) for part in rotation)
    one, other = x.chunk(2, dim=-1)
    return torch.cat([one * cos - other * sin, one * sin + other * cos], dim=-1)


class Mlp(nn.Module):
    """Gated feed-forward: dense layers, and the shared experts as one."""

    def __init__(self, dim: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, inner, bias=False)
        self.up = nn.Linear(dim, inner, bias=False)
        self.down = nn.Linear(inner, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """Routed experts as stacks of matrices `[experts, out, in]`, and the router that picks `num_active` per token."""

    def __init__(self, config: MoeConfig) -> None:
        super().__init__()
        experts, dim, inner = config.num_experts, config.dim, config.expert_dim
        self.num_active = config.num_active
        self.router = nn.Linear(dim, experts, bias=False)
        self.gate = nn.Parameter(torch.empty(experts, inner, dim))
        self.up = nn.Parameter(torch.empty(experts, inner, dim))
        self.down = nn.Parameter(torch.empty(experts, dim, inner))
        self.shared = Mlp(dim, config.num_shared * inner) if config.num_shared else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for stack in (self.gate, self.up, self.down):
            nn.init.normal_(stack, std=stack.shape[-1] ** -0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The experts' output, and the load-balancing loss: 1 where experts are as busy as one another.

        The loss is that of each window by itself (DeepSeek-V3, arXiv 2412.19437, equation 17), so it does not depend on
        how ranks divide the batch.
        """
        tokens = x.reshape(-1, x.shape[-1])
        chances = self.router(tokens).float().softmax(dim=-1)
        weights, chosen = chances.topk(self.num_active, dim=-1)
        weights = (weights / weights.sum(dim=-1, keepdim=True)).to(x.dtype)
        count = chances.shape[-1]
        # Tokens sorted by their expert: every expert then works on one run of rows.
        order = chosen.reshape(-1).argsort(stable=True)
        runs = torch.bincount(chosen.reshape(-1), minlength=count)
        rows = order // self.num_active
        pieces = []
        for expert, piece in enumerate(tokens[rows].split(runs.tolist())):
            hidden = F.silu(piece @ self.gate[expert].T) * (piece @ self.up[expert].T)
            pieces.append(hidden @ self.down[expert].T)
        made = torch.cat(pieces) * weights.reshape(-1)[order, None]
        out = torch.zeros_like(tokens).index_add(0, rows, made)
        picked = chosen.view(x.shape[0], -1)
        visits = torch.zeros(x.shape[0], count, device=x.device).scatter_add(1, picked, torch.ones_like(picked).float())
        balance = count * (visits / picked.shape[1] * chances.view(*x.shape[:-1], count).mean(dim=1)).sum(dim=1).mean()
        if self.shared is not None:
            out = out + self.shared(tokens)
        return out.view_as(x), balance


class Block(nn.Module):
    """Attention, then a feed-forward part, each added to what came in."""

    def __init__(self, config: MoeConfig, routed: bool) -> None:
        super().__init__()
        self.attention_norm, self.feed_norm = nn.RMSNorm(config.dim), nn.RMSNorm(config.dim)
        self.attention = Attention(config)
        self.feed: nn.Module = Experts(config) if routed else Mlp(config.dim, config.dense_dim)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x = x + self.attention(self.attention_norm(x), rotation)
        fed = self.feed(self.feed_norm(x))
        out, balance = fed if isinstance(fed, tuple) else (fed, torch.zeros((), device=x.device))
        return x + out, balance


class MoeDecoder(nn.Module):
    """Bytes `[batch, time]` in; logits `[batch, time, vocab]` and the mean load-balancing loss out."""

    def __init__(self, config: MoeConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.blocks = nn.ModuleList(Block(config, i >= config.num_dense_layers) for i in range(config.num_layers))
        self.final_norm = nn.RMSNorm(config.dim)
        self.lm_head = nn.Linear(config.dim, config.vocab_size, bias=False)
        if not self.embedding.weight.is_meta:
            nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        rotation = rotation_of(tokens.shape[1], self.config.head_dim, tokens.device)
        x, balances = self.embedding(tokens), []
        for block in self.blocks:
            x, balance = block(x, rotation)
            balances.append(balance)
        routed = max(1, self.config.num_layers - self.config.num_dense_layers)
        return self.lm_head(self.final_norm(x)), torch.stack(balances).sum() / routed


def losses_of(model: nn.Module, inputs: Tensor, targets: Tensor, balance: float) -> tuple[Tensor, Tensor]:
    """What is trained on, and the cross-entropy alone, in nats per byte; 0-d."""
    logits, load = model(inputs)
    entropy = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
    return entropy + balance * load, entropy


def num_active_parameters(model: MoeDecoder) -> int:
    """Parameters that one token meets, the embedding's table left out: 6 times as many FLOPs per token and step."""
    config = model.config
    total = 0
    for name, param in model.named_parameters():
        if name.startswith("embedding."):
            continue
        routed = ".feed." in name and param.dim() == 3
        total += param.numel() * config.num_active // config.num_experts if routed else param.numel()
    return total
