"""What a step would cost on a cluster that is not at hand: no ranks, no tensors, no process group."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import cattrs
from rich import box
from rich.console import Console
from rich.table import Table

from muon_compile.config import AdamWConfig, MuonConfig
from muon_compile.plan.exchange import STRATEGY_NAMES
from muon_compile.plan.hardware import Hardware, network_of
from muon_compile.plan.models import model_specs
from muon_compile.plan.plan import Bucket, Plan
from muon_compile.plan.planner import make_plan
from muon_compile.plan.sharding import rank_flops
from muon_compile.plan.step_cost import Event, local_numel, predict_step
from muon_compile.plan.traffic import queue_pairs
from muon_compile.spec import FLOAT_BYTES, MatrixSpec, MeshSpec

# Bins of a load histogram, of equal width from nothing to the busiest rank's load.
BINS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A step under one strategy; of one rank, the one with the most to do, where nothing else is said.

    Args:
        strategy: Its name; ``"auto"`` chooses bucket by bucket.
        refused: Why it cannot be used; empty where it can. The figures are then 0.
        taken: What every bucket took, and how many buckets did.
        seconds: A step's predicted time.
        solve_seconds: Newton-Schulz: products.
        memory_seconds: Traffic to and from memory, of Newton-Schulz and of all passes.
        launch_seconds: Operators called by the host.
        exposed_seconds: Collectives that nothing covers.
        hidden_seconds: Collectives that run beside products.
        sent_bytes: By level of the network, innermost first.
        messages: One after the other.
        collectives: In the graph.
        queue_pairs: By plane of the network.
        flops_busiest: Newton-Schulz FLOPs of exchanged matrices, of the rank with the most of them.
        flops_mean: The same, of all ranks on average.
        load_histogram: Ranks by their share of the busiest one's FLOPs, in ``BINS`` bins.
        state_bytes: Parameters, gradients and optimizer state.
        temp_bytes: Most that temporaries take at once.
        events: The predicted timeline.
    """

    strategy: str
    refused: str = ""
    taken: tuple[tuple[str, int], ...] = ()
    seconds: float = 0.0
    solve_seconds: float = 0.0
    memory_seconds: float = 0.0
    launch_seconds: float = 0.0
    exposed_seconds: float = 0.0
    hidden_seconds: float = 0.0
    sent_bytes: tuple[int, ...] = ()
    messages: int = 0
    collectives: int = 0
    queue_pairs: tuple[tuple[str, int], ...] = ()
    flops_busiest: int = 0
    flops_mean: float = 0.0
    load_histogram: tuple[int, ...] = ()
    state_bytes: int = 0
    temp_bytes: int = 0
    events: tuple[Event, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """Every strategy on one mesh; ``str()`` is a table.

    Args:
        name: What was simulated.
        mesh: The ranks.
        hardware: Name of the machine's figures.
        num_params: Parameters.
        num_elements: Their elements.
        rows: One for every strategy.
    """

    name: str
    mesh: MeshSpec
    hardware: str
    num_params: int
    num_elements: int
    rows: tuple[Row, ...]

    def row(self, strategy: str) -> Row:
        """The row of a strategy. Raises KeyError: it was not simulated."""
        for row in self.rows:
            if row.strategy == strategy:
                return row
        raise KeyError(strategy)

    def to_json(self) -> str:
        """All figures but the timelines, as JSON text."""
        data = cattrs.unstructure(self)
        for row in data["rows"]:
            del row["events"]
        return json.dumps(data, indent=1)

    def __str__(self) -> str:
        return _table(self)


def simulate(
    what: Plan | Iterable[MatrixSpec] | str,
    ranks: int | None = None,
    *,
    mesh: MeshSpec | None = None,
    hardware: Hardware | str = "h100",
    strategies: Sequence[str] | None = None,
    config: MuonConfig | None = None,
) -> Simulation:
    """Predict a step on ranks that all have the same hardware, under every strategy.

    Times are lower bounds where the hardware's figures are a data sheet's.

    Args:
        what: A model's name (``model_specs``), parameters, which then lie on the hardware's device, or a plan, which is
            taken as it is.
        ranks: How many; without a mesh they all shard, as ``fully_shard`` cuts by default.
        mesh: One axis, or the replicas' axis and the shards' axis; ``ranks`` may then be left out.
        hardware: Figures, or a preset's name.
        strategies: Names to simulate; None: ``"auto"`` and every other.
        config: Mathematics of parameters that have none.

    Raises:
        ValueError: Ranks and mesh do not fit, unknown names, or parameters that no plan can take.
    """
    machine = Hardware.preset(hardware) if isinstance(hardware, str) else hardware
    if isinstance(what, Plan):
        given = _check_mesh(ranks, what.mesh if mesh is None else mesh)
        if given != what.mesh:
            raise ValueError(f"simulate: mesh: expected the plan's, {what.mesh.axes}, got {given.axes}.")
        return _simulation("plan " + what.digest, what.specs, what.mesh, machine, [_row(what.strategy, what, machine)])
    given = _check_mesh(ranks, mesh)
    if isinstance(what, str):
        name, specs = what, tuple(model_specs(what, mesh=given, device=machine.device))
    else:
        specs = tuple(replace(spec, device=machine.device) for spec in what)
        name = f"{len(specs)} parameters"
    rows = []
    for strategy in ("auto", *STRATEGY_NAMES) if strategies is None else strategies:
        try:
            plan = make_plan(specs, mesh=given, config=config, strategy=strategy, hardware=machine)
        except ValueError as error:
            if strategy not in STRATEGY_NAMES:
                raise
            rows.append(Row(strategy=strategy, refused=str(error)))
            continue
        rows.append(_row(strategy, plan, machine))
    return _simulation(name, specs, given, machine, rows)


def _check_mesh(ranks: int | None, mesh: MeshSpec | None) -> MeshSpec:
    if ranks is not None and (not isinstance(ranks, int) or ranks < 1):
        raise ValueError(f"simulate: ranks: expected a whole number of at least 1, got {ranks!r}.")
    if mesh is None:
        if ranks is None:
            raise ValueError("simulate: ranks: expected their number, or a mesh, got neither.")
        return MeshSpec(axes=(("shard", ranks),))
    if ranks is not None and mesh.num_ranks != ranks:
        raise ValueError(
            f"simulate: mesh: expected one of all {ranks} ranks, got {mesh.axes}, which is {mesh.num_ranks}; leave "
            "ranks out, or choose axes whose product it is."
        )
    return mesh


def _simulation(
    name: str, specs: Sequence[MatrixSpec], mesh: MeshSpec, hardware: Hardware, rows: Sequence[Row]
) -> Simulation:
    return Simulation(
        name=name,
        mesh=mesh,
        hardware=hardware.name,
        num_params=len(specs),
        num_elements=sum(spec.numel for spec in specs),
        rows=tuple(rows),
    )


def _row(strategy: str, plan: Plan, hardware: Hardware) -> Row:
    cost = predict_step(plan, hardware)
    loads = rank_flops(plan)
    taken: dict[str, int] = {}
    for bucket in plan.buckets:
        if bucket.strategy is not None:
            taken[bucket.strategy] = taken.get(bucket.strategy, 0) + 1
    return Row(
        strategy=strategy,
        taken=tuple(sorted(taken.items())),
        seconds=cost.seconds,
        solve_seconds=cost.solve.gemm_seconds,
        memory_seconds=cost.solve.memory_seconds + cost.passes.memory_seconds,
        launch_seconds=cost.solve.host_seconds + cost.passes.host_seconds,
        exposed_seconds=cost.exposed_seconds,
        hidden_seconds=cost.hidden_seconds,
        sent_bytes=cost.sent_bytes,
        messages=cost.messages,
        collectives=len(plan.collectives),
        queue_pairs=tuple(queue_pairs(cost.connections, network_of(hardware)).items()),
        flops_busiest=max(loads),
        flops_mean=sum(loads) / len(loads),
        load_histogram=histogram(loads),
        state_bytes=sum(_state_bytes(bucket) for bucket in plan.buckets),
        temp_bytes=plan.temp_bytes,
        events=cost.events,
    )


def histogram(loads: Sequence[int]) -> tuple[int, ...]:
    """Ranks by their share of the busiest one's load, in ``BINS`` bins of equal width; a full share is in the last."""
    counts = [0] * BINS
    most = max(loads)
    for load in loads:
        counts[min(BINS - 1, load * BINS // most if most else 0)] += 1
    return tuple(counts)


def _state_bytes(bucket: Bucket) -> int:
    """Parameters, their masters, gradients, and momentum or AdamW's two moments, on the first rank: none has more."""
    moments = 2 if isinstance(bucket.config, AdamWConfig) else 1
    each = FLOAT_BYTES[bucket.dtype] + FLOAT_BYTES[bucket.grad_dtype] + moments * FLOAT_BYTES[bucket.state_dtype]
    each += FLOAT_BYTES["float32"] if bucket.rounding == "master" else 0
    return local_numel(bucket) * each


def _table(result: Simulation) -> str:
    heads = ("strategy", "ms", "products", "memory", "launch", "exposed", "hidden", "sent MB", "messages")
    more = ("calls", "queue pairs", "imbalance", "temp MB")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for head in (*heads, *more):
        table.add_column(head, justify="left" if head in ("strategy", "queue pairs") else "right", no_wrap=True)
    for row in result.rows:
        if row.refused:
            table.add_row(row.strategy, "refused")
            continue
        spent = (row.solve_seconds, row.memory_seconds, row.launch_seconds, row.exposed_seconds, row.hidden_seconds)
        excess = row.flops_busiest / row.flops_mean - 1 if row.flops_mean else 0.0
        table.add_row(
            row.strategy,
            *(f"{seconds * 1e3:,.2f}" for seconds in (row.seconds, *spent)),
            f"{sum(row.sent_bytes) / 1e6:,.0f}",
            f"{row.messages:,}",
            str(row.collectives),
            ", ".join(f"{plane} {pairs:,}" for plane, pairs in row.queue_pairs if pairs),
            f"{excess:.0%}",
            f"{row.temp_bytes / 1e6:,.0f}",
        )
    sink = io.StringIO()
    console = Console(file=sink, width=160, color_system=None, highlight=False)
    axes = " x ".join(f"{size} {axis}" for axis, size in result.mesh.axes)
    console.print(
        f"{result.name}: {result.num_params:,} parameters, {result.num_elements:,} elements, on {axes} of "
        f"{result.hardware}; predicted, on the rank with the most to do"
    )
    console.print(table)
    for row in result.rows:
        if row.refused:
            console.print(f"{row.strategy}: {row.refused}")
        elif row.strategy == "auto" and row.taken:
            console.print("auto takes " + ", ".join(f"{name} for {count} bucket(s)" for name, count in row.taken))
    return "\n".join(line.rstrip() for line in sink.getvalue().splitlines())
