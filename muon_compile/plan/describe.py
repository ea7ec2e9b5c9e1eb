"""The plan as a table for people."""

from __future__ import annotations

import io

from rich import box
from rich.console import Console
from rich.table import Table

from muon_compile.config import MuonConfig
from muon_compile.plan.plan import Bucket, Plan

WIDTH = 120


def describe_plan(plan: Plan) -> str:
    """Render buckets, Newton-Schulz batches and totals as text of at most 120 columns."""
    sink = io.StringIO()
    console = Console(file=sink, width=WIDTH, color_system=None, highlight=False, soft_wrap=False)
    console.print(_headline(plan), markup=False)
    console.print(_buckets_table(plan))
    if plan.batches:
        console.print(_batches_table(plan))
    return "\n".join(line.rstrip() for line in sink.getvalue().splitlines())


def _headline(plan: Plan) -> str:
    count = len(plan.specs)
    elements = sum(spec.numel for spec in plan.specs)
    flops = sum(batch.flops for batch in plan.batches)
    temp = max(wave.temp_bytes for wave in plan.waves)
    return (
        f"plan {plan.digest}: {count} parameters ({elements:,} elements) in {len(plan.buckets)} buckets, "
        f"{len(plan.batches)} Newton-Schulz batches, {len(plan.waves)} wave(s), {plan.mesh.num_ranks} rank(s)\n"
        f"Newton-Schulz {flops / 1e9:,.2f} GFLOP per step, temporaries about {temp / 2**20:,.1f} MiB, "
        f"{len(plan.collectives)} collectives{', exact' if plan.exact else ''}"
    )


def _names(plan: Plan, bucket: Bucket) -> str:
    names = [plan.specs[i].name for i in bucket.params]
    return ", ".join(names[:2]) + (f", ... {len(names) - 2} more" if len(names) > 2 else "")


def _buckets_table(plan: Plan) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("bucket", "B", "shape", "dtype", "state", "device", "groups", "parameters"):
        table.add_column(name, overflow="ellipsis", no_wrap=True, justify="right" if name == "B" else "left")
    for bucket in plan.buckets:
        dtype = bucket.dtype if bucket.dtype == bucket.grad_dtype else f"{bucket.dtype} (grad {bucket.grad_dtype})"
        groups = ",".join(str(g) for g in sorted(set(bucket.groups)))
        shape = "x".join(map(str, bucket.shape)) or "scalar"
        row = (bucket.name, str(bucket.size), shape, dtype, bucket.state_dtype, bucket.device, groups)
        table.add_row(*row, _escape(_names(plan, bucket)))
    return table


def _batches_table(plan: Plan) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("batch", "B", "m x n", "form", "dtype", "steps", "coefficients", "scale", "GFLOP", "from", "reason"):
        table.add_column(name, overflow="ellipsis", no_wrap=True, justify="right" if name in ("B", "GFLOP") else "left")
    for batch in plan.batches:
        config = batch.config
        assert isinstance(config, MuonConfig)
        given = config.coefficients
        coefficients = given if isinstance(given, str) else "custom"
        sources = ",".join(dict.fromkeys(plan.buckets[piece.bucket].name for piece in batch.pieces))
        table.add_row(
            batch.name,
            str(batch.num_matrices),
            f"{batch.rows} x {batch.cols}",
            batch.form,
            config.ns_dtype,
            str(config.ns_steps),
            coefficients,
            str(config.scale),
            f"{batch.flops / 1e9:.3f}",
            sources,
            batch.reason,
        )
    return table


def _escape(text: str) -> str:
    return text.replace("[", r"\[")
