"""Sharded parameters of another framework: read by their interface, updated as torch's DTensors are."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

import muon_compile as mc
from muon_compile.distributed import local_tensor, placements_of
from tests.dist import foreign
from tests.dist.foreign_models import (
    EVEN,
    MESHES,
    Case,
    assert_equal,
    distributed,
    give,
    go_on,
    locals_of,
    make,
    mesh_of,
    real,
    real_only,
    wrapped,
)
from tests.dist.models import mesh_of as torch_mesh
from tests.dist.models import raised
from tests.dist.ranks import Ranks
from tests.reference import gaussian

pytestmark = [pytest.mark.dist, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def pools() -> Iterator[Callable[[int], Ranks]]:
    with Ranks(2) as two, Ranks(4) as four:
        yield {2: two, 4: four}.__getitem__


# -- the same as torch's ----------------------------------------------------------------------------------------------


def trained(rank: int, case: Case) -> tuple[dict[str, Tensor], list[str], int]:
    params = make(case)
    muon, adamw, step = wrapped(case, params)
    go_on(case, params, muon, adamw, range(case.steps))
    strategies = [part.exchange.strategy for part in step.plan.parts if part.exchange is not None]
    return locals_of(params, muon, adamw), strategies, step.stats.compiles


def check_as_torch(ranks: Ranks, case: Case) -> None:
    outcomes = ranks.run(trained, case)
    torchs = Case(mesh=case.mesh, strategy=case.strategy, shapes=case.shapes, kind="torch")
    for (mine, strategies, compiles), (theirs, expected, _) in zip(outcomes, ranks.run(trained, torchs), strict=True):
        assert_equal(mine, theirs)
        assert strategies == expected and strategies
        assert case.strategy == "auto" or set(strategies) - {"local"} == {case.strategy}
        assert compiles == 1
    assert any("momentum_buffer" in key for key in outcomes[0][0])


@pytest.mark.parametrize("grads", ["plain", "alike"])
@pytest.mark.parametrize("strategy", ["auto", "all_to_all", "all_gather"])
@pytest.mark.parametrize(("world", "mesh"), MESHES)
def test_updates_are_those_of_dtensors(
    pools: Callable[[int], Ranks], world: int, mesh: tuple[int, ...], strategy: str, grads: str
) -> None:
    """Bit for bit, uneven shards and empty ones included; no operator is called on a foreign tensor."""
    check_as_torch(pools(world), Case(mesh=mesh, strategy=strategy, grads=grads))


def no_longer_sharded(rank: int) -> tuple[list[str], str]:
    case = Case(shapes=("even",))
    mesh = foreign.DeviceMesh("cpu", [[0, 1, 2, 3]], mesh_dim_names=("other", "shard"))
    again = foreign.DeviceMesh("cpu", [[0, 1, 2, 3]], mesh_dim_names=("other", "shard"))
    strided, plain, outer = foreign.StridedShard(0, 2), foreign.Shard(-2), foreign.Replicate()
    params = {}
    for name, own, on in (("even", strided, mesh), ("even_too", plain, again)):
        local = gaussian(16, 12, seed=3).chunk(4)[rank].clone()
        params[name] = nn.Parameter(foreign.DTensor.from_local(local, on, [outer, own], shape=(16, 12)))
    muon = torch.optim.Muon(params.items(), lr=0.1)
    step = mc.compile_step(muon, backend="aot_eager", strategy=case.strategy)
    for param in params.values():
        param.grad = gaussian(4, 12, seed=rank)
    muon.step()
    (bucket,) = step.plan.buckets
    assert torch.equal(*(local_tensor(p) for p in params.values()))
    return [str(p) for p in placements_of(params["even"])], bucket.layout.mesh.name


def test_equal_meshes_are_one_and_a_strided_shard_alone_is_plain(pools: Callable[[int], Ranks]) -> None:
    for placements, mesh in pools(4).run(no_longer_sharded):
        assert placements == [str(Replicate()), str(Shard(0))]
        assert mesh == "mesh0"


def scaled(rank: int) -> None:
    """A gradient scaler's scale is taken out of local gradients."""
    results = []
    for scale, grads in ((1.0, "plain"), (8.0, "plain"), (8.0, "alike")):
        case = Case(shapes=("even", "vector"), grads=grads)
        params = make(case)
        muon, adamw, _ = wrapped(case, params)
        give(params, case, 0, scale)
        for optimizer in (muon, adamw):
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(scale), torch.zeros(())
            optimizer.step()
        results.append(locals_of(params, muon, adamw))
    assert_equal(results[0], results[1])
    assert_equal(results[0], results[2])


def test_scaled_gradients(pools: Callable[[int], Ranks]) -> None:
    pools(4).run(scaled)


def loose(rank: int) -> list[str]:
    params = make(Case(shapes=("even", "vector")))
    return [f"{s.name} {s.shape} {s.algorithm}" for s in mc.inspect_params(params)]


def test_they_are_inspected_as_whole(pools: Callable[[int], Ranks]) -> None:
    assert pools(4).run(loose) == [["even (16, 12) muon", "vector (8,) adamw"]] * 4


# -- refusals ---------------------------------------------------------------------------------------------------------


class Both(foreign.Shard):
    """Ragged, and said to be a shard as well."""

    def is_ragged_shard(self) -> bool:
        return True


