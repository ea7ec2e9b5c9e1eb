"""Existing optimizers read into configs and hyperparameters; one file per optimizer family.

An optimizer is recognized by the module path of its class, so no other library is imported.
"""

from __future__ import annotations

from muon_compile.adapters.own import OwnMuonAdapter
from muon_compile.adapters.registry import Adapter, find_adapter, known_optimizers, register_adapter
from muon_compile.adapters.torch_adamw import TorchAdamWAdapter
from muon_compile.adapters.torch_muon import TorchMuonAdapter

for _adapter in (TorchMuonAdapter(), TorchAdamWAdapter(), OwnMuonAdapter()):
    register_adapter(_adapter)

__all__ = ["Adapter", "find_adapter", "known_optimizers", "register_adapter"]
