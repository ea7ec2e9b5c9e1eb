"""``verify``: one step under every strategy on the ranks at hand, held against the float64 polynomial."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from muon_compile.config import MuonConfig
from muon_compile.lower.backends import BACKENDS
from muon_compile.optim import Muon
from muon_compile.plan.localize import localize
from muon_compile.plan.plan import Plan, find_choice
from muon_compile.plan.planner import STRATEGIES, make_plan
from muon_compile.plan.sharding import rank_flops
from muon_compile.plan.strategies import sent_bytes
from muon_compile.run.compiled_step import compile_step
from muon_compile.spec import FLOAT_BYTES, MatrixSpec, MeshSpec, ShardLayout
from muon_compile.verification.reference import MOMENTUM, reference_direction, relative_error
from muon_compile.verification.report import Report, Row

# Relative Frobenius error of a parameter's direction. float32 alone errs by about 1e-6; a Gram form squares the
# condition number (docs/numerics.md).
STANDARD_BAR = 1e-5
GRAM_BAR = 2e-3
# With anything narrower: this much more than the standard form's own error in one process.
NARROW_FACTOR = 1.2


def default_specs(ranks: int, dtype: str = "float32") -> tuple[MatrixSpec, ...]:
    """A small mixed set: square, tall and wide matrices, uneven rows, a single row, a stack of experts."""
    shapes: dict[str, list[tuple[int, ...]]] = {
        "square": [(32, 32)] * 3,
        "tall": [(96, 24)] * (ranks + 1),
        "wide": [(24, 96)] * 2,
        "uneven": [(ranks + 1, 24), (16 * ranks + 1, 16)],
        "one row": [(1, 24)],
        "experts": [(2 * ranks, 16, 24)],
    }
    return tuple(
        MatrixSpec(name=f"{kind} {number}", shape=shape, dtype=dtype)
        for kind, same in shapes.items()
        for number, shape in enumerate(same)
    )


def verify(
    specs: Iterable[MatrixSpec] | None = None,
    *,
    mesh: MeshSpec | None = None,
    strategies: Sequence[str] | None = None,
    backends: Sequence[str] = ("aot_eager",),
    config: MuonConfig | None = None,
    seed: int = 0,
) -> Report:
    """Run one optimizer step under every strategy on the ranks of the running process group, and compare directions.

    Every rank calls it with the same arguments and gets the same report; without a process group it is one rank. The
    gradients are Gaussian, the same on all ranks, and cut as ``fully_shard`` cuts them. The reference is the polynomial
    of whole matrices in float64.

    Args:
        specs: The parameters, all Muon and on one type of device; None: ``default_specs``. A spec with a layout is laid
            out so.
        mesh: One axis, or the replicas' axis and the shards' axis, over all ranks; None: all ranks shard.
        strategies: Names to try; None: ``"auto"`` and every one that some parameter can take. Each is tried on the
            parameters that can take it.
        backends: ``"aot_eager"`` runs the traced graph uncompiled.
        config: Mathematics of specs that have none.
        seed: Of the gradients.

    Returns:
        The report. A direction is right within ``STANDARD_BAR``, in Gram forms ``GRAM_BAR``; where some dtype is
        narrower than float32, within ``NARROW_FACTOR`` times the error of the standard form in one process.

    Raises:
        ValueError: Ranks and mesh do not fit, an unknown strategy or backend, or one that no parameter can take.
    """
    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    mesh = mesh or MeshSpec(axes=(("shard", ranks),) if ranks > 1 else ())
    if mesh.num_ranks != ranks:
        raise ValueError(
            f"verify: mesh: expected one of all {ranks} running rank(s), got {mesh.axes}; start as many ranks as it "
            "has with torchrun --nproc-per-node, or give another mesh."
        )
    for what, given, known in (("strategies", strategies or (), STRATEGIES), ("backends", backends, BACKENDS)):
        for name in given:
            if name not in known:
                raise ValueError(f"verify: {what}: expected names of {known}, got {name!r}.")
    wanted = tuple(default_specs(ranks) if specs is None else specs)
    _check_specs(wanted)
    wanted = tuple(dataclasses.replace(spec, strategy=None) for spec in wanted)  # every one is tried
    resolved = make_plan(wanted, mesh=mesh if ranks > 1 else None, config=config).specs
    laboratory = _Laboratory(resolved, mesh, seed)
    rows = []
    for strategy in STRATEGIES if strategies is None else strategies:
        chosen = [i for i, spec in enumerate(resolved) if _takes(spec, strategy)]
        if not chosen and strategies is not None:
            raise ValueError(
                f"verify: strategies: no parameter of specs can take {strategy!r} on {mesh.axes or 'one rank'}; leave "
                "it out, or give specs that can."
            )
        rows += [laboratory.row(strategy, backend, chosen) for backend in backends if chosen]
    return Report(rows=tuple(rows), num_params=len(resolved), axes=mesh.axes, seed=seed)


def _check_specs(specs: Sequence[MatrixSpec]) -> None:
    kinds = {spec.device.split(":")[0] for spec in specs}
    if len(kinds) > 1:
        raise ValueError(f"verify: specs: expected one type of device, got {sorted(kinds)}.")
    for spec in specs:
        if spec.algorithm != "muon" or spec.numel == 0 or spec.grad_dtype != spec.dtype:
            raise ValueError(
                f"Parameter {spec.name!r}: verify takes Muon parameters with entries, and gradients of their dtype; "
                f"got {spec.algorithm}, shape {spec.shape}, {spec.dtype} with {spec.grad_dtype} gradients."
            )


def _takes(spec: MatrixSpec, strategy: str) -> bool:
    """Whether a parameter is made whole by the strategy, and not left alone by it."""
    try:
        plan = make_plan([spec], strategy=strategy)
    except ValueError:  # the strategy is infeasible: everything else was checked with all specs
        return False
    used = {"local" if part.exchange is None else part.exchange.strategy for part in plan.parts}
    return strategy == "auto" or strategy in used


class _Laboratory:
    """Gradients, what they should lead to, and what the step makes of them."""

    def __init__(self, specs: Sequence[MatrixSpec], mesh: MeshSpec, seed: int) -> None:
        self.specs, self.mesh = specs, mesh
        self.device_mesh: DeviceMesh | None = None
        if mesh.num_ranks > 1:
            kind = specs[0].device.split(":")[0]
            names, sizes = zip(*mesh.axes, strict=True)
            self.device_mesh = init_device_mesh(kind, sizes, mesh_dim_names=names)
        generator = torch.Generator().manual_seed(seed)
        self.grads = [torch.randn(s.shape, generator=generator).to(getattr(torch, s.dtype)) for s in specs]
        self.expected = [reference_direction(g, s) for g, s in zip(self.grads, specs, strict=True)]
        narrow = [i for i, spec in enumerate(specs) if _is_narrow(spec)]
        self.own_errors: dict[int, float] = {}
        if narrow:
            _, own = self.errors(narrow, "standard", "auto", "aot_eager", None)
            self.own_errors = dict(zip(narrow, own, strict=True))

    def errors(
        self, chosen: Sequence[int], ns: str, strategy: str, backend: str, mesh: DeviceMesh | None
    ) -> tuple[Plan, list[float]]:
        """One step of the chosen parameters: its plan, and the error of each direction as this rank sees it."""
        groups = []
        for index in chosen:
            spec = self.specs[index]
            zeros = torch.zeros_like(self.grads[index])
            param = torch.nn.Parameter(_laid_out(zeros, spec, mesh))
            param.grad = _laid_out(self.grads[index], spec, mesh)
            groups.append({"params": [(spec.name, param)], "config": spec.config})
        # From zero, without decay and at lr 1, a parameter becomes its direction.
        optimizer = Muon(groups, lr=1.0, momentum=MOMENTUM, weight_decay=0.0, backend=backend)
        step = compile_step(optimizer, backend=backend, strategy=strategy, ns=ns)
        optimizer.step()
        found = []
        for index, group in zip(chosen, optimizer.param_groups, strict=True):
            (param,) = group["params"]
            whole = param.detach()
            whole = whole.full_tensor() if isinstance(whole, DTensor) else whole
            found.append(relative_error(-whole, self.expected[index]))
        plan = step.plan
        step.uninstall()
        return plan, found

    def row(self, strategy: str, backend: str, chosen: Sequence[int]) -> Row:
        """A strategy's row; every rank calls it."""
        plan, mine = self.errors(chosen, "auto", strategy, backend, self.device_mesh)
        errors = _worst_over_ranks(mine)
        forms = _forms(plan)
        parts = []
        for index, form, error in zip(chosen, forms, errors, strict=True):
            bar = STANDARD_BAR if form == {"standard"} else GRAM_BAR
            if index in self.own_errors:
                bar = NARROW_FACTOR * self.own_errors[index]
            parts.append(error / bar)
        loads = ns_flops(plan)
        return Row(
            strategy=strategy,
            backend=backend,
            form=", ".join(sorted(set.union(*forms))),
            num_params=len(chosen),
            worst_error=max(errors),
            mean_error=sum(errors) / len(errors),
            worst_of_bar=max(parts),
            bytes_per_rank=sum(spec.bytes_per_rank for spec in plan.collectives),
            sent_bytes=max(sent_by_rank(plan)),
            collectives=len(plan.collectives),
            busiest_over_mean=max(loads) * len(loads) / sum(loads),
            ok=max(parts) <= 1.0,
        )


