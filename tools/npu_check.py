"""The step through TorchAir on an Ascend NPU: correctness first, then counts, then speed. Run by tools/npu_check.sh.

    python tools/npu_check.py --out out/npu
    torchrun --standalone --nproc-per-node 8 tools/npu_check.py --out out/npu
    python tools/npu_check.py --out out/npu --stand-in        # without an NPU: the script itself, on the CPU

Writes facts.json, one per rank, and the dump of a step. Exits non-zero where a figure misses its bar, after all were
printed; a check that fails is recorded with its error, and the others go on.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parent))

from _shapes import TEN_SHAPES, make_params
from device_check import ADAMW_BAR, BF16_BAR, parity
from figures import error, reference_direction

import muon_compile as mc
from muon_compile.plan.exchange import STRATEGY_NAMES

FORM_SHAPES: list[tuple[int, ...]] = [(64, 256), (64, 256), (256, 64), (96, 1024)]
# Worst relative error against the float64 polynomial on Gaussian matrices. GE rounds a product before it scales and
# adds it, so the standard form errs by up to 2.5 times what a fused product does (docs/npu.md).
FORM_BARS = {"standard": 8e-2, "gram": 4e-2, "gram_split:2,3": 4e-2}
SHARDED_BAR = {"float32": 1e-4, "bfloat16": 8e-2}
# By rows over the ranks: even, uneven, tall.
SHARDED: dict[str, tuple[int, int]] = {"even": (64, 48), "even_too": (64, 48), "uneven": (50, 96), "tall": (512, 32)}


def forms(device: str) -> dict[str, float]:
    """Per form of the iteration, its worst error against the float64 polynomial."""
    found = {}
    for form in FORM_BARS:
        params = make_params(FORM_SHAPES, seed=5, device=device)
        optimizer = torch.optim.Muon(params, lr=1.0, weight_decay=0.0)
        mc.compile_step(optimizer, backend="torchair", ns=form)
        for param in params:
            param.data.zero_()
        optimizer.step()
        worst = 0.0
        for param in params:
            assert param.grad is not None
            scale = max(1.0, param.shape[0] / param.shape[1]) ** 0.5
            worst = max(worst, error(param.detach().cpu(), -scale * reference_direction(param.grad.cpu())))
        found[form] = worst
    return found


def counts(device: str, out: Path) -> dict[str, Any]:
    """Graphs, recompiles and host calls over steps whose hyperparameters change; dumps the step."""
    params = make_params([TEN_SHAPES[i % 10] for i in range(40)], device=device)
    optimizer = torch.optim.Muon(params)
    step = mc.compile_step(optimizer, backend="torchair")
    for index in range(5):
        optimizer.param_groups[0]["lr"] = 1e-3 / (1 + index)
        optimizer.step()
    step.dump(out / "dump")
    stats = step.stats.as_dict()
    return {name: stats[name] for name in ("graphs", "recompiles", "host_launches", "compile_seconds", "fx_nodes")}


class _Matrices(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        for name, shape in SHARDED.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator).to(dtype)))


def strategies(device: str, dtype: str) -> dict[str, float | str]:
    """Per strategy, the worst error of two sharded steps against the eager step, which gathers everything."""
    mesh = init_device_mesh(device.split(":")[0], (dist.get_world_size(),), mesh_dim_names=("shard",))

    def directions(backend: str, strategy: str) -> dict[str, torch.Tensor]:
        model = _Matrices(torch.float32).to(device)
        fully_shard(model, mesh=mesh)
        config = mc.MuonConfig(ns_dtype=dtype)  # type: ignore[arg-type]
        named = [(n, p) for n, p in model.named_parameters() if "gram" not in strategy or n == "tall"]
        optimizer = mc.Muon([{"params": named}], lr=1.0, weight_decay=0.0, config=config)
        mc.compile_step(optimizer, backend=backend, strategy=strategy)
        for index in range(2):
            for name, param in named:
                generator = torch.Generator().manual_seed(2 * list(SHARDED).index(name) + index)
                whole = torch.randn(param.shape, generator=generator).to(device)
                assert isinstance(param, DTensor)
                param.data.zero_()
                param.grad = torch.distributed.tensor.distribute_tensor(
                    whole, mesh, param.placements, src_data_rank=None
                )
            optimizer.step()
        return {name: param.full_tensor().cpu() for name, param in named if isinstance(param, DTensor)}

    expected = directions("aot_eager", "all_gather")
    found: dict[str, float | str] = {}
    for strategy in STRATEGY_NAMES:
        if strategy != "local":
            try:
                made = directions("torchair", strategy)
                found[strategy] = max(error(tensor, expected[name]) for name, tensor in made.items())
            except Exception as failure:
                found[strategy] = f"{type(failure).__name__}: {str(failure)[:500]}"
    return found


def speed(device: str, synchronize: Callable[[], None]) -> dict[str, float]:
    """Seconds of a step of 100 matrices, stock's and the compiled one, interleaved; medians, and their ratio."""
    seconds: dict[str, list[float]] = {"stock": [], "compiled": []}
    optimizers = {}
    for name in seconds:
        optimizers[name] = torch.optim.Muon(make_params([TEN_SHAPES[i % 10] for i in range(100)], device=device))
    mc.compile_step(optimizers["compiled"], backend="torchair")
    for index in range(13):
        for name, optimizer in optimizers.items():
            synchronize()
            start = time.perf_counter()
            optimizer.step()
            synchronize()
            if index >= 3:
                seconds[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {**medians, "ratio": medians["stock"] / medians["compiled"]}


def host_calls(device: str, out: Path) -> dict[str, int]:
    """What the host calls most in three steps, by torch_npu's profiler; to be read by people."""
    import torch_npu

    params = make_params([TEN_SHAPES[i % 10] for i in range(40)], device=device)
    optimizer = torch.optim.Muon(params)
    mc.compile_step(optimizer, backend="torchair")
    optimizer.step()
    path = out / "trace.json"
    with torch_npu.profiler.profile() as profiler:
        for _ in range(3):
            optimizer.step()
        torch.npu.synchronize()
    profiler.export_chrome_trace(str(path))
    events = json.loads(path.read_text())
    events = events["traceEvents"] if isinstance(events, dict) else events
    return dict(Counter(event.get("name", "") for event in events).most_common(40))


def missed(facts: dict[str, Any]) -> list[str]:
    """Which figures miss their bars, and which checks failed."""
    found = [name for name, fact in facts.items() if isinstance(fact, dict) and "failed" in fact]
    good = {name: fact for name, fact in facts.items() if name not in found}
    if "parity" in good and not (good["parity"]["muon"] <= BF16_BAR * 2 and good["parity"]["adamw"] <= ADAMW_BAR * 10):
        found.append("parity")
    found += [f"form {name}" for name, worst in good.get("forms", {}).items() if not worst <= FORM_BARS[name]]
    if "counts" in good and (good["counts"]["recompiles"], good["counts"]["host_launches"]) != (0, 1):
        found.append("counts")
    for dtype, bar in SHARDED_BAR.items():
        for name, worst in good.get(f"strategies {dtype}", {}).items():
            if not (isinstance(worst, float) and worst <= bar):
                found.append(f"{name} {dtype}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--stand-in", action="store_true", help="TorchAir's own Python on the CPU, without an NPU")
    args = parser.parse_args()
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    facts: dict[str, Any] = {"torch": torch.__version__, "ranks": ranks, "stand_in": args.stand_in}
    synchronize: Callable[[], None] = lambda: None  # noqa: E731
    if args.stand_in:
        from muon_compile.npu import stand_in, wheel

        stand_in.install(wheel.torchair_sources())
        device = "cpu"
    else:
        import torch_npu

        torch.npu.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        device, synchronize = f"npu:{torch.npu.current_device()}", torch.npu.synchronize
        facts |= {"torch_npu": torch_npu.__version__, "device": torch.npu.get_device_name()}
    if ranks > 1:
        dist.init_process_group("gloo" if args.stand_in else "hccl")
    checks: dict[str, Callable[[], Any]] = {}
    if ranks == 1:
        checks["parity"] = lambda: parity(device, "torchair")
        checks["forms"] = lambda: forms(device)
        checks["counts"] = lambda: counts(device, args.out)
        checks["speed"] = lambda: speed(device, synchronize)
        if not args.stand_in:
            checks["host calls"] = lambda: host_calls(device, args.out)
    else:
        checks |= {f"strategies {dtype}": lambda dtype=dtype: strategies(device, dtype) for dtype in SHARDED_BAR}
    args.out.mkdir(parents=True, exist_ok=True)
    for name, check in checks.items():
        try:
            facts[name] = check()
        except Exception as failure:
            facts[name] = {"failed": f"{type(failure).__name__}: {failure}", "trace": traceback.format_exc()[-4000:]}
        if rank == 0:
            print(name, json.dumps(facts[name])[:2000], flush=True)
        (args.out / f"facts-{rank}.json").write_text(json.dumps(facts, indent=1), encoding="utf-8")
    if ranks > 1:
        dist.destroy_process_group()
    if missed(facts):
        sys.exit(f"npu_check: missed {missed(facts)}; please send back {args.out} all the same")


if __name__ == "__main__":
    main()
