"""Sort parameters into buckets, buckets into Newton-Schulz batches, and both into waves."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

from muon_compile.config import AdamWConfig, MuonConfig
from muon_compile.plan.choose import Choice, choose_dtype, choose_form
from muon_compile.plan.forms import parse_form
from muon_compile.plan.hardware import Hardware, default_hardware
from muon_compile.plan.plan import Batch, Bucket, Part, Piece, Plan, Wave, resolve_part
from muon_compile.plan.waves import cut_buckets, fill_waves, part_temp_bytes
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
    hardware: Hardware | None = None,
) -> Plan:
    """Make the plan of a step. Deterministic: equal arguments give equal plans, on any machine.

    Args:
        specs: The parameters, in the order in which the step will be given them.
        config: Mathematics of Muon parameters whose spec has no config.
        adamw: Mathematics of AdamW parameters whose spec has no config.
        mesh: Mesh of ranks; one rank where it is None.
        strategy: ``"auto"`` or ``"local"``: nothing is sharded on one rank.
        ns: Iteration form: ``"auto"`` takes, batch by batch, the fastest one that is accurate enough; or one's name
            (``plan.forms``), such as ``"standard"`` or ``"gram_split:2,3"``.
        exact: Stock operator order and roundings, in the standard form.
        max_temp_bytes: Bound on the temporaries that are alive at once, in bytes: buckets beyond it wait for the next
            wave, a larger bucket is cut. A single matrix is never cut.
        hardware: Figures of the machine that will run the plan, for devices of its type; other devices and None take
            a fixed preset.

    Raises:
        ValueError: No specs, a name twice, unknown strategy or form, shapes that do not fit their config.
        NotImplementedError: The mesh has more than one rank.
    """
    specs = tuple(specs)
    _check(specs, mesh, strategy)
    if max_temp_bytes <= 0:
        raise ValueError(f"make_plan: max_temp_bytes: expected a positive number of bytes, got {max_temp_bytes}.")
    default = config or MuonConfig()
    resolved = tuple(_with_config(spec, default, adamw or AdamWConfig(), hardware, exact) for spec in specs)
    _check_form(ns, exact, [spec.config for spec in resolved if isinstance(spec.config, MuonConfig)] or [default])
    if exact:
        _check_exact(resolved)
    buckets = _make_buckets(resolved)
    native = hardware is not None and hardware.native and not exact
    choices = _choose(buckets, ns, exact, hardware)

    def kernel_of(bucket: Bucket, rows: int) -> tuple[str, str]:
        choice = choices[_iteration_key(bucket, rows)]
        return choice.form, choice.kernel

    def temp_bytes(bucket: Bucket) -> int:
        return part_temp_bytes(bucket, kernel_of, native and bucket.device.startswith("cpu"))

    parts = cut_buckets(buckets, max_temp_bytes, temp_bytes)
    sizes = [temp_bytes(resolve_part(buckets, part).bucket) for part in parts]
    batches: list[Batch] = []
    waves: list[Wave] = []
    for wave in fill_waves(sizes, max_temp_bytes):
        made = _make_batches(buckets, parts, wave, choices, len(batches))
        which = tuple(range(len(batches), len(batches) + len(made)))
        waves.append(Wave(parts=wave, batches=which, temp_bytes=sum(sizes[i] for i in wave)))
        batches += made
    return Plan(
        specs=resolved,
        buckets=buckets,
        parts=parts,
        batches=tuple(batches),
        waves=tuple(waves),
        mesh=mesh or MeshSpec(),
        exact=exact,
        native=native,
    )


def _check(specs: Sequence[MatrixSpec], mesh: MeshSpec | None, strategy: str) -> None:
    if not specs:
        raise ValueError("make_plan: expected at least one parameter, got none.")
    seen: set[str] = set()
    for spec in specs:
        if spec.name in seen:
            raise ValueError(f"make_plan: expected unique names, got {spec.name!r} twice.")
        seen.add(spec.name)
    if strategy not in STRATEGIES:
        raise ValueError(f"make_plan: strategy: expected one of {STRATEGIES}, got {strategy!r}.")
    if mesh is not None and mesh.num_ranks > 1:
        raise NotImplementedError(
            f"make_plan: expected a mesh of one rank, got {mesh.num_ranks} ranks {mesh.axes}; "
            "sharded and replicated steps are not in this version."
        )


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
        return dataclasses.replace(spec, config=config)
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
        config = dataclasses.replace(config, ns_dtype="bfloat16" if exact else dtype)
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


def _iteration_key(bucket: Bucket, rows: int) -> tuple[object, ...]:
    """Matrices of one key may run through Newton-Schulz together."""
    config, view = bucket.config, bucket.view
    assert isinstance(config, MuonConfig) and view is not None
    iteration = (config.ns_dtype, config.ns_steps, config.coefficients, config.eps, config.eps_mode)
    return (rows, view.cols, bucket.device, *iteration)


def _choose(buckets: Sequence[Bucket], ns: str, exact: bool, hardware: Hardware | None) -> dict[object, Choice]:
    """Form and kernel of every key, chosen for all of its matrices, however they are cut later."""
    counts: dict[object, int] = {}
    first: dict[object, tuple[Bucket, int]] = {}
    for bucket in buckets:
        for rows in bucket.view.blocks if bucket.view is not None else ():
            assert bucket.view is not None
            same = _iteration_key(bucket, rows)
            counts[same] = counts.get(same, 0) + bucket.size * bucket.view.stacks
            first.setdefault(same, (bucket, rows))
    choices: dict[object, Choice] = {}
    for key, (bucket, rows) in first.items():
        assert bucket.view is not None and isinstance(bucket.config, MuonConfig)
        dims = (counts[key], rows, bucket.view.cols)
        machine = _hardware_of(bucket.device, hardware)
        choices[key] = choose_form(dims, bucket.config, machine, ns, exact=exact)
    return choices


def _make_batches(
    buckets: Sequence[Bucket], parts: Sequence[Part], wave: Sequence[int], choices: dict[object, Choice], first: int
) -> list[Batch]:
    """The batches of one wave's parts, named from ``first`` on."""
    found: dict[object, list[Piece]] = {}
    for index in wave:
        bucket = resolve_part(buckets, parts[index]).bucket
        if bucket.view is None or math.prod(bucket.shape) == 0:
            continue
        start = 0
        for rows in bucket.view.blocks:
            piece = Piece(part=index, start=start, rows=rows, num_matrices=bucket.size * bucket.view.stacks)
            found.setdefault(_iteration_key(bucket, rows), []).append(piece)
            start += rows
    batches = []
    for number, (key, pieces) in enumerate(found.items(), start=first):
        bucket = buckets[parts[pieces[0].part].bucket]
        assert bucket.view is not None and isinstance(bucket.config, MuonConfig)
        batches.append(
            Batch(
                name=f"ns{number}",
                rows=pieces[0].rows,
                cols=bucket.view.cols,
                device=bucket.device,
                config=bucket.config,
                pieces=tuple(pieces),
                form=choices[key].form,
                kernel=choices[key].kernel,
                reason=choices[key].reason,
            )
        )
    return batches
