"""What a step would cost at the machine's measured limits: bytes over bandwidth plus FLOPs over the matrix rate."""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from muon_compile.config import MuonConfig
from muon_compile.plan.forms import parse_form
from muon_compile.plan.plan import Plan
from muon_compile.spec import FLOAT_BYTES

TRIAD_BYTES = 256 * 2**20
# Matrices [B, n, n] of about 4 GFLOP a product on a CPU; what is best differs between machines.
CPU_PRODUCTS = ((16, 512), (2, 1024), (1, 1280))
DEVICE_PRODUCTS = ((16, 2048), (2, 4096), (1, 8192))


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Least work of one step.

    Args:
        bytes: Gradient read, momentum read and written, parameter read and written, and, in the products' dtype, X and
            the orthogonalized result each written and read once.
        flops: Of every batch, in the form that the plan chose.
    """

    bytes: int
    flops: int

    def seconds(self, bandwidth: float, rate: float) -> tuple[float, float]:
        """Ideal seconds: one after the other (the sum), and perfectly overlapped (the larger)."""
        move, compute = self.bytes / bandwidth, self.flops / rate
        return move + compute, max(move, compute)


def work_of(plan: Plan) -> Work:
    """Bytes and FLOPs of a step of the plan's Muon parameters."""
    total = 0
    for bucket in plan.buckets:
        if not isinstance(bucket.config, MuonConfig):
            continue
        numel = bucket.size * math.prod(bucket.shape)
        per_element = FLOAT_BYTES[bucket.grad_dtype] + 2 * FLOAT_BYTES[bucket.state_dtype]
        per_element += 2 * FLOAT_BYTES[bucket.dtype] + 4 * FLOAT_BYTES[bucket.config.ns_dtype]
        total += numel * per_element
    return Work(bytes=total, flops=sum(batch.flops for batch in plan.batches))


def standard_flops(shapes: Sequence[tuple[int, ...]]) -> int:
    """FLOPs of five steps of the standard form on every matrix of the shapes, stacks included."""
    form = parse_form("standard", 5)
    return sum(math.prod(shape[:-2]) * form.flops(*shape[-2:]) for shape in shapes)


class Meter:
    """Measures bandwidth and matrix rate while a benchmark runs, so that both meet the same load.

    Args:
        device: ``"cpu"`` or a device type.
        triad_bytes: Size of each of the triad's three tensors.
    """

    def __init__(self, device: str, triad_bytes: int = TRIAD_BYTES) -> None:
        self.device, self.triad_bytes = device, triad_bytes
        self._triad = [torch.ones(triad_bytes // 4, device=device) for _ in range(3)]
        sizes = CPU_PRODUCTS if device == "cpu" else DEVICE_PRODUCTS
        self._products = {
            f"bmm {b}x{n}": torch.randn(b, n, n, device=device).to(torch.bfloat16).mul_(n**-0.5) for b, n in sizes
        }
        self._native = _native_kernel() if device == "cpu" else None
        self.reset()
        self.sample()  # first calls allocate and choose kernels
        self.reset()
        self.sample()

    def reset(self) -> None:
        """Forget what was measured."""
        self._bandwidths: list[float] = []
        self._rates: dict[str, list[float]] = {}

    def sample(self) -> None:
        """Measure everything once."""
        out, a, b = self._triad
        self._bandwidths.append(3 * self.triad_bytes / self._seconds(lambda: torch.add(a, b, alpha=0.5, out=out)))
        for name, x in self._products.items():
            count, n = x.shape[0], x.shape[1]
            flops = 2 * count * n**3
            self._rates.setdefault(name, []).append(flops / self._seconds(lambda x=x: torch.bmm(x, x)))
        if self._native is not None:
            self._rates.setdefault("native kernel", []).append(float(self._native.rate(1024)))

    @property
    def bandwidth(self) -> float:
        """Bytes per second of the triad ``a + b / 2`` over three large tensors; the best seen, as it is a limit."""
        return max(self._bandwidths)

    @property
    def rate(self) -> tuple[float, str]:
        """bfloat16 FLOPs per second, the best seen, and what it was measured with."""
        return max((max(values), name) for name, values in self._rates.items())

    def _seconds(self, call: Any) -> float:
        if self.device != "cpu":
            torch.accelerator.synchronize()
        started = time.perf_counter()
        call()
        if self.device != "cpu":
            torch.accelerator.synchronize()
        return time.perf_counter() - started


def _native_kernel() -> Any:
    """The library's CPU kernel where this version has one and the machine can run it."""
    try:
        module = importlib.import_module("muon_compile.kernels.cpu")
    except ImportError:
        return None
    return module if module.available() else None