def refusals(rank: int) -> list[str]:
    flat, square = mesh_of("foreign", (4,)), mesh_of("foreign", (2, 2))
    backwards = foreign.DeviceMesh("cpu", [3, 2, 1, 0], mesh_dim_names=("shard",))
    shard, copies = foreign.Shard(0), foreign.Replicate()
    given = [
        ((4, 12), square, [foreign.StridedShard(0, 2), shard], (16, 12)),
        ((16, 12), flat, [foreign.Partial()], (16, 12)),
        ((48,), flat, [foreign.RaggedShard((0,), (1, 1, 1, 1))], (16, 12)),
        ((4, 12), flat, [Both(0)], (16, 12)),
        ((5, 12), flat, [shard], (16, 12)),
        ((4, 12), square, [shard, shard], (16, 12)),
        ((4, 12), flat, [shard, copies], (16, 12)),
        ((4, 12), backwards, [shard], (16, 12)),
        ((4, 12), foreign.DeviceMesh("cuda", [0, 1, 2, 3]), [shard], (16, 12)),
    ]
    said = []
    for local, mesh, placements, shape in given:
        param = nn.Parameter(foreign.DTensor.from_local(torch.ones(local), mesh, placements, shape=shape))
        said.append(raised(wrap_one, param))
    torchs = DTensor.from_local(torch.ones(5, 12), torch_mesh((4,)), [Shard(0)], shape=(16, 12), stride=(12, 1))
    return [*said, raised(wrap_one, nn.Parameter(torchs))]


def wrap_one(param: Any) -> None:
    muon = object.__new__(torch.optim.Muon)  # a ragged local tensor is flat, which Muon itself refuses
    torch.optim.Muon.__init__(muon, [("dummy", nn.Parameter(torch.ones(2, 2)))], lr=0.1)
    muon.param_groups[0]["params"], muon.param_groups[0]["param_names"] = [param], ["it"]
    mc.compile_step(muon, backend="aot_eager")


def test_what_is_refused_is_named(pools: Callable[[int], Ranks]) -> None:
    for said in pools(4).run(refusals):
        strided, partial, ragged, both, wrong, twice, many, backwards, device, torchs = said
        for message in (strided, partial, ragged, both):
            assert message.startswith(
                "NotImplementedError: Parameter 'it': expected Shard and Replicate placements, got"
            )
        assert "StridedShard(dim=0, split_factor=2)" in strided
        for message in (wrong, torchs):
            assert "Parameter 'it': expected a local shape of (4, 12)" in message and "shard of (5, 12)" in message
        assert "at most one sharded and one replicated mesh axis" in twice
        assert "expected 1 placements, one for every mesh axis" in many
        assert backwards.startswith("NotImplementedError: Axis 'shard'") and "got [0, 1, 2, 3]" in backwards
        assert "expected shards on cuda" in device


def refused_gradients(rank: int) -> list[str]:
    case = Case(shapes=("even",))
    params = make(case)
    muon = torch.optim.Muon(list(params.items()))
    mc.compile_step(muon, backend="aot_eager")
    mesh, said = mesh_of("foreign", (4,)), []
    for grad in (
        foreign.DTensor.from_local(torch.ones(4, 12), mesh, [foreign.Partial()]),
        distributed(torch.ones(16, 12), Case(kind="torch"), [Shard(0)]),
    ):
        params["even"]._local_tensor = GradHolder(params["even"]._local_tensor, grad)
        said.append(raised(muon.step))
        params["even"]._local_tensor = params["even"]._local_tensor.tensor
    return said


class GradHolder:
    """A local tensor whose gradient torch itself would not take."""

    def __init__(self, tensor: Tensor, grad: Any) -> None:
        self.tensor, self.grad = tensor, grad

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tensor, name)


def test_gradients_of_other_placements_are_refused(pools: Callable[[int], Ranks]) -> None:
    for said in pools(4).run(refused_gradients):
        assert all(m.startswith("ValueError: Gradient of 'even': expected the parameter's placements") for m in said)
        assert "Partial" in said[0] and "reduce it before the step" in said[0]


# -- the stand-in, and the real ones ----------------------------------------------------------------------------------


def parameters(function: Any) -> list[str]:
    names = list(inspect.signature(function).parameters)
    return [name for name in names if name != "self"]


@real_only
@pytest.mark.parametrize(
    "name", ["DTensor", "DeviceMesh", "Shard", "Replicate", "Partial", "StridedShard", "RaggedShard"]
)
def test_the_stand_in_is_like_the_real_one(name: str) -> None:
    """Every public name is there, a method where it is one, with the parameters that it has here."""
    theirs, mine = getattr(real(), name, None), getattr(foreign, name)
    if theirs is None:
        assert name in foreign.NEWER
        pytest.skip(f"this release has no {name}")
    names = {n for c in mine.__mro__ if c.__module__ == foreign.__name__ for n in vars(c) if not n.startswith("_")}
    for member in sorted(names):
        if not hasattr(theirs, member):
            assert member in foreign.NEWER, f"{name}.{member}"
            continue
        ours, found = inspect.getattr_static(mine, member), inspect.getattr_static(theirs, member)
        assert isinstance(ours, property) == isinstance(found, property), f"{name}.{member}"
        assert isinstance(ours, staticmethod) == isinstance(found, staticmethod), f"{name}.{member}"
        if callable(getattr(mine, member)) and not isinstance(ours, property):
            there = parameters(getattr(theirs, member))
            missing = [p for p in parameters(getattr(mine, member)) if p not in there]
            assert set(missing) <= foreign.NEWER, f"{name}.{member}: {missing}"
    assert name != "DTensor" or theirs.__torch_function__ is not Tensor.__torch_function__


@real_only
@pytest.mark.parametrize("grads", ["plain", "alike"])
@pytest.mark.parametrize(("world", "mesh"), MESHES)
def test_real_ones_are_updated_as_dtensors_are(
    pools: Callable[[int], Ranks], world: int, mesh: tuple[int, ...], grads: str
) -> None:
    check_as_torch(pools(world), Case(kind="hyper_parallel", mesh=mesh, grads=grads, shapes=tuple(EVEN)))
