"""Compile a whole Muon optimizer step, its collectives inside, into one static graph."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from muon_compile.adapters import Adapter, register_adapter
    from muon_compile.build.pure import build_step, init_state
    from muon_compile.build.symmetric import register_symmetric_kernel
    from muon_compile.config import AdamWConfig, CompileConfig, LionConfig, MuonConfig
    from muon_compile.conversion.convert import convert_state
    from muon_compile.layout import inspect_params
    from muon_compile.lower.compiled import CompileError
    from muon_compile.optim import Muon
    from muon_compile.plan.hardware import Hardware
    from muon_compile.plan.models import model_specs
    from muon_compile.plan.plan import Plan
    from muon_compile.plan.planner import make_plan
    from muon_compile.plan.simulate import simulate
    from muon_compile.routing import route
    from muon_compile.run.compiled_step import CompiledStep, compile_step
    from muon_compile.run.probes import BucketProbes, Probes
    from muon_compile.run.stats import StepStats
    from muon_compile.run.train_step import TrainStep, compile_train_step
    from muon_compile.spec import CollectiveSpec, MatrixSpec, MeshSpec
    from muon_compile.verification.verify import verify

__version__ = "0.1.0"

# Loaded on first use, so that planning (config, spec, plan) does not import torch.
_HOMES = {
    "AdamWConfig": "config",
    "Adapter": "adapters",
    "BucketProbes": "run.probes",
    "CollectiveSpec": "spec",
    "CompileConfig": "config",
    "CompileError": "lower.compiled",
    "CompiledStep": "run.compiled_step",
    "Hardware": "plan.hardware",
    "LionConfig": "config",
    "MatrixSpec": "spec",
    "MeshSpec": "spec",
    "Muon": "optim",
    "MuonConfig": "config",
    "Plan": "plan.plan",
    "Probes": "run.probes",
    "StepStats": "run.stats",
    "TrainStep": "run.train_step",
    "build_step": "build.pure",
    "compile_step": "run.compiled_step",
    "compile_train_step": "run.train_step",
    "convert_state": "conversion.convert",
    "init_state": "build.pure",
    "inspect_params": "layout",
    "make_plan": "plan.planner",
    "model_specs": "plan.models",
    "register_adapter": "adapters",
    "register_symmetric_kernel": "build.symmetric",
    "route": "routing",
    "simulate": "plan.simulate",
    "verify": "verification.verify",
}

__all__ = [
    "AdamWConfig",
    "Adapter",
    "BucketProbes",
    "CollectiveSpec",
    "CompileConfig",
    "CompileError",
    "CompiledStep",
    "Hardware",
    "LionConfig",
    "MatrixSpec",
    "MeshSpec",
    "Muon",
    "MuonConfig",
    "Plan",
    "Probes",
    "StepStats",
    "TrainStep",
    "build_step",
    "compile_step",
    "compile_train_step",
    "convert_state",
    "init_state",
    "inspect_params",
    "make_plan",
    "model_specs",
    "register_adapter",
    "register_symmetric_kernel",
    "route",
    "simulate",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'muon_compile' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"muon_compile.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
