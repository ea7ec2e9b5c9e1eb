"""Named sets of matrix shapes, and parameters of them."""

from __future__ import annotations

import torch

Shape = tuple[int, ...]
Params = list[torch.nn.Parameter]

TEN_SHAPES = [
    (48, 64),
    (64, 64),
    (64, 128),
    (128, 64),
    (96, 128),
    (128, 128),
    (128, 256),
    (256, 128),
    (192, 256),
    (256, 256),
]

# GPT-2 small, 4 of its 12 layers: n_embd 768; c_attn, attn.c_proj, mlp.c_fc, mlp.c_proj as torch.nn.Linear lays them.
# Source: openai/gpt-2 124M hparams.json; Radford et al., 2019.
_GPT2_LAYER: list[Shape] = [(2304, 768), (768, 768), (3072, 768), (768, 3072)]

# Llama-3.2-1B, 1 of its 16 layers: hidden_size 2048, 8 key-value heads of 64, intermediate_size 8192; q, k, v, o, gate,
# up, down. Source: meta-llama/Llama-3.2-1B config.json.
_LLAMA_LAYER: list[Shape] = [(2048, 2048), (512, 2048), (512, 2048), (2048, 2048), *[(8192, 2048)] * 2, (2048, 8192)]

# Qwen3-30B-A3B, 1 of its 48 layers with 8 of its 128 experts: hidden_size 2048, 32 heads of 128, 4 key-value heads,
# moe_intermediate_size 768; q, k, v, o, then gate, up, down of the experts. Source: Qwen/Qwen3-30B-A3B config.json.
_QWEN_LAYER: list[Shape] = [
    *[(4096, 2048), (512, 2048), (512, 2048), (2048, 4096)],
    *[(8, 768, 2048), (8, 768, 2048), (8, 2048, 768)],
]

SHAPE_SETS: dict[str, list[Shape]] = {
    "tiny": [(64, 64)] * 200,
    "thin": [(24, 10240)] * 74,
    "experts-thin": [(32, 24, 10240)] * 2,
    "wide": [(256, 4096)] * 12,
    "mlp": [(3072, 768)] * 6,
    "square": [(768, 768)] * 12,
    "big": [(1024, 4096)] * 2,
    "ten-shapes": [shape for shape in TEN_SHAPES for _ in range(30)],
    "gpt2-small": _GPT2_LAYER * 4,
    "llama-1b": _LLAMA_LAYER,
    "qwen3-moe": _QWEN_LAYER,
}

# Too small to say anything about speed: what the tests of the tools run.
SMOKE_SETS: dict[str, list[Shape]] = {"smoke": [(16, 32)] * 3 + [(2, 16, 24)]}


def make_params(shapes: list[Shape], seed: int = 0, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Params:
    """Parameters of the shapes with a Gaussian gradient each."""
    generator = torch.Generator().manual_seed(seed)
    params = []
    for shape in shapes:
        param = torch.nn.Parameter((torch.randn(shape, generator=generator) * 0.02).to(device, dtype))
        param.grad = torch.randn(shape, generator=generator).to(device, dtype)
        params.append(param)
    return params


def copy_params(params: Params, *, split_stacks: bool) -> Params:
    """Parameters with the same values and gradients in memory of their own.

    Args:
        params: Parameters with gradients.
        split_stacks: Make one 2-D parameter of every matrix of a 3-D stack, for optimizers that know no stacks.
    """
    copies = []
    for param in params:
        assert param.grad is not None
        parts = [(param.detach(), param.grad)]
        if split_stacks and param.dim() == 3:
            parts = list(zip(param.detach().unbind(), param.grad.unbind(), strict=True))
        for value, grad in parts:
            copy = torch.nn.Parameter(value.clone())
            copy.grad = grad.clone()
            copies.append(copy)
    return copies


def describe(shapes: list[Shape]) -> str:
    """``200 x [64, 64]``, or the number of shapes where there are several."""
    if len(set(shapes)) == 1:
        return f"{len(shapes)} x {list(shapes[0])}"
    return f"{len(shapes)} in {len(set(shapes))} shapes"
