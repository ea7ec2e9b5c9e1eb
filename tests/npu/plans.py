"""Plans that reach every strategy, form, dtype and branch of the builder, of small shapes, on 1 and on 4 ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import muon_compile as mc
from muon_compile.plan.exchange import GRAMS, STRATEGY_NAMES
from muon_compile.plan.plan import Plan
from muon_compile.spec import MatrixSpec, MeshSpec

WORLD = 4
MESHES = {
    "one": MeshSpec(),
    "four": MeshSpec(axes=(("shard", 4),)),
    "hsdp": MeshSpec(axes=(("replica", 2), ("shard", 2))),
}
SHARDED = tuple(name for name in STRATEGY_NAMES if name != "local")
# Three steps have every product that five have.
STEPS = 3
FORMS = ("standard", "gram", "gram_restart", "gram_split:2,1", "gram_half")
DTYPES = ("float32", "bfloat16")
# On 4 ranks: even; 2, 2, 1, 0.
SHAPES = {"even": (8, 6), "even_too": (8, 6), "five": (5, 8)}
# What Gram strategies take: more rows than columns.
TALL = {"tall": (40, 5), "tall_too": (40, 5), "uneven": (37, 4)}
# Experts are whole on 4 ranks, 1 each.
EXPERTS = {"experts": (4, 6, 5)}
# What keeps small updates of narrow parameters.
ROUNDED: dict[str, dict[str, Any]] = {
    "masters": {"master_weights": True},
    "at random": {"rounding": "stochastic"},
}
# What other libraries' optimizers need beyond torch's.
OTHERS = mc.MuonConfig(momentum_form="ema_added", scale=0.5, ns_dtype="bfloat16", ns_steps=STEPS)
VECTORS = {"bias": (8,), "bias_too": (8,), "norm": (6,)}


def specs(
    shapes: Mapping[str, tuple[int, ...]],
    dtype: str = "float32",
    device: str = "cpu",
    config: mc.MuonConfig | None = None,
    adamw: mc.AdamWConfig | None = None,
    lion: mc.LionConfig | None = None,
) -> list[MatrixSpec]:
    """Matrices in two hyperparameter groups; with ``adamw`` and ``lion`` also vectors in a third and a fourth."""
    found = [
        MatrixSpec(name=name, shape=shape, dtype=dtype, device=device, group=name.endswith("too"), config=config)
        for name, shape in shapes.items()
    ]
    found += [
        MatrixSpec(name=name, shape=shape, dtype=dtype, device=device, algorithm="adamw", group=2, config=adamw)
        for name, shape in (VECTORS if adamw else {}).items()
    ]
    for name, shape in VECTORS.items() if lion else ():
        signed = {"algorithm": "lion", "group": 3, "config": lion}
        found.append(MatrixSpec(name=f"{name}_lion", shape=shape, dtype=dtype, device=device, **signed))  # type: ignore[arg-type]
    return found


def make(
    mesh: str = "one",
    strategy: str = "auto",
    form: str = "standard",
    dtype: str = "float32",
    *,
    device: str = "cpu",
    config: mc.MuonConfig | None = None,
    adamw: mc.AdamWConfig | None = None,
    lion: mc.LionConfig | None = None,
    experts: bool = False,
    **more: object,
) -> Plan:
    """A plan whose products are in ``dtype``, as its parameters are."""
    config = config or mc.MuonConfig(ns_dtype=dtype, ns_steps=STEPS)  # type: ignore[arg-type]
    shapes = (TALL if strategy in GRAMS else SHAPES) | (EXPERTS if experts else {})
    found = specs(shapes, dtype, device, config, adamw, lion)
    return mc.make_plan(found, mesh=MESHES[mesh], strategy=strategy, ns=form, **more)  # type: ignore[arg-type]


def groups_of(plan: Plan) -> dict[str, str]:
    """A name for every axis that matrices are exchanged over."""
    names: dict[str, str] = {}
    for part in plan.parts:
        layout, exchange = plan.buckets[part.bucket].layout, part.exchange
        if exchange is None or layout is None:
            continue
        for axis in (exchange.shard_axis, layout.replica_axis):
            if axis is not None:
                names[axis] = axis
        if exchange.node_size:
            names |= {f"{exchange.shard_axis}{within}": within[1:] for within in ("/node", "/peers")}
    return names
