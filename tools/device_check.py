"""Correctness of the step on one CUDA GPU, and what the host launches per step. Run by tools/device_check.sh.

Exits non-zero where a figure misses its bar, after all were printed. ``--device cpu`` runs what needs no GPU.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parent))

from _shapes import TEN_SHAPES, make_params
from figures import error, reference_direction

import muon_compile as mc

# Two bfloat16 iterations of one input differ by their roundings: twice the error of either (figures.py parity).
BF16_BAR = 4e-2
ADAMW_BAR = 1e-5
# Worst relative error of a form against the float64 polynomial on Gaussian matrices. On a CPU they err by 1.6e-2,
# 5e-3 and 2.9e-2 on these shapes; squarer ones are worse with rounded small matrices.
FORM_BARS = {"standard": 4e-2, "gram": 4e-2, "gram_half_restart": 1e-1}
FORM_SHAPES: list[tuple[int, ...]] = [(64, 256), (64, 256), (256, 64), (96, 1024), (128, 512), (512, 2048)]
# bfloat16 keeps 8 bits; a product summed in float32 is rounded once, at the end.
SYMMETRIC_BAR = 1e-2


def parity(device: str, backend: str) -> dict[str, float]:
    """Worst difference of 20 steps' directions from stock, Muon and AdamW in one graph; some gradients missing."""
    shapes: list[tuple[int, ...]] = [TEN_SHAPES[i % 10] for i in range(40)]
    vectors: list[tuple[int, ...]] = [(64,)] * 8 + [(1000, 64)]
    pairs = [(make_params(shapes, device=device), make_params(vectors, device=device)) for _ in range(2)]
    built = []
    for matrices, rest in pairs:
        built.append(
            (torch.optim.Muon(matrices, lr=1.0, weight_decay=0.0), torch.optim.AdamW(rest, lr=1.0, weight_decay=0.0))
        )
    step = mc.compile_step(*built[0], backend=backend)
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
                    worst[kind] = max(worst[kind], error(mine.detach(), theirs.detach()))
    assert step.stats.compiles == 2, f"expected 2 compiles (all gradients, some missing), got {step.stats.compiles}"
    return worst


def forms(device: str, backend: str) -> dict[str, dict[str, Any]]:
    """Per form of the iteration, what ran it and its worst error against the float64 polynomial."""
    found: dict[str, dict[str, Any]] = {}
    for form in FORM_BARS:
        params = make_params(FORM_SHAPES, seed=5, device=device)
        optimizer = torch.optim.Muon(params, lr=1.0, weight_decay=0.0)
        try:
            step = mc.compile_step(optimizer, backend=backend, ns=form)
        except ValueError as refused:
            found[form] = {"refused": str(refused)}
            continue
        for _ in range(3):  # with CUDA graphs the first steps warm up and record; the last one is a replay
            for param in params:
                param.data.zero_()
                optimizer.state[param]["momentum_buffer"].zero_() if optimizer.state[param] else None
            optimizer.step()
        worst = 0.0
        for param in params:
            assert param.grad is not None
            # One step from no momentum: the direction is a multiple of the gradient. Scale: stock's "original".
            scale = max(1.0, param.shape[0] / param.shape[1]) ** 0.5
            worst = max(worst, error(param.detach().cpu(), -scale * reference_direction(param.grad.cpu())))
        found[form] = {"error": worst, "kernels": sorted({batch.kernel for batch in step.plan.batches})}
    return found


def symmetric(device: str) -> float | None:
    """Worst error of the operators for symmetric products against float64; None where this version has none."""
    try:
        importlib.import_module("muon_compile.build.symmetric")
    except ImportError:
        return None
    generator = torch.Generator().manual_seed(7)
    worst = 0.0
    for batch, m, k in ((3, 64, 256), (2, 200, 136), (1, 1024, 1024), (2, 768, 3072)):
        x = torch.randn(batch, m, k, generator=generator).to(device, torch.bfloat16)
        gram = torch.ops.muon_compile.symmetric_gram(x)
        worst = max(worst, error(gram.cpu(), x.cpu().double() @ x.cpu().double().mT))
        small = (gram.float() / k).to(torch.bfloat16)
        # Polynomials of one symmetric matrix commute, so that their product is symmetric.
        square = torch.ops.muon_compile.symmetric_product(small, small, small, -4.775, 2.0315)
        wide = small.cpu().double()
        worst = max(worst, error(square.cpu(), -4.775 * wide + 2.0315 * wide @ wide))
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


def missed(facts: dict[str, Any]) -> list[str]:
    """Which figures miss their bars."""
    found = []
    if not (facts["parity"]["muon"] <= BF16_BAR and facts["parity"]["adamw"] <= ADAMW_BAR):
        found.append("parity")
    found += [
        f"form {name}"
        for name, form in facts["forms"].items()
        if "error" in form and not form["error"] <= FORM_BARS[name]
    ]
    if facts["symmetric"] is not None and not facts["symmetric"] <= SYMMETRIC_BAR:
        found.append("symmetric")
    if "launches" in facts and (facts["launches"]["replays"] != 1 or facts["launches"]["stray_kernels"] > 2):
        found.append("launches")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--device", default="cuda", help="cuda, or cpu for the checks that need no GPU")
    parser.add_argument("--backend", default="inductor", choices=["inductor", "aot_eager"])
    args = parser.parse_args()
    facts: dict[str, Any] = {"torch": torch.__version__, "device": args.device}
    if args.device != "cpu":
        if not torch.cuda.is_available():
            sys.exit(
                "device_check: expected a CUDA GPU and a CUDA build of torch, found none; "
                "--device cpu runs the checks that need no GPU."
            )
        facts["gpu"] = torch.cuda.get_device_name()
    checks: dict[str, Any] = {
        "parity": lambda: parity(args.device, args.backend),
        "forms": lambda: forms(args.device, args.backend),
        "symmetric": lambda: symmetric(args.device),
    }
    if args.device != "cpu":
        checks["launches"] = lambda: launches(args.device)
    for name, check in checks.items():
        facts[name] = check()
        print(name, json.dumps(facts[name]), flush=True)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(facts, indent=1), encoding="utf-8")
    if missed(facts):
        sys.exit(f"device_check: missed {missed(facts)}")


if __name__ == "__main__":
    main()
