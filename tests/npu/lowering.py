"""Layer B's worker: lowers plans with the real TorchAir to GE graphs, and writes what it found as JSON.

    python -m tests.npu.lowering VERSION FOLDER OUT

A process of its own, since importing TorchAir changes the process; FOLDER holds the package ``torchair``. Parameters
are fake tensors on a fake NPU, process groups are torch's fake ones.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import muon_compile as mc
from muon_compile.lower import torchair as backend
from muon_compile.lower.cut_inputs import cut_inputs
from muon_compile.lower.torchair_options import compiler_config
from muon_compile.npu import stand_in
from muon_compile.npu.fake_device import name_fake_device
from muon_compile.plan.plan import Plan
from muon_compile.run.inputs import trace_plan
from tests.npu.plans import DTYPES, FORMS, OTHERS, ROUNDED, SHARDED, WORLD, groups_of, make

RANK = 1


def cases(version: str) -> dict[str, dict[str, Any]]:
    """Arguments of ``make`` by name; of the second version every strategy and form once."""
    adamw = mc.AdamWConfig()
    found: dict[str, dict[str, Any]] = {}
    newest = version == "2.13.0"
    for dtype in DTYPES if newest else ("bfloat16",):
        for form in FORMS:
            found[f"one local {form} {dtype}"] = {"form": form, "dtype": dtype, "adamw": adamw}
    for strategy in SHARDED:  # layer C lowers them all, in both dtypes
        for form, dtype in (("standard", "bfloat16"), ("gram", "float32")) if newest else (("standard", "bfloat16"),):
            name = f"four {strategy} {form} {dtype}"
            found[name] = {"mesh": "four", "strategy": strategy, "form": form, "dtype": dtype}
    kinds = {"adamw": mc.AdamWConfig(corrected_eps=True, shared_steps=True), "lion": mc.LionConfig()}
    found["one local other libraries' rules"] = kinds | {"config": OTHERS, "dtype": "bfloat16"}
    found["one local waves"] = {"max_temp_bytes": 700}
    guard: dict[str, Any] = {"clip_grad_norm": 1.0, "skip_nonfinite": True, "probes": True, "dtype": "bfloat16"}
    found["one local guarded and probed"] = {"adamw": adamw} | guard
    found["hsdp guarded and probed"] = {"mesh": "hsdp", "strategy": "all_to_all", "adamw": adamw} | guard
    for name, kept in ROUNDED.items():
        found[f"one local {name}"] = {"dtype": "bfloat16", "adamw": adamw} | kept
        found[f"hsdp {name}"] = {"mesh": "hsdp", "dtype": "bfloat16", "adamw": adamw, "experts": True} | kept
    found["hsdp auto"] = {"mesh": "hsdp", "dtype": "bfloat16", "adamw": adamw, "experts": True}
    return found


def lower(plan: Plan, names: dict[str, str], rank: int, probes: bool = False) -> dict[str, Any]:
    """Lower a rank's step; the checks of the backend itself have passed if this returns."""
    local, traced = trace_plan(plan, backend="torchair", rank=rank, groups=names, probes=probes)
    traced, _ = cut_inputs(traced)
    config = compiler_config(backend.load_torchair().CompilerConfig(), {})
    concrete = backend._lower(backend.load_torchair(), traced, config).runner
    graph = backend._checked(concrete, traced, local.collectives)
    inputs = [info.func.fx_input_idx for info in concrete._input_info_list]
    return {
        "ops": graph.counts(),
        "collectives": [
            [c.kind, c.group, None if c.kind.startswith("HcomAllToAll") else c.elements, c.dtype, c.root]
            for c in graph.collectives()
        ],
        "promised": [c.kind for c in local.collectives],
        "written": sorted(traced.spec.names[inputs[i]] for i in concrete._graph_output_ref_input.values()),
        "to_write": sorted(traced.spec.names[: traced.spec.num_written]),
        "static": graph.is_static() and not concrete.is_dynamic,
        "wide": graph.wide_dtypes(),
        "mixed": graph.mixed_dtypes(),
        "hazards": graph.hazards(concrete._graph_output_ref_input),
        "placements": sorted({info.device_type for info in concrete._input_info_list}),
        "options": concrete._normalize_ge_option()[0],
        "params": len(plan.specs),
    }


def main() -> None:
    version, folder, out = sys.argv[1:]
    stand_in.install(Path(folder))
    name_fake_device()
    dist.init_process_group("fake", rank=RANK, world_size=WORLD, store=FakeStore())
    axes = {"shard": [0, 1, 2, 3], "node": [0, 1], "peers": [1, 3], "half": [0, 1], "replica": [1, 3]}
    groups = {axis: dist.new_group(ranks).group_name for axis, ranks in axes.items()}
    found: dict[str, dict[str, Any]] = {}
    for name, arguments in cases(version).items():
        plan = make(device="npu", **{name: value for name, value in arguments.items() if name != "probes"})
        shard = "half" if arguments.get("mesh") == "hsdp" else "shard"
        names = {axis: groups[shard if axis == "shard" else short] for axis, short in groups_of(plan).items()}
        found[name] = lower(plan, names, RANK, bool(arguments.get("probes")))
        if arguments.get("form") == "standard" and arguments.get("mesh") == "four" and arguments["dtype"] == "bfloat16":
            # Another rank's, whose shards are others, under this one's group names: what TorchAir makes of a rank is
            # decided by its plan. Layer C has all ranks for real.
            found[name]["ranks"] = [lower(plan, names, WORLD - 1)["collectives"]]
    if version == "2.13.0":
        shapes = {f"w{i}": (8 + 8 * (i % 10), 16) for i in range(300)}
        specs = [mc.MatrixSpec(name=n, shape=s, dtype="bfloat16", device="npu") for n, s in shapes.items()]
        found["300 parameters in 10 shapes"] = lower(mc.make_plan(specs, ns="standard"), {}, 0)
    Path(out).write_text(json.dumps({"version": version, "cases": found}), encoding="utf-8")


if __name__ == "__main__":
    main()
