"""Existing optimizers read into configs and hyperparameters; one file per optimizer family.

An optimizer is recognized by the module path of its class, so no other library is imported.
"""

from __future__ import annotations

from muon_compile.adapters.dion import DionMuonAdapter
from muon_compile.adapters.heavyball import HeavyBallMuonAdapter
from muon_compile.adapters.hyperparallel import HyperParallelAdamWAdapter, HyperParallelMuonAdapter
from muon_compile.adapters.keller import KellerAdapter
from muon_compile.adapters.moonlight import MoonlightAdapter
from muon_compile.adapters.own import OwnMuonAdapter
from muon_compile.adapters.registry import (
    Adapter,
    FamilyAdapter,
    Group,
    find_adapter,
    known_optimizers,
    leaves_of,
    part_of,
    register_adapter,
)
from muon_compile.adapters.torch_adamw import TorchAdamWAdapter
from muon_compile.adapters.torch_muon import TorchMuonAdapter

_KNOWN = (
    TorchMuonAdapter(),
    TorchAdamWAdapter(),
    OwnMuonAdapter(),
    KellerAdapter(),
    MoonlightAdapter(),
    DionMuonAdapter(),
    HyperParallelMuonAdapter(),
    HyperParallelAdamWAdapter(),
    HeavyBallMuonAdapter(),
)
for _adapter in _KNOWN:
    register_adapter(_adapter)

__all__ = [
    "Adapter",
    "DionMuonAdapter",
    "FamilyAdapter",
    "Group",
    "HeavyBallMuonAdapter",
    "HyperParallelAdamWAdapter",
    "HyperParallelMuonAdapter",
    "KellerAdapter",
    "MoonlightAdapter",
    "find_adapter",
    "known_optimizers",
    "leaves_of",
    "part_of",
    "register_adapter",
]