def _is_narrow(spec: MatrixSpec) -> bool:
    assert isinstance(spec.config, MuonConfig)
    dtypes = (spec.dtype, spec.config.momentum_dtype or spec.dtype, spec.config.ns_dtype)
    return min(FLOAT_BYTES[dtype] for dtype in dtypes) < FLOAT_BYTES["float32"]


def _laid_out(whole: Tensor, spec: MatrixSpec, mesh: DeviceMesh | None) -> Tensor:
    """A tensor that every rank has, as the spec's layout says; without a mesh all of it."""
    if mesh is None:
        return whole.to(spec.device, copy=True)
    layout = spec.layout
    assert isinstance(layout, ShardLayout) and mesh.mesh_dim_names is not None
    names = mesh.mesh_dim_names
    placements = [Shard(layout.dim) if n == layout.axis and layout.dim is not None else Replicate() for n in names]
    # Every rank cuts its own: whole is the same everywhere.
    return distribute_tensor(whole.to(mesh.device_type, copy=True), mesh, placements, src_data_rank=None)


def _worst_over_ranks(errors: list[float]) -> list[float]:
    if not (dist.is_available() and dist.is_initialized()):
        return errors
    rows: list[list[float]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(rows, errors)
    return [max(column) for column in zip(*rows, strict=True)]


def _forms(plan: Plan) -> list[set[str]]:
    """The forms of each parameter's matrices."""
    forms: list[set[str]] = [set() for _ in plan.specs]
    for index, part in enumerate(plan.parts):
        bucket = plan.stretch(index).bucket
        assert bucket.view is not None
        made = {find_choice(plan.choices, bucket, rows).form for rows in bucket.view.blocks}
        for param in bucket.params:
            forms[param] |= made if part.exchange is None else {part.exchange.form}
    return forms


def ns_flops(plan: Plan) -> list[int]:
    """Newton-Schulz FLOPs of every rank: what is exchanged, and what needs no other rank."""
    loads = rank_flops(plan)
    for rank in range(len(loads)):
        at = plan.mesh.coordinates(rank)
        local = localize(plan, lambda layout, at=at: at[layout.axis])  # type: ignore[misc]
        loads[rank] += sum(batch.flops for batch in local.batches)
    return loads


def sent_by_rank(plan: Plan) -> list[int]:
    """Bytes that every rank sends per step, the agreement on gradients apart."""
    sent = []
    for rank in range(plan.mesh.num_ranks):
        at = plan.mesh.coordinates(rank)
        exchanges = [part.exchange for part in plan.parts if part.exchange is not None]
        places = [(at.get(e.shard_axis or "", 0), at.get(e.replica_axis or "", 0)) for e in exchanges]
        sent.append(sum(sent_bytes(e, *place) for e, place in zip(exchanges, places, strict=True)))
    return sent
