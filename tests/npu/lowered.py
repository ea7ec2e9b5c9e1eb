"""Small functions, lowered by TorchAir's own Python and run by the interpreter.

A program, since TorchAir changes its process: ``python -m tests.npu.lowered FOLDER JSON DTYPE...`` writes what it saw.
"""

from __future__ import annotations

import json
import math
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from muon_compile.npu import stand_in

DTYPES = ("float32", "bfloat16")
_ops = torch.ops._c10d_functional


def _written(p: Tensor, g: Tensor) -> Tensor:
    p.mul_(0.5).sub_(g)
    g.copy_(p * 2)
    return p.sum()


def _read_after_write(p: Tensor, g: Tensor) -> Tensor:
    new = p * 0.5
    changed = p * g  # traced after what will be written to p's memory
    p.copy_(new)
    return changed


def _adamw(p: Tensor, g: Tensor) -> Tensor:
    count = torch.full((), 3.0)
    correction = -torch.expm1(count * torch.log(torch.full((), 0.9)))
    return torch.addcmul(p, g, g, value=0.1) / (p.square().sqrt() / correction.sqrt() + 1e-3).to(p.dtype)


def _rounded(p: Tensor, g: Tensor) -> Tensor:
    bits = p.float().view(torch.int32)
    return (torch.bitwise_and(bits, torch.full((), -65536, dtype=torch.int32)) + 0).view(torch.float32)


def _newton_schulz(p: Tensor, g: Tensor) -> Tensor:
    x = torch.stack([p, g])
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    x = x / torch.where(norm > 0, norm, 1.0)
    gram = torch.bmm(x, x.mT)
    return 3.4445 * x + torch.bmm(2.0315 * torch.bmm(gram, gram) - 4.775 * gram, x)


def _a2a(x: Tensor) -> Tensor:
    return _ops.wait_tensor(_ops.all_to_all_single(x, [4], [4], "0"))


# Of two [4, 6] tensors each: what the operators of a step lower from, and some together.
CASES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "stack": lambda p, g: torch.stack([p, g], 1),
    "unbind": lambda p, g: [x + 1 for x in p.unbind(1)],
    "cat": lambda p, g: torch.cat([p, g, p], 1),
    "split": lambda p, g: [x * g[:, :1] for x in p.split([1, 2, 3], 1)],
    "slice": lambda p, g: p[1:3, ::2] + g[-2:, 1:4],
    "select": lambda p, g: p[1] * g[-1],
    "transpose": lambda p, g: p.mT + g.reshape(6, 4),
    "permute": lambda p, g: p.view(2, 2, 6).permute(2, 0, 1) * 2,
    "squeeze": lambda p, g: p.unsqueeze(0).squeeze(0) + g.view(4, 1, 6).squeeze(1).unsqueeze(-1).squeeze(-1),
    "expand": lambda p, g: p[:1].expand(4, -1).clone() - g,
    "pad": lambda p, g: torch.nn.functional.pad(p, (1, 2, 0, 1), value=0.5),
    "new_zeros": lambda p, g: torch.cat([p, g.new_zeros(2, 6)]),
    "arange": lambda p, g: torch.where(torch.arange(4) >= 2, 1.0, 0.0).to(p.dtype).unsqueeze(1) * p,
    "full": lambda p, g: torch.full((4, 6), 2.5, dtype=p.dtype) + p,
    "bmm": lambda p, g: torch.bmm(p.view(2, 2, 6), g.view(2, 2, 6).mT),
    "mm": lambda p, g: torch.mm(p.mT, g),
    "mul": lambda p, g: p * g * 0.3,
    "add": lambda p, g: torch.add(p, g, alpha=0.3) + 0.7,
    "sub": lambda p, g: torch.sub(1.0 - p, g, alpha=2),
    "div": lambda p, g: p / g.abs().clamp(min=0.5) / 3.0,
    "pow": lambda p, g: (p * p + 1).pow(0.25) + torch.pow(0.9, g),
    "roots": lambda p, g: (p * p).sqrt() + (g * g + 1).rsqrt() + (p * p + 1).reciprocal(),
    "signs": lambda p, g: -p + g.abs() * p.sign(),
    "exp": lambda p, g: torch.exp(p) - torch.expm1(g) + torch.log(p * p + 1),
    "maximum": lambda p, g: torch.maximum(p, g) - torch.minimum(p, g * 2),
    "clamp": lambda p, g: p.clamp(-0.5, 0.5) + g.clamp(min=0.1) + g.clamp(max=0.2),
    "max": lambda p, g: p.max(dim=-1, keepdim=True).values + g.max(),
    "sum": lambda p, g: p.sum(dim=(0, 1), keepdim=True) + g.sum(0) + (p > 0).sum(),
    "norm": lambda p, g: torch.linalg.vector_norm(p) + torch.linalg.vector_norm(g, 1, dim=1),
    "compare": lambda p, g: [p == g, p >= g, p < g, p != g, p <= 0, g > 0.5],
    "logical": lambda p, g: torch.where(torch.logical_or(p > 0, ~((g > 0) & (p < 1))), p, g),
    "all": lambda p, g: torch.where((p < 9).all(), p, g),
    "where": lambda p, g: torch.where(p > g, p, 0.0),
    "cast": lambda p, g: [
        p.to(torch.float32) * 2,
        g.to(torch.bfloat16) + 1,
        (p * 5).to(torch.int32),
        (p > 0).to(g.dtype),
    ],
    "bits": _rounded,
    "baddbmm": lambda p, g: torch.baddbmm(
        p.view(1, 4, 6), p.view(1, 4, 6), g[:, :1].expand(4, 6).new_ones(1, 6, 6), alpha=2.5
    ),
    "lerp": lambda p, g: torch.lerp(p, g, 0.3),
    "written": _written,
    "read_after_write": _read_after_write,
    "adamw": _adamw,
    "newton_schulz": _newton_schulz,
    "collectives": lambda p, g: [
        _ops.wait_tensor(_ops.all_gather_into_tensor(p * 1, 1, "0")),
        _ops.wait_tensor(_ops.reduce_scatter_tensor(p * 2, "sum", 1, "0")),
        _ops.wait_tensor(_ops.all_reduce(p * 3, "sum", "0")),
        _ops.wait_tensor(_ops.broadcast(p * 4, 0, "0")),
        _a2a(p * 5),
    ],
}


