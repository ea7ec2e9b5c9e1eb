"""The plan as a table for people."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Sequence
from typing import Literal

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from muon_compile.plan.assign import imbalance
from muon_compile.plan.plan import Bucket, Plan
from muon_compile.plan.sharding import rank_flops, unit_flops
from muon_compile.plan.strategies import collectives

WIDTH = 120
# Up to this imbalance nothing is said about it.
_BALANCED = 0.1


def describe_plan(plan: Plan) -> str:
    """Render buckets, Newton-Schulz batches and totals as text of at most 120 columns."""
    sink = io.StringIO()
    console = Console(file=sink, width=WIDTH, color_system=None, highlight=False, soft_wrap=False)
    console.print(Text(_headline(plan)))
    console.print(_buckets_table(plan))
    if any(part.exchange is not None for part in plan.parts):
        console.print(_exchanges_table(plan))
        console.print(_strategies_table(plan))
        console.print(Text(_loads_line(plan)))
    if plan.batches:
        console.print(_batches_table(plan))
        console.print(_reasons_table(plan))
    return "\n".join(line.rstrip() for line in sink.getvalue().splitlines())


def _headline(plan: Plan) -> str:
    count = len(plan.specs)
    elements = sum(spec.numel for spec in plan.specs)
    flops = sum(batch.flops for batch in plan.batches)
    return (
        f"plan {plan.digest}: {count} parameters ({elements:,} elements) in {len(plan.buckets)} buckets, "
        f"{len(plan.batches)} Newton-Schulz batches, {len(plan.waves)} wave(s), {plan.mesh.num_ranks} rank(s)\n"
        f"Newton-Schulz {flops / 1e9:,.2f} GFLOP per step, temporaries about {plan.temp_bytes / 2**20:,.1f} MiB, "
        f"{len(plan.collectives)} collectives{', exact' if plan.exact else ''}"
    )


def _names(plan: Plan, bucket: Bucket) -> str:
    names = [plan.specs[i].name for i in bucket.params]
    return ", ".join(names[:2]) + (f", ... {len(names) - 2} more" if len(names) > 2 else "")


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str]) -> Table:
    """A table whose last column gives way first: the others keep their whole text where it fits at all."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    widths = [min(36, max(map(len, cells))) for cells in zip(headings, *rows, strict=True)][:-1]
    # SIMPLE_HEAD puts an edge on both sides, and a space and a divider after every column but the last.
    widths.append(max(12, WIDTH - 2 - sum(width + 2 for width in widths)))
    for heading, width in zip(headings, widths, strict=True):
        justify: Literal["right", "left"] = "right" if heading in right else "left"
        table.add_column(heading, overflow="ellipsis", no_wrap=True, justify=justify, max_width=width)
    for row in rows:
        table.add_row(*[Text(cell.encode("unicode_escape").decode() if "\n" in cell else cell) for cell in row])
    return table


def _buckets_table(plan: Plan) -> Table:
    rows = []
    for bucket in plan.buckets:
        dtype = bucket.dtype if bucket.dtype == bucket.grad_dtype else f"{bucket.dtype} (grad {bucket.grad_dtype})"
        groups = sorted(set(bucket.groups))
        shown = ",".join(map(str, groups)) if len(groups) <= 4 else f"{groups[0]}..{groups[-1]}"
        shape = "x".join(map(str, bucket.shape)) or "scalar"
        dtype += "" if bucket.rounding == "nearest" else f", {bucket.rounding}"
        row = (bucket.name, str(bucket.size), shape, dtype, bucket.state_dtype, bucket.device, shown)
        rows.append((*row, _names(plan, bucket)))
    headings = ("bucket", "B", "shape", "dtype", "state", "device", "groups", "parameters")
    return _table(headings, rows, right=("B",))


