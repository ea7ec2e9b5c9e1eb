"""The first step's direction in float64, and how far another one is from it."""

from __future__ import annotations

import torch
from torch import Tensor

from muon_compile.build.coefficients import schedule
from muon_compile.build.orthogonalize import shape_scale
from muon_compile.config import MuonConfig
from muon_compile.spec import MatrixSpec, matrix_view

MOMENTUM = 0.95


def reference_direction(grad: Tensor, spec: MatrixSpec) -> Tensor:
    """What the first step from zero momentum subtracts per lr, in float64, one whole matrix at a time.

    Written from the formulas and not with the step's own operators; the coefficients and scales are the package's.
    """
    config = spec.config
    assert isinstance(config, MuonConfig)
    g = grad.detach().cpu().double()
    momentum = (1 - MOMENTUM) * g if config.momentum_form == "ema" else g
    u = momentum
    if config.nesterov:
        u = (1 - MOMENTUM) * g + MOMENTUM * momentum if config.momentum_form == "ema" else g + MOMENTUM * momentum
    view = matrix_view(spec, config)
    stacks = []
    for matrix in u.reshape(view.stacks, view.rows, view.cols):
        blocks = [_polynomial(b, config) * shape_scale(config, *b.shape) for b in matrix.split(list(view.blocks))]
        stacks.append(torch.cat(blocks))
    return torch.stack(stacks).reshape(spec.shape)


def _polynomial(u: Tensor, config: MuonConfig) -> Tensor:
    tall = u.shape[0] > u.shape[1]
    x = u.T if tall else u
    norm = float(x.norm())
    if isinstance(config.eps, float):
        norm = norm + config.eps if config.eps_mode == "add" else max(norm, config.eps)
    x = x / norm
    for a, b, c in schedule(config):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if tall else x


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """``||actual - expected|| / ||expected||`` in float64; infinite where that is no number."""
    error = float((actual.cpu().double() - expected).norm() / expected.norm())
    return error if error == error else float("inf")
