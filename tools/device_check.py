"""Correctness of the step on one CUDA GPU, and what the host launches per step. Run by tools/device_check.sh.

Exits non-zero at the first figure that misses its bar.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parent))

from _shapes import TEN_SHAPES, make_params

import muon_compile as mc

# Two bfloat16 iterations of one input differ by their roundings: twice the error of either (figures.py parity).
BF16_BAR = 4e-2
ADAMW_BAR = 1e-5


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """Relative Frobenius difference."""
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def parity(device: str) -> dict[str, float]:
    """Worst difference of 20 steps' directions from stock, Muon and AdamW in one graph; some gradients missing."""
    shapes: list[tuple[int, ...]] = [TEN_SHAPES[i % 10] for i in range(40)]
    vectors: list[tuple[int, ...]] = [(64,)] * 8 + [(1000, 64)]
    pairs = [(make_params(shapes, device=device), make_params(vectors, device=device)) for _ in range(2)]
    built = []
    for matrices, rest in pairs:
        built.append(
            (torch.optim.Muon(matrices, lr=1.0, weight_decay=0.0), torch.optim.AdamW(rest, lr=1.0, weight_decay=0.0))
        )
    step = mc.compile_step(*built[0])
    worst = {"muon": 0.0, "adamw": 0.0}
    generator = torch.Generator().manual_seed(3)
    for index in range(20):
        for mine, theirs in zip(pairs[0][0] + pairs[0][1], pairs[1][0] + pairs[1][1], strict=True):
            absent = index >= 15 and bool(torch.rand((), generator=generator) < 0.3)
            grad = torch.randn(mine.shape, generator=generator).to(device)
            for param in (mine, theirs):
                param.data.zero_()
                param.grad = None if absent else grad.clone()
        for optimizers in built:
            for optimizer in optimizers:
                optimizer.step()
        for kind, which in (("muon", 0), ("adamw", 1)):
            for mine, theirs in zip(pairs[0][which], pairs[1][which], strict=True):
                if theirs.grad is None:
                    assert torch.equal(mine, theirs), "a parameter without a gradient moved"
                else:
                    worst[kind] = max(worst[kind], relative(mine.detach(), theirs.detach()))
    assert step.stats.compiles == 2, f"expected 2 compiles (all gradients, some missing), got {step.stats.compiles}"
    return worst


def launches(device: str) -> dict[str, float]:
    """Graph replays and other launches of the host per step, in the steady state, with lr changing every step."""
    params = make_params([TEN_SHAPES[i % 10] for i in range(100)], device=device)
    optimizer = torch.optim.Muon(params)
    mc.compile_step(optimizer)
    steps = 10

    def one(index: int) -> None:
        optimizer.param_groups[0]["lr"] = 1e-3 / (1 + index)
        optimizer.step()

    for index in range(5):  # compile, warm up, record
        one(index)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for index in range(steps):
            one(index)
        torch.cuda.synchronize()
    calls: Counter[str] = Counter(event.name for event in profiler.events())
    replays = sum(n for name, n in calls.items() if name.startswith("cudaGraphLaunch"))
    kernels = sum(n for name, n in calls.items() if name.startswith(("cudaLaunchKernel", "cuLaunchKernel")))
    copies = sum(n for name, n in calls.items() if name.startswith("cudaMemcpy"))
    return {"replays": replays / steps, "stray_kernels": kernels / steps, "copies": copies / steps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("device_check: expected a CUDA GPU and a CUDA build of torch, found none.")
    facts: dict[str, Any] = {"torch": torch.__version__, "gpu": torch.cuda.get_device_name()}
    facts["parity"] = parity(args.device)
    print("parity", facts["parity"], flush=True)
    facts["launches"] = launches(args.device)
    print("launches", facts["launches"], flush=True)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(facts, indent=1), encoding="utf-8")
    missed = []
    if facts["parity"]["muon"] > BF16_BAR or facts["parity"]["adamw"] > ADAMW_BAR:
        missed.append("parity")
    if facts["launches"]["replays"] != 1 or facts["launches"]["stray_kernels"] > 2:
        missed.append("launches")
    if missed:
        sys.exit(f"device_check: missed {missed}")


if __name__ == "__main__":
    main()
