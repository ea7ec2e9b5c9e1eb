"""Sort parameters into buckets, buckets into Newton-Schulz batches, and both into waves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Literal

from muon_compile.config import AdamWConfig, MuonConfig
from muon_compile.plan.assemble import best_plan
from muon_compile.plan.choose import choose_dtype, choose_form
from muon_compile.plan.exchange import STRATEGY_NAMES
from muon_compile.plan.forms import parse_form
from muon_compile.plan.hardware import Hardware, default_hardware
from muon_compile.plan.plan import Bucket, FormChoice, Plan, iteration_key
from muon_compile.plan.sharding import Rules, rank_strategies
from muon_compile.spec import FLOAT_BYTES, MatrixSpec, MeshSpec, Rounding, ShardLayout, chunk_sizes, matrix_view

STRATEGIES = ("auto", *STRATEGY_NAMES)
DEFAULT_MAX_TEMP_BYTES = 2 * 1024**3
DEFAULT_MAX_GATHER_BYTES = 1024**3


def make_plan(
    specs: Iterable[MatrixSpec],
    *,
    config: MuonConfig | None = None,
    adamw: AdamWConfig | None = None,
    mesh: MeshSpec | None = None,
    strategy: str = "auto",
    ns: str = "auto",
    exact: bool = False,
    replicas: str = "divide",
    comm_dtype: str | None = None,
    max_temp_bytes: int = DEFAULT_MAX_TEMP_BYTES,
    max_gather_bytes: int = DEFAULT_MAX_GATHER_BYTES,
    node_size: int | None = None,
    clip_grad_norm: float | None = None,
    skip_nonfinite: bool = False,
    master_weights: bool = False,
    rounding: Literal["nearest", "stochastic"] = "nearest",
    hardware: Hardware | None = None,
) -> Plan:
    """Make the plan of a step. Deterministic: equal arguments give equal plans, on any machine.

    Args:
        specs: The parameters, in the order in which the step will be given them.
        config: Mathematics of Muon parameters whose spec has no config.
        adamw: Mathematics of AdamW parameters whose spec has no config.
        mesh: Mesh that specs without a layout lie on, as fully_shard cuts them; None: each rank has its own.
        strategy: How matrices that lie on several ranks are made whole (``plan.exchange``): ``"auto"``, bucket by
            bucket the one predicted to be fastest, or one name for all whose spec names none. Without effect on
            matrices that lie on one rank.
        ns: Iteration form: ``"auto"`` takes, batch by batch, the fastest one that is accurate enough; or one's name
            (``plan.forms``), such as ``"standard"`` or ``"gram_split:2,3"``.
        exact: Stock operator order and roundings, in the standard form.
        replicas: Ranks that hold copies ``"divide"`` the matrices among them, or ``"repeat"`` the work.
        comm_dtype: dtype of momenta and results on the wire; None takes that of the products. Grams go in float32.
        max_temp_bytes: Bound on the temporaries that are alive at once, in bytes: buckets beyond it wait for the next
            wave, a larger bucket is cut. A single matrix is never cut.
        max_gather_bytes: The same for what is gathered from other ranks.
        node_size: Consecutive ranks of a shard axis that are a node to ``"hierarchical_all_to_all"``; None: those of
            the network, or as many as leave a rank the fewest peers (``plan.exchange.default_node_size``).
        clip_grad_norm: What all gradients' norm is clipped to; None: it is not.
        skip_nonfinite: A NaN or an infinity in any gradient leaves everything as it was, on all ranks.
        master_weights: The state has a float32 copy of every parameter of fewer bits, which the step goes on from.
        rounding: How the step rounds to bfloat16 parameters that have no master.
        hardware: Figures of the machine that will run the plan, for devices of its type; other devices and None take
            a fixed preset.

    Raises:
        ValueError: No specs, a name twice, unknown strategy or form, shapes that do not fit their config, or more
            connections than the network's devices hold.
        NotImplementedError: A layout that the step does not know.
    """
    specs = tuple(specs)
    _check(specs, strategy)
    if replicas not in ("divide", "repeat"):
        raise ValueError(f"make_plan: replicas: expected 'divide' or 'repeat', got {replicas!r}.")
    for what, value in (("max_temp_bytes", max_temp_bytes), ("max_gather_bytes", max_gather_bytes)):
        if value <= 0:
            raise ValueError(f"make_plan: {what}: expected a positive number of bytes, got {value}.")
    if node_size is not None and node_size < 1:
        raise ValueError(f"make_plan: node_size: expected a positive number of ranks, or None, got {node_size}.")
    if mesh is not None:
        specs = tuple(s if s.layout else replace(s, layout=default_layout(s, mesh)) for s in specs)
    default = config or MuonConfig()
    resolved = tuple(_with_config(spec, default, adamw or AdamWConfig(), hardware, exact) for spec in specs)
    _check_form(ns, exact, [spec.config for spec in resolved if isinstance(spec.config, MuonConfig)] or [default])
    if exact:
        _check_exact(resolved)
        if clip_grad_norm is not None or skip_nonfinite:
            raise ValueError(
                "make_plan: exact=True reproduces torch.optim.Muon, which neither clips nor skips; expected no "
                "clip_grad_norm and nonfinite='allow'. Clip with torch.nn.utils.clip_grad_norm_ before the step."
            )
        if master_weights or rounding != "nearest":
            raise ValueError(
                "make_plan: exact=True reproduces torch.optim.Muon, which rounds every update to the nearest; expected "
                "master_weights=False and rounding='nearest'."
            )
    devices = sorted({spec.device for spec in resolved})
    if (clip_grad_norm is not None or skip_nonfinite) and len(devices) > 1:
        raise ValueError(
            f"make_plan: clip_grad_norm and nonfinite: expected all parameters on one device, got {devices}; clip "
            "with torch.nn.utils.clip_grad_norm_ before the step."
        )
    buckets = _rounded(_make_buckets(resolved), resolved, master_weights, rounding)
    choices = _choose(buckets, ns, exact, hardware)
    rules = Rules(
        strategy=strategy,
        divide=replicas == "divide",
        comm_dtype=comm_dtype,
        max_temp_bytes=max_temp_bytes,
        max_gather_bytes=max_gather_bytes,
        hardware_of=lambda device: _hardware_of(device, hardware),
        name_of=lambda bucket: resolved[bucket.params[0]].name,
        node_size=node_size,
    )
    native = hardware is not None and hardware.native and not exact
    start = Plan(
        specs=resolved,
        buckets=buckets,
        parts=(),
        choices=choices,
        batches=(),
        waves=(),
        mesh=mesh or _mesh_of(resolved),
        strategy=strategy,
        exact=exact,
        native=native,
        clip_grad_norm=clip_grad_norm,
        skip_nonfinite=skip_nonfinite,
    )
    rankings = rank_strategies(buckets, choices, rules)
    return best_plan(start, rankings, rules)


def _mesh_of(specs: Sequence[MatrixSpec]) -> MeshSpec:
    return next((spec.layout.mesh for spec in specs if spec.layout is not None), MeshSpec())


def default_layout(spec: MatrixSpec, mesh: MeshSpec) -> ShardLayout:
    """What fully_shard does: dim 0 cut over the last axis, copies over the one before it."""
    axes = [axis for axis, size in mesh.axes if size > 1]
    if len(axes) > 2:
        raise NotImplementedError(f"make_plan: expected at most two mesh axes of more than one rank, got {mesh.axes}.")
    if not spec.shape or not axes:
        return ShardLayout(mesh=mesh)
    sizes = chunk_sizes(spec.shape[0], mesh.size(axes[-1]))
    replica = axes[0] if len(axes) == 2 else None
    return ShardLayout(mesh=mesh, axis=axes[-1], dim=0, sizes=sizes, replica_axis=replica)


def _check(specs: Sequence[MatrixSpec], strategy: str) -> None:
    if not specs:
        raise ValueError("make_plan: expected at least one parameter, got none.")
    seen: set[str] = set()
    for spec in specs:
        if spec.name in seen:
            raise ValueError(f"make_plan: expected unique names, got {spec.name!r} twice.")
        seen.add(spec.name)
        if spec.strategy not in (None, *STRATEGIES):
            raise ValueError(
                f"Parameter {spec.name!r}: strategy: expected one of {STRATEGIES}, or None for that of all others, "
                f"got {spec.strategy!r}."
            )
    if strategy not in STRATEGIES:
        raise ValueError(f"make_plan: strategy: expected one of {STRATEGIES}, got {strategy!r}.")


def _check_form(ns: str, exact: bool, configs: Sequence[MuonConfig]) -> None:
    if exact and ns not in ("auto", "standard"):
        raise ValueError(
            f"make_plan: ns: exact=True is the standard form; expected 'auto' or 'standard' beside it, got {ns!r}."
        )
    for steps in dict.fromkeys(config.ns_steps for config in configs) if ns != "auto" else ():
        parse_form(str(ns), steps)


def _hardware_of(device: str, given: Hardware | None) -> Hardware:
    """The given figures for a device of their type, else the type's preset."""
    return given if given is not None and given.device == device.split(":")[0] else default_hardware(device)


