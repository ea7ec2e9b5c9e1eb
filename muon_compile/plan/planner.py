"""Sort parameters into buckets, buckets into Newton-Schulz batches, and both into waves."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

from muon_compile.config import AdamWConfig, MuonConfig
from muon_compile.plan.plan import Batch, Bucket, Piece, Plan, Wave, numel_bytes
from muon_compile.spec import MatrixSpec, MeshSpec, matrix_view

STRATEGIES = ("auto", "local")
DEFAULT_MAX_TEMP_BYTES = 2 * 1024**3


def make_plan(
    specs: Iterable[MatrixSpec],
    *,
    config: MuonConfig | None = None,
    adamw: AdamWConfig | None = None,
    mesh: MeshSpec | None = None,
    strategy: str = "auto",
    ns: str = "auto",
    exact: bool = False,
    max_temp_bytes: int = DEFAULT_MAX_TEMP_BYTES,
) -> Plan:
    """Make the plan of a step. Deterministic: equal arguments give equal plans, on any machine.

    Args:
        specs: The parameters, in the order in which the step will be given them.
        config: Mathematics of Muon parameters whose spec has no config.
        adamw: Mathematics of AdamW parameters whose spec has no config.
        mesh: Mesh of ranks; one rank where it is None.
        strategy: ``"auto"`` or ``"local"``: nothing is sharded on one rank.
        ns: Iteration form, ``"auto"`` or ``"standard"``.
        exact: Stock operator order and roundings.
        max_temp_bytes: Bound on the temporaries of a wave, in bytes.

    Raises:
        ValueError: No specs, a name twice, unknown strategy or form, shapes that do not fit their config.
        NotImplementedError: The mesh has more than one rank.
    """
    specs = tuple(specs)
    _check(specs, mesh, strategy, ns)
    if max_temp_bytes <= 0:
        raise ValueError(f"make_plan: max_temp_bytes: expected a positive number of bytes, got {max_temp_bytes}.")
    resolved = tuple(_with_config(spec, config or MuonConfig(), adamw or AdamWConfig()) for spec in specs)
    if exact:
        _check_exact(resolved)
    buckets = _make_buckets(resolved)
    batches = _make_batches(buckets)
    return Plan(
        specs=resolved,
        buckets=buckets,
        batches=batches,
        waves=_make_waves(buckets, batches, max_temp_bytes),
        mesh=mesh or MeshSpec(),
        exact=exact,
    )


def _check(specs: Sequence[MatrixSpec], mesh: MeshSpec | None, strategy: str, ns: str) -> None:
    if not specs:
        raise ValueError("make_plan: expected at least one parameter, got none.")
    seen: set[str] = set()
    for spec in specs:
        if spec.name in seen:
            raise ValueError(f"make_plan: expected unique names, got {spec.name!r} twice.")
        seen.add(spec.name)
    if strategy not in STRATEGIES:
        raise ValueError(f"make_plan: strategy: expected one of {STRATEGIES}, got {strategy!r}.")
    if ns not in ("auto", "standard"):
        raise ValueError(f"make_plan: ns: expected 'auto' or 'standard', got {ns!r}.")
    if mesh is not None and mesh.num_ranks > 1:
        raise NotImplementedError(
            f"make_plan: expected a mesh of one rank, got {mesh.num_ranks} ranks {mesh.axes}; "
            "sharded and replicated steps are not in this version."
        )


def _with_config(spec: MatrixSpec, muon: MuonConfig, adamw: AdamWConfig) -> MatrixSpec:
    config = spec.config or (muon if spec.algorithm == "muon" else adamw)
    if isinstance(config, MuonConfig) and config.ns_dtype == "float16" and spec.device.startswith("cpu"):
        raise ValueError(
            f"Parameter {spec.name!r}: ns_dtype: float16 products are emulated on CPUs, about a thousand times slower "
            "than bfloat16; expected 'bfloat16' or 'float32' for a parameter on the CPU."
        )
    return dataclasses.replace(spec, config=config)


def _check_exact(specs: Sequence[MatrixSpec]) -> None:
    for spec in specs:
        config = spec.config
        if not isinstance(config, MuonConfig):
            continue
        stock = (
            config.momentum_form == "ema"
            and config.ns_dtype == "bfloat16"
            and config.eps_mode == "clamp"
            and config.eps != "relative"
            and config.momentum_dtype in (None, spec.grad_dtype)
        )
        if stock and not config.nesterov and spec.grad_dtype == "bfloat16":
            raise ValueError(
                f"Parameter {spec.name!r}: exact=True with nesterov=False and bfloat16 gradients: torch.optim.Muon "
                "then normalizes its momentum buffer in place (its .bfloat16() is no copy), which exact mode does not "
                "reproduce; expected nesterov=True, float32 gradients, or exact=False."
            )
        if not stock:
            raise ValueError(
                f"Parameter {spec.name!r}: exact=True reproduces torch.optim.Muon, so it expects preset 'torch' "
                "(ema momentum in the gradient's dtype, bfloat16 Newton-Schulz, a clamped eps), "
                f"got {config}."
            )


def _state_dtype(spec: MatrixSpec) -> str:
    assert spec.grad_dtype is not None
    if isinstance(spec.config, MuonConfig):
        return spec.config.momentum_dtype or spec.grad_dtype
    return spec.dtype


def _make_buckets(specs: Sequence[MatrixSpec]) -> tuple[Bucket, ...]:
    members: dict[tuple[object, ...], list[int]] = {}
    for index, spec in enumerate(specs):
        key = (spec.algorithm, spec.shape, spec.dtype, spec.grad_dtype, spec.device, spec.config)
        members.setdefault(key, []).append(index)
    buckets = []
    for number, indices in enumerate(members.values()):
        # Sorted by group, so that a per-matrix hyperparameter is a few runs of equal values.
        indices.sort(key=lambda i: specs[i].group)
        spec = specs[indices[0]]
        assert spec.config is not None and spec.grad_dtype is not None
        view = matrix_view(spec, spec.config) if isinstance(spec.config, MuonConfig) else None
        buckets.append(
            Bucket(
                name=f"{spec.algorithm}{number}",
                algorithm=spec.algorithm,
                params=tuple(indices),
                groups=tuple(specs[i].group for i in indices),
                shape=spec.shape,
                dtype=spec.dtype,
                grad_dtype=spec.grad_dtype,
                state_dtype=_state_dtype(spec),
                device=spec.device,
                config=spec.config,
                view=view,
            )
        )
    return tuple(buckets)


def _make_batches(buckets: Sequence[Bucket]) -> tuple[Batch, ...]:
    found: dict[tuple[object, ...], list[Piece]] = {}
    configs: dict[tuple[object, ...], MuonConfig] = {}
    for index, bucket in enumerate(buckets):
        if bucket.view is None or math.prod(bucket.shape) == 0:
            continue
        config = bucket.config
        assert isinstance(config, MuonConfig)
        start = 0
        for rows in bucket.view.blocks:
            iteration = (config.ns_dtype, config.ns_steps, config.coefficients, config.eps, config.eps_mode)
            key = (rows, bucket.view.cols, bucket.device, *iteration)
            count = bucket.size * bucket.view.stacks
            piece = Piece(bucket=index, start=start, rows=rows, num_matrices=count)
            found.setdefault(key, []).append(piece)
            configs.setdefault(key, config)
            start += rows
    return tuple(
        Batch(
            name=f"ns{number}",
            rows=pieces[0].rows,
            cols=_view_cols(buckets, pieces[0]),
            device=buckets[pieces[0].bucket].device,
            config=configs[key],
            pieces=tuple(pieces),
            form="standard",
            kernel="graph",
            reason="the only form of this version",
        )
        for number, (key, pieces) in enumerate(found.items())
    )


def _view_cols(buckets: Sequence[Bucket], piece: Piece) -> int:
    view = buckets[piece.bucket].view
    assert view is not None
    return view.cols


def _make_waves(buckets: Sequence[Bucket], batches: Sequence[Batch], bound: int) -> tuple[Wave, ...]:
    """Group what must live together (a bucket and its batches), then fill waves up to the bound, in order."""
    root = list(range(len(buckets)))

    def find(i: int) -> int:
        while root[i] != i:
            i = root[i]
        return i

    for batch in batches:
        first = find(batch.pieces[0].bucket)
        for piece in batch.pieces:
            other = find(piece.bucket)
            root[max(first, other)] = first = min(first, other)
    islands: dict[int, list[int]] = {}
    for index in range(len(buckets)):
        islands.setdefault(find(index), []).append(index)

    waves: list[Wave] = []
    current: list[int] = []
    used = 0

    def flush() -> None:
        inside = set(current)
        which = tuple(i for i, batch in enumerate(batches) if batch.pieces[0].bucket in inside)
        waves.append(Wave(buckets=tuple(current), batches=which, temp_bytes=used))

    for island in islands.values():
        size = sum(bucket_temp_bytes(buckets[i]) for i in island)
        if current and used + size > bound:
            flush()
            current, used = [], 0
        current += island
        used += size
    if current:
        flush()
    return tuple(waves)


def bucket_temp_bytes(bucket: Bucket) -> int:
    """Bytes that a bucket keeps alive at once: stacked gradient, direction, and the iteration's two products."""
    numel = bucket.size * math.prod(bucket.shape)
    total = numel_bytes(numel, bucket.grad_dtype) if bucket.size > 1 else 0
    if bucket.view is None:
        return total + numel_bytes(numel, "float32")
    config = bucket.config
    assert isinstance(config, MuonConfig)
    small = min(max(bucket.view.blocks), bucket.view.cols)
    grams = bucket.size * bucket.view.stacks * len(bucket.view.blocks) * small * small
    return total + numel_bytes(2 * numel + 2 * grams, config.ns_dtype)
