"""Queue pairs of every strategy by number of ranks: the tables of docs/planner.md, which ``field_ratios.py`` prints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import muon_compile as mc
from muon_compile.plan.exchange import STRATEGY_NAMES
from muon_compile.plan.hardware import network_of
from muon_compile.plan.planner import default_layout, make_plan
from muon_compile.plan.step_cost import predict_step
from muon_compile.plan.traffic import queue_pairs
from muon_compile.spec import MatrixSpec, MeshSpec

NUM_RANKS = (64, 512, 1024, 10_000)
# 10,000 ranks with a shard axis that an all-to-all can have.
HYBRID = (("replicate", 10), ("shard", 1000))
QUEUE_PAIR_PRESETS = ("h100", "ascend-910c")
# Square, so that every strategy can take them: the attention of llama-7b.
QUEUE_PAIR_SHAPE, QUEUE_PAIR_COUNT = (4096, 4096), 128
# Of hierarchical_all_to_all: the devices of a DGX H100 or of an Atlas 800T A2.
NODE_SIZE = 8
SEARCHED = 1 << 14


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def shards(ranks: int) -> MeshSpec:
    """One shard group."""
    return MeshSpec(axes=(("shard", ranks),))


def make_square_plan(strategy: str, mesh: MeshSpec, machine: mc.Hardware) -> mc.Plan:
    """The plan whose queue pairs are counted. Raises ValueError: it needs more than a device holds."""
    layout = default_layout(MatrixSpec(name="w", shape=QUEUE_PAIR_SHAPE), mesh)
    one = MatrixSpec(name="w", shape=QUEUE_PAIR_SHAPE, device=machine.device, layout=layout)
    specs = [replace(one, name=f"w{i}") for i in range(QUEUE_PAIR_COUNT)]
    return make_plan(specs, strategy=strategy, node_size=NODE_SIZE, hardware=machine)


def held_queue_pairs(strategy: str, mesh: MeshSpec, machine: mc.Hardware) -> int:
    """Queue pairs that a rank's device needs on its limited plane, whether it holds as many or not."""
    network = network_of(machine)
    free = replace(network, planes=tuple(replace(plane, max_queue_pairs=None) for plane in network.planes))
    cost = predict_step(make_square_plan(strategy, mesh, replace(machine, network=free)), machine)
    return queue_pairs(cost.connections, network)[_limited(machine)]


def refused(strategy: str, mesh: MeshSpec, machine: mc.Hardware) -> bool:
    """Whether no plan is made, since its connections do not fit."""
    try:
        make_square_plan(strategy, mesh, machine)
    except ValueError as error:
        if "queue pairs" not in str(error):
            raise
        return True
    return False


def _limited(machine: mc.Hardware) -> str:
    return next(plane.name for plane in network_of(machine).planes if plane.max_queue_pairs is not None)


def first_refused(strategy: str, machine: mc.Hardware) -> int | None:
    """The smallest shard group on which a strategy is refused; None: none of up to ``SEARCHED`` ranks is."""
    step_by = NODE_SIZE if strategy == "hierarchical_all_to_all" else 1
    low, high = NUM_RANKS[0] // step_by, SEARCHED // step_by
    if not refused(strategy, shards(high * step_by), machine):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if refused(strategy, shards(middle * step_by), machine) else (middle, high)
    return high * step_by


def queue_pair_pages() -> str:
    """The tables of docs/planner.md."""
    return "\n\n".join(_queue_pair_page(mc.Hardware.preset(name)) for name in QUEUE_PAIR_PRESETS)


def _queue_pair_page(machine: mc.Hardware) -> str:
    plane = network_of(machine).plane(_limited(machine))
    hybrid = MeshSpec(axes=HYBRID)
    meshes = [*(shards(ranks) for ranks in NUM_RANKS), hybrid]
    sizes = " x ".join(f"{size:,}" for _, size in HYBRID)
    heads = ["strategy", *(f"{ranks:,}" for ranks in NUM_RANKS), sizes, "refused from"]
    rows = []
    for strategy in STRATEGY_NAMES[1:]:
        counts = [f"{held_queue_pairs(strategy, mesh, machine):,}" for mesh in meshes]
        marked = [
            f"**{pairs}**" if refused(strategy, mesh, machine) else pairs
            for pairs, mesh in zip(counts, meshes, strict=True)
        ]
        limit = first_refused(strategy, machine)
        rows.append([f"`{strategy}`", *marked, "-" if limit is None else f"{limit:,}"])
    lead = (
        f"`{machine.name}`, plane `{plane.name}`: at most {plane.max_queue_pairs:,} queue pairs, "
        f"{plane.queue_pairs_per_connection} to a connection"
    )
    return f"{lead}.\n\n{markdown(heads, rows)}"
