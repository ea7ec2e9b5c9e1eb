"""The optimizers of every library over the same parameters, trained a little: what state dicts are converted of."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.nn import Parameter
from torch.optim import Optimizer

import muon_compile as mc
from tests.graph.twins import give, parameters
from tests.originals import find, formulas

MATRICES = ((24, 64), (64, 24), (32, 32))
VECTORS = ((24,), (64,))
MU = 0.9
PRESETS = ("torch", "keller", "moonlight", "dion", "hyperparallel", "heavyball", "muon_compile")
# Of these, Muon's and AdamW's groups are two optimizers'.
TWO = ("torch", "hyperparallel")
NUMBERS: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1}
BETAS = (0.8, 0.95)

Dict = dict[str, Any]
Made = tuple[list[Parameter], list[Any]]


def make(preset: str, *, adamw: bool = True, dtype: torch.dtype = torch.float32) -> Made:
    """Parameters and their optimizers, with the same numbers in every library; heavyball takes matrices alone."""
    x = parameters(*MATRICES, dtype=dtype)
    y = parameters(*VECTORS, seed=1, dtype=dtype) if adamw and preset != "heavyball" else []
    return x + y, MAKERS[preset](x, y)


def _torch(x: list[Parameter], y: list[Parameter]) -> list[Any]:
    muon = torch.optim.Muon(x, momentum=MU, **NUMBERS)
    return [muon, torch.optim.AdamW(y, betas=BETAS, **NUMBERS)] if y else [muon]


def _keller(x: list[Parameter], y: list[Parameter]) -> list[Any]:
    import muon

    if not y:
        return [muon.SingleDeviceMuon(x, momentum=MU, **NUMBERS)]
    groups = [{"params": x, "momentum": MU, "use_muon": True, **NUMBERS}]
    return [muon.SingleDeviceMuonWithAuxAdam([*groups, {"params": y, "betas": BETAS, "use_muon": False, **NUMBERS}])]


def _moonlight(x: list[Parameter], y: list[Parameter]) -> list[Any]:
    cls = find.moonlight("original" if find.folder() else "formula")
    return [cls(muon_params=x, adamw_params=y, lr=0.02, wd=0.1, momentum=MU, adamw_betas=BETAS)]


def _dion(x: list[Parameter], y: list[Parameter]) -> list[Any]:
    groups: list[Dict] = [{"params": x, "nesterov": True}]
    groups += [{"params": y, "algorithm": "adamw"}] if y else []
    return [find.dion("original" if find.folder() else "formula")(groups, mu=MU, betas=BETAS, **NUMBERS)]


def _hyperparallel(x: list[Parameter], y: list[Parameter]) -> list[Any]:
    muon = formulas.HyperParallelMuon(x, momentum=MU, **NUMBERS)
    return [muon, formulas.HyperParallelAdamW(y, betas=BETAS, **NUMBERS)] if y else [muon]


def _heavyball(x: list[Parameter], y: list[Parameter]) -> list[Any]:
    module = pytest.importorskip("heavyball")
    return [module.Muon(x, betas=(MU, 0.99), heavyball_momentum=True, **NUMBERS)]


def _own(x: list[Parameter], y: list[Parameter]) -> list[Any]:
    groups: list[Dict] = [{"params": x, "momentum": MU}]
    groups += [{"params": y, "algorithm": "adamw", "betas": BETAS, **NUMBERS}] if y else []
    wide = x[0].dtype == torch.float64
    config = mc.CompileConfig(ns_dtype="float64" if wide else "float32")
    return [mc.Muon(groups, backend="aot_eager", compile_config=config, **NUMBERS)]


MAKERS: dict[str, Callable[[list[Parameter], list[Parameter]], list[Any]]] = {
    "torch": _torch,
    "keller": _keller,
    "moonlight": _moonlight,
    "dion": _dion,
    "hyperparallel": _hyperparallel,
    "heavyball": _heavyball,
    "muon_compile": _own,
}


def train(made: Made, seeds: range) -> None:
    """Steps with float32 products; heavyball's round at random, and its momentum too if they are made to be float32."""
    for seed in seeds:
        give(made[0], seed=seed)
        for optimizer in made[1]:
            with find.as_float32(not type(optimizer).__module__.startswith("heavyball")):
                optimizer.step()


def saved(optimizers: Sequence[Optimizer]) -> Dict:
    """The state of all of them in one dict, which shares nothing with them."""
    joined: Dict = {"state": {}, "param_groups": []}
    for optimizer in optimizers:
        first = sum(len(group["params"]) for group in joined["param_groups"])
        found = copy.deepcopy(optimizer.state_dict())
        joined["state"] |= {first + key: entry for key, entry in found.pop("state").items()}
        groups = found.pop("param_groups")
        joined["param_groups"] += [{**g, "params": [first + key for key in g["params"]]} for g in groups]
        joined |= found
    return joined


def load(optimizers: Sequence[Optimizer], state_dict: Dict) -> None:
    """A dict of several optimizers into each of them, by the order of their groups."""
    groups = list(state_dict["param_groups"])
    for optimizer in optimizers:
        own, groups = groups[: len(optimizer.param_groups)], groups[len(optimizer.param_groups) :]
        keys = {key for group in own for key in group["params"]}
        state = {key: entry for key, entry in state_dict["state"].items() if key in keys}
        optimizer.load_state_dict(copy.deepcopy({**state_dict, "state": state, "param_groups": own}))
    assert not groups


@contextmanager
def eager_heavyball() -> Iterator[None]:
    """HeavyBall compiles its pieces: not here."""
    try:
        import heavyball.utils
    except ImportError:
        yield
        return
    before, heavyball.utils.compile_mode = heavyball.utils.compile_mode, None
    yield
    heavyball.utils.compile_mode = before