def _with_config(
    spec: MatrixSpec, muon: MuonConfig, adamw: AdamWConfig, hardware: Hardware | None, exact: bool
) -> MatrixSpec:
    config = spec.config or (muon if spec.algorithm == "muon" else adamw)
    if not isinstance(config, MuonConfig):
        return replace(spec, config=config)
    if config.ns_dtype == "float16" and spec.device.startswith("cpu"):
        raise ValueError(
            f"Parameter {spec.name!r}: ns_dtype: float16 products are emulated in software on most CPUs, and float16 "
            "has so few exponents that the iteration may overflow; expected 'auto', 'bfloat16' or 'float32' for a "
            "parameter on the CPU."
        )
    if config.ns_dtype == "auto":
        view = matrix_view(spec, config)
        dtype = choose_dtype(max(view.blocks), view.cols, _hardware_of(spec.device, hardware))
        # Exact is stock's bfloat16, whatever the machine is fast at.
        config = replace(config, ns_dtype="bfloat16" if exact else dtype)
    return replace(spec, config=config)


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
        what = (spec.algorithm, spec.shape, spec.dtype, spec.grad_dtype, spec.device)
        key = (*what, spec.config, spec.layout, spec.strategy)
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
                layout=spec.layout,
                strategy=spec.strategy,
            )
        )
    return tuple(buckets)


