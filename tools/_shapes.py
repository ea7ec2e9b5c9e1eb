"""Named sets of matrix shapes, and parameters of them."""

from __future__ import annotations

import torch

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

SHAPE_SETS: dict[str, list[tuple[int, ...]]] = {
    "tiny": [(64, 64)] * 200,
    "thin": [(24, 10240)] * 74,
    "experts-thin": [(32, 24, 10240)] * 2,
    "wide": [(256, 4096)] * 12,
    "mlp": [(3072, 768)] * 6,
    "square": [(768, 768)] * 12,
    "big": [(1024, 4096)] * 2,
    "ten-shapes": [shape for shape in TEN_SHAPES for _ in range(30)],
}


def make_params(
    shapes: list[tuple[int, ...]], seed: int = 0, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> list[torch.nn.Parameter]:
    """Parameters of the shapes with a Gaussian gradient each."""
    generator = torch.Generator().manual_seed(seed)
    params = []
    for shape in shapes:
        param = torch.nn.Parameter((torch.randn(shape, generator=generator) * 0.02).to(device, dtype))
        param.grad = torch.randn(shape, generator=generator).to(device, dtype)
        params.append(param)
    return params


def describe(shapes: list[tuple[int, ...]]) -> str:
    """``200 x [64, 64]``, or the number of shapes where there are several."""
    if len(set(shapes)) == 1:
        return f"{len(shapes)} x {list(shapes[0])}"
    return f"{len(shapes)} in {len(set(shapes))} shapes"
