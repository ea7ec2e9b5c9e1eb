"""Make a step's plan from its live parameters, the same on every rank that shares a group."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Literal

import torch.distributed as dist

from muon_compile.config import CompileConfig, MuonConfig, ProductDTypeName
from muon_compile.plan.hardware import PRESETS, Hardware
from muon_compile.plan.plan import Plan
from muon_compile.plan.planner import make_plan
from muon_compile.run.agreement import check_groups, compare, from_first_rank
from muon_compile.run.calibrate import local_hardware
from muon_compile.run.calibrate_group import calibrate_group
from muon_compile.run.reading import Reading
from muon_compile.spec import MatrixSpec

_LOG = logging.getLogger("muon_compile")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What ``compile_step`` was asked for, as far as the plan depends on it.

    Args:
        strategy: How sharded matrices are made whole.
        ns: Newton-Schulz form.
        config: What is about compiling.
        hardware: Figures; ``"auto"``: this machine and the network among its ranks, measured; None: on a CPU the first
            rank's machine alone, on accelerators a preset.
    """

    strategy: str
    ns: str
    config: CompileConfig
    hardware: Hardware | Literal["auto"] | None
    backend: str = "inductor"


def hardware_named(name: object) -> Hardware | Literal["auto"]:
    """A preset by its name; ``"auto"`` stays.

    Raises:
        TypeError: Neither.
    """
    if name == "auto":
        return "auto"
    if isinstance(name, str) and name in PRESETS:
        return PRESETS[name]
    raise TypeError(
        f"compile_step: hardware: expected a Hardware, 'auto' or one of {', '.join(map(repr, PRESETS))}, got {name!r}."
    )


def plan_reading(reading: Reading, wishes: Wishes) -> tuple[Plan, Hardware | None]:
    """The plan of what the optimizers hold, and the figures that decided it; ranks that share a group compare plans.

    Raises:
        ValueError, NotImplementedError: What ``make_plan`` refuses.
        RuntimeError: Ranks have other parameters or other figures.
    """
    config = wishes.config
    check_groups(reading.params)
    hardware = _hardware(reading, wishes)
    plan = make_plan(
        [_with_dtype(spec, config.ns_dtype) for spec in reading.specs],
        strategy=wishes.strategy,
        ns=wishes.ns,
        exact=config.exact,
        replicas=config.replicas,
        comm_dtype=config.comm_dtype,
        max_temp_bytes=config.max_temp_bytes,
        max_gather_bytes=config.max_gather_bytes,
        node_size=config.node_size,
        clip_grad_norm=None if config.clip_grad_norm is None else float(config.clip_grad_norm),
        skip_nonfinite=config.nonfinite != "allow",
        master_weights=config.master_weights,
        rounding=config.rounding,
        hardware=hardware,
    )
    if plan.temp_bytes > config.max_temp_bytes:
        _LOG.warning(
            "a step's temporaries take %d bytes at once, more than max_temp_bytes=%d: a single matrix is never cut",
            plan.temp_bytes,
            config.max_temp_bytes,
        )
    groups = reading.meshes.groups()
    if groups:
        compare("plan", plan.digest, [str(spec) for spec in plan.specs], groups)
    return plan, hardware


def _with_dtype(spec: MatrixSpec, ns_dtype: ProductDTypeName | None) -> MatrixSpec:
    """The spec with another dtype of its products."""
    if ns_dtype is None or not isinstance(spec.config, MuonConfig):
        return spec
    return replace(spec, config=replace(spec.config, ns_dtype=ns_dtype))


def _hardware(reading: Reading, wishes: Wishes) -> Hardware | None:
    """Figures that decide a plan are the same everywhere: others take the first rank's."""
    groups, hardware = reading.meshes.groups(), wishes.hardware
    kinds = {spec.device.split(":")[0] for spec in reading.specs if spec.algorithm == "muon"}
    first = all(dist.get_rank(group) == 0 for group in groups)
    if hardware == "auto":
        if kinds - {"cpu"}:
            raise ValueError(
                f"compile_step: hardware: 'auto' measures CPUs, and parameters are on {sorted(kinds)}; expected a "
                f"Hardware, one of {', '.join(map(repr, PRESETS))}, or None for the preset of their kind."
            )
        hardware = calibrate_group(groups[0]) if groups else local_hardware()
    elif wishes.backend == "torchair":
        pass  # what it compiles for is not what runs here, where there is no NPU
    elif hardware is None and "cpu" in kinds and not wishes.config.exact and first:
        hardware = local_hardware()
    return from_first_rank(hardware, groups) if groups else hardware