def _rounded(
    buckets: Sequence[Bucket], specs: Sequence[MatrixSpec], master_weights: bool, rounding: str
) -> tuple[Bucket, ...]:
    """The buckets that are narrower than float32 with their way of rounding.

    Raises:
        ValueError: An unknown one, masters as well, or a dtype that it is not for.
    """
    if rounding not in ("nearest", "stochastic"):
        raise ValueError(f"make_plan: rounding: expected 'nearest' or 'stochastic', got {rounding!r}.")
    if master_weights and rounding != "nearest":
        raise ValueError(
            "make_plan: expected either master_weights=True or rounding='stochastic', got both: a parameter is its "
            "master, rounded to the nearest."
        )
    kept: Rounding = "master" if master_weights else "stochastic" if rounding == "stochastic" else "nearest"
    narrow = [bucket for bucket in buckets if FLOAT_BYTES[bucket.dtype] < FLOAT_BYTES["float32"]]
    for bucket in narrow if kept == "stochastic" else ():
        if bucket.dtype != "bfloat16":
            raise ValueError(
                f"Parameter {specs[bucket.params[0]].name!r}: rounding='stochastic': expected bfloat16 or float32 and "
                f"wider, got {bucket.dtype}; take master_weights=True."
            )

    def marked(bucket: Bucket) -> Bucket:
        # What AdamW's second moment grows by is lost in bfloat16 as a small update is: with masters it is float32 too.
        wide = kept == "master" and bucket.algorithm == "adamw"
        return replace(bucket, rounding=kept, state_dtype="float32" if wide else bucket.state_dtype)

    return tuple(marked(bucket) if bucket in narrow else bucket for bucket in buckets)


def _choose(buckets: Sequence[Bucket], ns: str, exact: bool, hardware: Hardware | None) -> tuple[FormChoice, ...]:
    """Form and kernel of every kind of matrix, chosen for all of its like, however they are cut later."""
    counts: dict[tuple[object, ...], int] = {}
    first: dict[tuple[object, ...], tuple[Bucket, int]] = {}
    for bucket in buckets:
        for rows in bucket.view.blocks if bucket.view is not None else ():
            assert bucket.view is not None and isinstance(bucket.config, MuonConfig)
            same = (rows, bucket.view.cols, bucket.device, iteration_key(bucket.config))
            counts[same] = counts.get(same, 0) + bucket.size * bucket.view.stacks
            first.setdefault(same, (bucket, rows))
    choices = []
    for key, (bucket, rows) in first.items():
        assert bucket.view is not None and isinstance(bucket.config, MuonConfig)
        cols, config = bucket.view.cols, bucket.config
        machine = _hardware_of(bucket.device, hardware)
        form, kernel, reason = choose_form((counts[key], rows, cols), config, machine, ns, exact=exact)
        choices.append(
            FormChoice(
                rows=rows, cols=cols, device=bucket.device, config=config, form=form, kernel=kernel, reason=reason
            )
        )
    return tuple(choices)
