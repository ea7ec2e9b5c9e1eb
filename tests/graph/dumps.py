"""A step of a few parameters, and its dump as texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.nn import Parameter

import muon_compile as mc
from muon_compile.lower.trace import TracedStep
from tests.graph.twins import give, parameters

SHAPES = ((8, 12), (8, 12), (16, 8), (3, 8, 6), (8,), (5,))


def optimizer(
    shapes: tuple[tuple[int, ...], ...] = SHAPES, backend: str = "aot_eager", **options: Any
) -> tuple[list[Parameter], mc.Muon]:
    params = parameters(*shapes)
    config = options.pop("config", mc.MuonConfig(ns_dtype="float32"))
    named = list(zip(options.pop("names", [f"p{i}" for i in range(len(params))]), params, strict=True))
    matrices, rest = ([pair for pair in named if (pair[1].dim() > 1) is whole] for whole in (True, False))
    groups = [{"params": p, "algorithm": name} for p, name in ((matrices, "muon"), (rest, "adamw")) if p]
    made = mc.CompileConfig(**options)
    return params, mc.Muon(groups, lr=0.1, config=config, backend=backend, compile_config=made)


def traced_of(opt: mc.Muon, kind: str = "all") -> tuple[mc.Plan, TracedStep]:
    binding = opt.compiled._binding
    assert binding is not None
    return binding.local, binding.graphs[kind][0]


def stepped(*args: Any, missing: tuple[int, ...] = (), **kwargs: Any) -> mc.Muon:
    params, opt = optimizer(*args, **kwargs)
    give(params, seed=1, missing=missing)
    opt.step()
    return opt


def dump(opt: mc.Muon, folder: Path, **options: Any) -> dict[str, str]:
    paths = opt.compiled.dump(folder, **options)
    return {path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8") for path in paths}
