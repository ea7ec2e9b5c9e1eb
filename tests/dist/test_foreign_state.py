"""Optimizer state over another framework's tensors: as the parameters are, and loaded from what is plain or alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

import muon_compile as mc
from muon_compile.distributed import is_distributed, is_foreign, local_tensor
from tests.dist import foreign
from tests.dist.foreign_models import (
    EVEN,
    MESHES,
    SHAPES,
    Case,
    assert_equal,
    distributed,
    go_on,
    locals_of,
    make,
    mesh_of,
    optimizers,
    real_only,
    wrapped,
)
from tests.dist.models import raised
from tests.dist.ranks import Ranks
from tests.reference import gaussian

pytestmark = [pytest.mark.dist, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def pools() -> Iterator[Callable[[int], Ranks]]:
    with Ranks(2) as two, Ranks(4) as four:
        yield {2: two, 4: four}.__getitem__


def state_in_and_out(rank: int, case: Case) -> int:
    params = make(case)
    muon, adamw, step = wrapped(case, params)
    go_on(case, params, muon, adamw, range(2))
    seen = 0
    for name, param in params.items():
        for key, value in (muon.state.get(param) or adamw.state[param]).items():
            if key != "step":
                assert is_foreign(value) and type(value) is type(param), name
                assert value.placements == param.placements and tuple(value.shape) == SHAPES[name]
                seen += 1
    view = muon.state[params["even"]]["momentum_buffer"]
    before = view.to_local().clone()
    saved = {id(o): copied(o.state_dict()) for o in (muon, adamw)}
    wanted = locals_of(params, muon, adamw)
    go_on(case, params, muon, adamw, range(2, 3))
    assert not torch.equal(view.to_local(), before)  # what the graph writes is seen through the wrapper
    view.to_local().zero_()  # and it sees what is written there
    assert not step._binding.state._local[0]["momentum_buffer"].any()

    other = make(case)
    for name, param in other.items():
        local_tensor(param).detach().copy_(wanted[name])
    others = wrapped(case, other)
    go_on(case, other, *others[:2], range(50, 51))
    for name, param in other.items():
        local_tensor(param).detach().copy_(wanted[name])
    others[0].load_state_dict(saved[id(muon)])
    others[1].load_state_dict(saved[id(adamw)])
    assert_equal(locals_of(other, *others[:2]), wanted)
    go_on(case, other, *others[:2], range(2, 4))
    third = resumed(case, wanted, saved[id(muon)], saved[id(adamw)])
    assert_equal(locals_of(other, *others[:2]), third)
    assert others[2].stats.compiles == 1
    return seen


def resumed(case: Case, wanted: dict[str, Tensor], muon_saved: Any, adamw_saved: Any) -> dict[str, Tensor]:
    """The same going on, where optimizers had their state before they were wrapped."""
    params = make(case)
    muon, adamw = optimizers(params)
    for name, param in params.items():
        local_tensor(param).detach().copy_(wanted[name])
    for optimizer, saved in ((muon, muon_saved), (adamw, adamw_saved)):
        live = [p for group in optimizer.param_groups for p in group["params"]]
        for index, entry in saved["state"].items():
            optimizer.state[live[index]] = dict(entry)
    mc.compile_step(muon, adamw, backend="aot_eager", strategy=case.strategy)
    go_on(case, params, muon, adamw, range(2, 4))
    return locals_of(params, muon, adamw)


def copied(state_dict: dict[str, Any], change: Callable[[Any], Any] | None = None) -> dict[str, Any]:
    """With tensors of its own; ``change`` makes them of those that are distributed."""

    def own(value: Any) -> Any:
        if not is_distributed(value):
            return value.clone() if isinstance(value, Tensor) else value
        copy = value._again(value.to_local().clone()) if hasattr(value, "_again") else value.detach().clone()
        return copy if change is None else change(copy)

    state = {i: {name: own(value) for name, value in entry.items()} for i, entry in state_dict["state"].items()}
    return {**state_dict, "state": state}


@pytest.mark.parametrize(("world", "mesh"), MESHES)
def test_state_goes_in_and_out(pools: Callable[[int], Ranks], world: int, mesh: tuple[int, ...]) -> None:
    seen = pools(world).run(state_in_and_out, Case(mesh=mesh))
    assert seen == [len(SHAPES) + 3] * world  # AdamW has two each of three


def whole_of(value: Any) -> Tensor:
    """All of a foreign tensor, on every rank of its mesh."""
    (axis,) = [i for i, p in enumerate(value.placements) if p.is_shard()]
    group, dim, local = value.device_mesh.get_group(axis), value.placements[axis].dim, value.to_local()
    rows: list[Any] = [None] * value.device_mesh.size(axis)
    torch.distributed.all_gather_object(rows, local, group=group)
    return torch.cat(rows, dim)


def loads(rank: int, case: Case) -> None:
    """Whole and local plain tensors are taken as well, and where it is ambiguous they are the same."""
    params = make(case)
    muon, adamw, _ = wrapped(case, params)
    go_on(case, params, muon, adamw, range(2))
    wanted = locals_of(params, muon, adamw)
    for change in (whole_of, local_tensor):
        saved = [copied(o.state_dict(), change) for o in (muon, adamw)]
        for optimizer, given in zip((muon, adamw), saved, strict=True):
            for entry in optimizer.state.values():
                for value in entry.values():
                    local_tensor(value).fill_(7)
            optimizer.load_state_dict(given)
        assert_equal(locals_of(params, muon, adamw), wanted)


@pytest.mark.parametrize(("world", "mesh"), MESHES)
def test_plain_state_is_taken_whole_or_as_this_ranks(
    pools: Callable[[int], Ranks], world: int, mesh: tuple[int, ...]
) -> None:
    pools(world).run(loads, Case(mesh=mesh))


def refused_state(rank: int) -> tuple[list[str], bool]:
    case = Case(shapes=("even", "vector"))
    params = make(case)
    muon, adamw, _ = wrapped(case, params)
    go_on(case, params, muon, adamw, range(1))
    before = locals_of(params, muon, adamw)
    mesh, local = mesh_of("foreign", (4,)), torch.zeros(4, 12)
    backwards = foreign.DeviceMesh("cpu", [3, 2, 1, 0], mesh_dim_names=("shard",))
    wrong = (
        foreign.DTensor.from_local(local, mesh, [foreign.Replicate()], shape=(16, 12)),
        foreign.DTensor.from_local(local, backwards, [foreign.Shard(0)], shape=(16, 12)),
        foreign.DTensor.from_local(torch.zeros(5, 12), mesh, [foreign.Shard(0)]),
        distributed(torch.zeros(16, 12), Case(kind="torch"), [Shard(0)]),
        torch.zeros(3, 12),
    )
    said = []
    for value in wrong:
        saved = copied(muon.state_dict(), lambda _, value=value: value)
        said.append(raised(muon.load_state_dict, saved))
    plain = nn.Parameter(torch.zeros(16, 12))
    alone = torch.optim.Muon([("plain", plain)])
    mc.compile_step(alone, backend="aot_eager")
    saved = copied(alone.state_dict())
    saved["state"] = {0: {"momentum_buffer": foreign.DTensor.from_local(local, mesh, [foreign.Shard(0)])}}
    said.append(raised(alone.load_state_dict, saved))
    after = locals_of(params, muon, adamw)
    return said, all(torch.equal(before[name], after[name]) for name in before)


def test_other_state_is_refused_in_words(pools: Callable[[int], Ranks]) -> None:
    for said, unchanged in pools(4).run(refused_state):
        assert unchanged
        for message in said[:-1]:
            assert message.startswith("ValueError: State of 'even': momentum_buffer: expected ")
        assert "got (Replicate(),)" in said[0] and "(3, 2, 1, 0)" in said[1]
        assert "expected shape (16, 12), got (20, 12)" in said[2]
        assert "a plain tensor or a DTensor, got a DTensor" in said[3]
        assert "expected shape (16, 12) or this rank's (4, 12), got (3, 12)" in said[4]
        assert said[5].startswith("ValueError: State of 'plain'")


def left(rank: int) -> None:
    case = Case(shapes=("even", "five", "vector"))
    params = make(case)
    muon, adamw, step = wrapped(case, params)
    go_on(case, params, muon, adamw, range(2))
    wanted = locals_of(params, muon, adamw)
    stacked = {t.untyped_storage().data_ptr() for _, t in step._binding.state.inputs if t.numel()}
    step.uninstall()
    assert_equal(locals_of(params, muon, adamw), wanted)
    for name, param in params.items():
        for key, value in (muon.state.get(param) or adamw.state[param]).items():
            if key != "step":
                assert is_foreign(value) and value.placements == param.placements, name
                own = value.to_local()
                assert own.untyped_storage().nbytes() == own.numel() * own.element_size()
                assert not own.numel() or own.untyped_storage().data_ptr() not in stacked


def test_uninstall_leaves_foreign_tensors_of_their_own(pools: Callable[[int], Ranks]) -> None:
    pools(4).run(left)


class Bare(foreign.DTensor):
    """A framework without ``from_local``."""

    from_local = None  # type: ignore[assignment]


class Copying(foreign.DTensor):
    """A framework whose ``from_local`` copies."""

    @staticmethod
    def from_local(local_tensor: Tensor, device_mesh: Any, placements: Any) -> foreign.DTensor:
        return Copying(local_tensor.clone(), device_mesh, placements)

    def detach(self) -> Any:
        return self


def without_wrappers(rank: int) -> None:
    mesh, results = mesh_of("foreign", (4,)), []
    for kind in (foreign.DTensor, Bare, Copying):
        param = kind(gaussian(16, 12, seed=0).chunk(4)[rank].clone(), mesh, [foreign.Shard(0)])
        param.requires_grad_()
        muon = torch.optim.Muon([("even", param)], lr=0.1)
        step = mc.compile_step(muon, backend="aot_eager")
        param.grad = gaussian(16, 12, seed=1).chunk(4)[rank].clone()
        muon.step()
        value = muon.state[param]["momentum_buffer"]
        assert is_foreign(value) == (kind is foreign.DTensor)
        assert local_tensor(value).data_ptr() == step._binding.state._local[0]["momentum_buffer"].data_ptr()
        assert value.shape == (16, 12) if is_foreign(value) else value.shape == (4, 12)
        muon.load_state_dict(copied(muon.state_dict()))
        results.append((local_tensor(value).clone(), param.to_local().detach().clone()))
        step.uninstall()
    for momentum, param in results[1:]:
        assert torch.equal(momentum, results[0][0]) and torch.equal(param, results[0][1])


def test_state_is_plain_where_nothing_wraps_it(pools: Callable[[int], Ranks]) -> None:
    pools(4).run(without_wrappers)


@real_only
def test_state_of_real_ones_goes_in_and_out(pools: Callable[[int], Ranks]) -> None:
    """Their parameters refuse an operator that torch's ``load_state_dict`` asks; ours never comes to that."""
    seen = pools(4).run(state_in_and_out, Case(kind="hyper_parallel", mesh=(2, 2), shapes=tuple(EVEN)))
    assert seen == [len(EVEN) + 2] * 4