def _batches_table(plan: Plan) -> Table:
    rows = []
    for batch in plan.batches:
        config = batch.config
        given = config.coefficients
        coefficients = given if isinstance(given, str) else "custom"
        sources = list(dict.fromkeys(plan.buckets[plan.parts[piece.part].bucket].name for piece in batch.pieces))
        what = (batch.name, str(batch.num_matrices), f"{batch.rows} x {batch.cols}", batch.form, batch.kernel)
        how = (config.ns_dtype, f"{config.ns_steps} {coefficients}", str(config.scale), f"{batch.flops / 1e9:.3f}")
        rows.append((*what, *how, ",".join(sources)))
    headings = ("batch", "B", "m x n", "form", "kernel", "dtype", "steps", "scale", "GFLOP", "from")
    return _table(headings, rows, right=("B", "GFLOP"))


def _reasons_table(plan: Plan) -> Table:
    rows = [(f"{batch.name}:", batch.reason) for batch in plan.batches]
    return _table(("batch", "why this form and kernel"), rows, right=())


def _exchanges_table(plan: Plan) -> Table:
    rows = []
    for part in plan.parts:
        exchange = part.exchange
        if exchange is None:
            continue
        bucket = plan.buckets[part.bucket]
        name = (
            bucket.name if (part.start, part.stop) == (0, bucket.size) else f"{bucket.name}[{part.start}:{part.stop}]"
        )
        size = f"{exchange.rows} x {exchange.cols}{' (transposed)' if exchange.transposed else ''}"
        owners = ["/".join(map(str, row)) for row in exchange.owner_counts] or ["every rank"]
        kinds = Counter(spec.kind for spec in collectives(exchange))
        sent = f"{sum(spec.bytes_per_rank for spec in collectives(exchange)):,}"
        done = "; ".join(owners) if len(exchange.sizes) <= 8 else f"{_min_max(exchange.owner_counts)} each"
        calls = ", ".join(f"{count} {kind}" if count > 1 else kind for kind, count in kinds.items())
        rows.append((name, exchange.strategy, str(exchange.num_units), size, exchange.comm_dtype, sent, done, calls))
    headings = ("part", "strategy", "units", "rows x cols", "wire", "bytes", "units by owner", "collectives")
    return _table(headings, rows, right=("units", "bytes"))


def _strategies_table(plan: Plan) -> Table:
    rows = [(f"{b.name}:", b.choice.name, b.choice.reason) for b in plan.buckets if b.choice is not None]
    return _table(("bucket", "strategy", "why"), rows, right=())


def _min_max(rows: Sequence[Sequence[int]]) -> str:
    """``"3 to 4"``, of all numbers in the rows."""
    flat = [value for row in rows for value in row]
    return f"{min(flat, default=0)} to {max(flat, default=0)}"


def _loads_line(plan: Plan) -> str:
    loads = rank_flops(plan)
    busiest, mean = max(loads), sum(loads) / len(loads)
    share = f"{busiest / 1e9:,.3f} GFLOP on the busiest rank, {mean / 1e9:,.3f} on average"
    each = ", ".join(f"{load / 1e9:,.3f}" for load in loads) if len(loads) <= 16 else f"{len(loads)} ranks"
    line = f"Newton-Schulz of exchanged parts: {share}, imbalance {imbalance(loads):.1%}; by rank: {each}"
    return line + (f"\n{_what_bounds(plan, mean)}" if imbalance(loads) > _BALANCED else "")


def _what_bounds(plan: Plan, mean: float) -> str:
    """Why owners' loads are not balanced any better: a matrix is never cut."""
    owned = [
        (p.exchange, plan.buckets[p.bucket]) for p in plan.parts if p.exchange is not None and p.exchange.owner_counts
    ]
    count = sum(exchange.num_units for exchange, _ in owned)
    largest = max((unit_flops(exchange, bucket) for exchange, bucket in owned), default=0)
    return (
        f"A matrix has one owner: {count:,} for {plan.mesh.num_ranks:,} ranks, and the largest takes "
        f"{largest / 1e9:,.3f} GFLOP, {largest / mean:.2f} of the average load."
    )