def inputs(dtype: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(4, 6, generator=generator).to(getattr(torch, dtype)) for _ in range(2)]


def difference(a: Any, b: Any) -> float:
    """The largest, relative to the largest element; inf where dtypes or shapes differ, or a number is none."""
    worst = [0.0]
    for x, y in zip(torch.utils._pytree.tree_leaves(a), torch.utils._pytree.tree_leaves(b), strict=True):
        if x.dtype != y.dtype or x.shape != y.shape:
            return float("inf")
        worst.append(((x.double() - y.double()).abs().max() / x.double().abs().max().clamp(min=1)).item())
    return max(worst) if all(map(math.isfinite, worst)) else float("inf")


def found(function: Callable[[Tensor, Tensor], Any], dtype: str, record: stand_in.StandIn) -> dict[str, Any]:
    """Compile with TorchAir, run, and compare with eager."""
    import torchair

    torch._dynamo.reset()
    record.graphs.clear()
    lowered = torch.compile(function, backend=torchair.get_npu_backend(), fullgraph=True, dynamic=False)
    eager_in, lowered_in = inputs(dtype), inputs(dtype)
    try:
        with torch.no_grad():
            expected, got = function(*eager_in), lowered(*lowered_in)
    except Exception as error:
        graph = record.graphs[-1].graph if record.graphs else None
        return {"error": f"{type(error).__name__}: {error}", "mixed": graph.mixed_dtypes() if graph else []}
    loaded = record.graphs[-1]
    return {
        "difference": difference([expected, eager_in], [got, lowered_in]),
        "graphs": [len(record.graphs), loaded.compiled, loaded.runs],
        "operators": loaded.graph.counts(),
        "faults": loaded.graph.mixed_dtypes()
        + loaded.graph.wide_dtypes()
        + ([] if loaded.graph.is_static() else ["?"]),
        "hazards": loaded.graph.hazards(loaded.ref_outputs),
        "collectives": [str(one) for one in loaded.graph.collectives()],
    }


def main() -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    record = stand_in.install(Path(sys.argv[1]))
    assert stand_in.installed() is record is stand_in.install(Path(sys.argv[1]))
    import torchair

    assert Path(torchair.__file__).is_relative_to(record.folder)
    kept = handlers == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    results = {
        name: {dtype: found(function, dtype, record) for dtype in sys.argv[3:]} for name, function in CASES.items()
    }
    dist.destroy_process_group()
    seen = {"handlers_kept": kept, "options": dict(record.global_options)}
    Path(sys.argv[2]).write_text(json.dumps({"cases": results} | seen), encoding="utf-8")
    print("done")


if __name__ == "__main__":
    main()
