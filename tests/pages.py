"""Plans, graphs and pages that the tests of reports share."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import Any

import muon_compile as mc
from muon_compile.plan.hardware import Hardware

# What a name may not do to a page: end an element, run, or be taken for a place of the template.
HOSTILE = "</script x</script><!--<script><img src=x onerror=window.pwned=1>&amp;'\"$title ${x} \\u003c"

HYPER = [{"lr": 0.02, "weight_decay": 0.1, "momentum": 0.95}, {"lr": 3e-4, "beta1": 0.9, "beta2": 0.95}]
STATS = {"graphs": 1, "compile_seconds": 7.25, "temp_bytes": 3 * 2**20, "bytes_by_kind": {"all_reduce": 12}}


def mesh(**axes: int) -> mc.MeshSpec:
    return mc.MeshSpec(axes=tuple(axes.items()))


def model_plan(name: str, on: mc.MeshSpec | None = None, hardware: str = "h100", **options: Any) -> mc.Plan:
    machine = Hardware.preset(hardware)
    specs = mc.model_specs(name, mesh=on, device=machine.device)
    return mc.make_plan(specs, mesh=on, hardware=machine, **options)


def qwen(**options: Any) -> mc.Plan:
    return model_plan("qwen3-30b-a3b", mesh(replicate=2, shard=8), **options)


def compared() -> tuple[mc.Plan, mc.Plan]:
    """Two plans that differ in much."""
    return qwen(), model_plan("qwen3-30b-a3b", mesh(shard=16), strategy="all_gather")


def one_matrix(name: str = "w") -> mc.Plan:
    return mc.make_plan([mc.MatrixSpec(name=name, shape=(256, 512))])


def many(count: int, prefix: str = "blocks", on: mc.MeshSpec | None = None) -> mc.Plan:
    """As many parameters of random shapes, a fifth of them AdamW's; of 1,000 about half have a shape of their own."""
    draw = random.Random(0)
    specs = []
    for i in range(count):
        shape = (32 * draw.randint(1, 16), 32 * draw.randint(1, 24)) if i % 5 else (draw.randint(1, 900),)
        algorithm: Any = "muon" if i % 5 else "adamw"
        specs.append(mc.MatrixSpec(name=f"{prefix}.{i}.w", shape=shape, algorithm=algorithm))
    return mc.make_plan(specs, mesh=on)


def several_strategies() -> mc.Plan:
    """HSDP on 2 x 4 ranks, one bucket for each strategy that there is, and one that nobody has to exchange."""
    named = ("all_gather", "all_to_all", "gather_broadcast", "gather_scatter", "gram_all_reduce", "gram_scatter")
    specs = [
        mc.MatrixSpec(name=f"{name}.{i}", shape=(512 + 64 * at, 64), strategy=name)
        for at, name in enumerate((*named, "hierarchical_all_to_all"))
        for i in range(9)
    ]
    specs.append(mc.MatrixSpec(name="experts", shape=(16, 96, 32)))
    specs.append(mc.MatrixSpec(name="bias", shape=(640,), algorithm="adamw"))
    return mc.make_plan(specs, mesh=mesh(replicate=2, shard=4))


# Plans that pages are made of, by a name for the page.
PLANS: dict[str, Callable[[], mc.Plan]] = {
    "one": one_matrix,
    "gpt2": lambda: model_plan("gpt2"),
    "qwen": qwen,
    "strategies": several_strategies,
    "thousand": lambda: many(1000, on=mesh(shard=4)),
}


def graph_of(plan: mc.Plan) -> list[dict[str, Any]]:
    """Nodes as a trace of the plan could have them: inputs, and for each part a chain through its phases."""
    nodes: list[dict[str, Any]] = []

    def add(name: str, target: str, inputs: list[str], phase: str, **more: Any) -> str:
        op = "placeholder" if phase == "inputs" else "call_function"
        node = {"name": name, "op": op, "target": target, "inputs": inputs, "phase": phase, "wave": None, "parts": []}
        nodes.append({**node, "shape": [2, 3], "dtype": "float32", "buckets": [], **more})
        return name

    for index, bucket in ((i, b) for b in plan.buckets for i in b.params):
        for kind in ("param", "grad"):
            add(f"{kind}_{index}", f"{kind}_{index}", [], "inputs", buckets=[bucket.name])
    for number, wave in enumerate(plan.waves):
        for index in wave.parts:
            stretch = plan.stretch(index)
            about = {"wave": number, "parts": [index], "buckets": [stretch.whole.name]}
            x = f"grad_{stretch.bucket.params[0]}"
            x = add(f"momentum_{index}", "muon_compile.momentum_.default", [x], "momentum", **about)
            if stretch.bucket.view is not None:
                if stretch.part.exchange is not None:
                    x = add(f"send_{index}", "_c10d_functional.all_to_all_single.default", [x], "send", **about)
                for step in range(5):
                    gram = add(f"gram_{index}_{step}", "aten.bmm.default", [x], "orthogonalize", **about)
                    x = add(f"x_{index}_{step}", "aten.baddbmm.default", [x, gram], "orthogonalize", **about)
            for param in stretch.bucket.params:
                add(f"update_{index}_{param}", "aten.add_.Tensor", [f"param_{param}", x], "update", shape=None, **about)
    return nodes


def data_of(page: str) -> dict[str, Any]:
    """What a page embeds."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data
