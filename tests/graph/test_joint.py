"""Two optimizers in one graph, with and without a GradScaler."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Sequence

import pytest
import torch
from torch.amp import GradScaler
from torch.nn import Parameter
from torch.optim import Optimizer

import muon_compile as mc
from tests.graph.twins import SHAPES, assert_equal, give, momenta, pair, parameters, run_both, values, wrap

ADAMW_SHAPES = ((8,), (8,), (5, 4))
NUM_MUON = len(SHAPES)


class Joint:
    """A Muon and an AdamW over parameters of their own."""

    def __init__(self, adamw: dict[str, object]) -> None:
        self.params = parameters(*SHAPES, *ADAMW_SHAPES)
        self.muon = torch.optim.Muon(self.params[:NUM_MUON], lr=0.1)
        self.adamw = torch.optim.AdamW(self.params[NUM_MUON:], **{"lr": 0.1, "weight_decay": 0.1, **adamw})

    @property
    def optimizers(self) -> tuple[Optimizer, Optimizer]:
        return self.muon, self.adamw

    def wrap(self) -> mc.CompiledStep:
        return wrap(self.muon, self.adamw)

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def everything(self) -> list[torch.Tensor]:
        """Copies of parameters and state."""
        state = [self.adamw.state[p] for p in self.params[NUM_MUON:]]
        moments = [entry[name] for entry in state for name in sorted(entry)]
        return values([*self.params, *momenta(self.muon), *moments])


def joint_pair(**adamw: object) -> tuple[Joint, Joint]:
    return Joint(adamw), Joint(adamw)


def assert_same(ours: Joint, theirs: Joint) -> None:
    assert_equal(ours.params[:NUM_MUON], theirs.params[:NUM_MUON])
    assert_equal(momenta(ours.muon), momenta(theirs.muon))
    # AdamW moves by about lr = 0.1, so this is 1e-5 of a step.
    assert_equal(ours.params[NUM_MUON:], theirs.params[NUM_MUON:], atol=1e-6)
    for p, q in zip(ours.params[NUM_MUON:], theirs.params[NUM_MUON:], strict=True):
        entry, expected = ours.adamw.state[p], theirs.adamw.state[q]
        assert set(entry) == set(expected)
        for name in expected:
            torch.testing.assert_close(entry[name].cpu(), expected[name].cpu(), rtol=1e-6, atol=1e-7)


def assert_unchanged(joint: Joint, before: Sequence[torch.Tensor]) -> None:
    assert_equal(joint.everything(), before)


# -- trajectory -----------------------------------------------------------------------------------------------------

IMPLEMENTATIONS = {
    "plain": {},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "amsgrad": {"amsgrad": True},
    "maximize": {"maximize": True},
    "tensor lr": {"lr": torch.tensor(0.1), "capturable": False, "foreach": False},
    "eps, betas": {"eps": 1e-3, "betas": (0.5, 0.9)},
}


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_joint_step_is_two_stock_steps(name: str) -> None:
    ours, theirs = joint_pair(**IMPLEMENTATIONS[name])
    step = ours.wrap()
    for seed in range(6):
        give(ours.params, theirs.params, seed=seed, scale=1 / (1 + seed))
        for joint in (ours, theirs):
            joint.muon.param_groups[0]["lr"] = 0.1 / (1 + seed)
            joint.adamw.param_groups[0]["weight_decay"] = 0.1 * seed
            joint.step()
        assert_same(ours, theirs)
    stats = step.stats
    assert (stats.compiles, stats.graphs, stats.host_launches, stats.steps) == (1, 1, 1, 6)


@pytest.mark.parametrize("name", ["plain", "fused", "amsgrad"])
def test_wrapping_in_mid_training_and_back(name: str) -> None:
    ours, theirs = joint_pair(**IMPLEMENTATIONS[name])
    for seed in range(6):
        if seed == 1:
            step = ours.wrap()
        if seed == 4:
            step.uninstall()
        give(ours.params, theirs.params, seed=seed)
        ours.step()
        theirs.step()
        assert_same(ours, theirs)
    assert step.stats.steps == 3
    for optimizer, other in zip(ours.optimizers, theirs.optimizers, strict=True):
        flag = "_step_supports_amp_scaling"
        assert optimizer.__dict__.get(flag) == other.__dict__.get(flag)


@pytest.mark.parametrize("name", ["plain", "fused", "amsgrad"])
def test_adamw_state_dict_is_interchangeable_with_stock(name: str) -> None:
    ours, theirs = joint_pair(**IMPLEMENTATIONS[name])
    ours.wrap()
    for seed in range(4):
        if seed == 2:  # each takes the other's
            saved = [copy.deepcopy([o.state_dict() for o in joint.optimizers]) for joint in (ours, theirs)]
            for joint, state_dicts in ((theirs, saved[0]), (ours, saved[1])):
                for optimizer, state_dict in zip(joint.optimizers, state_dicts, strict=True):
                    optimizer.load_state_dict(state_dict)
        give(ours.params, theirs.params, seed=seed)
        ours.step()
        theirs.step()
        assert_same(ours, theirs)
    a, b = ours.adamw.state_dict(), theirs.adamw.state_dict()
    assert a["param_groups"] == b["param_groups"]
    assert {i: set(entry) for i, entry in a["state"].items()} == {i: set(entry) for i, entry in b["state"].items()}
    for i, entry in b["state"].items():
        for key, value in entry.items():
            assert (a["state"][i][key].shape, a["state"][i][key].dtype) == (value.shape, value.dtype)


def test_adamw_alone_can_be_wrapped() -> None:
    ours, theirs = joint_pair()
    wrap(ours.adamw)
    for seed in range(3):
        give(ours.params, theirs.params, seed=seed)
        ours.step()
        theirs.step()
        assert_same(ours, theirs)


# -- calls of step() ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["muon first", "adamw first"])
def test_either_order_of_calls(order: tuple[int, int]) -> None:
    ours, theirs = joint_pair()
    step = ours.wrap()
    for seed in range(3):
        give(ours.params, theirs.params, seed=seed)
        for index in order:
            ours.optimizers[index].step()
        theirs.step()
        assert_same(ours, theirs)
    give(ours.params, theirs.params, seed=3)
    step()  # the joint step itself asks for no other call
    theirs.step()
    assert_same(ours, theirs)
    assert step.stats.steps == 4


@pytest.mark.parametrize("calls", ["11", "00", "1011", "0100", "0111"])
def test_a_joined_step_called_twice_or_never_is_an_error(calls: str) -> None:
    joint, _ = joint_pair()
    joint.wrap()
    give(joint.params, seed=0)
    for call in calls[:-1]:
        joint.optimizers[int(call)].step()
    before = joint.everything()
    with pytest.raises(RuntimeError, match="twice|not called"):
        joint.optimizers[int(calls[-1])].step()
    assert_unchanged(joint, before)


def test_the_closure_goes_to_the_first_optimizer() -> None:
    joint, reference = joint_pair()
    joint.wrap()
    give(joint.params, reference.params, seed=0)
    assert joint.muon.step(lambda: 3.0) == 3.0
    with pytest.raises(ValueError, match="closure"):
        joint.adamw.step(lambda: 3.0)
    joint.adamw.step()
    reference.step()
    assert_same(joint, reference)


# -- GradScaler -----------------------------------------------------------------------------------------------------


def overflow(params: Sequence[Parameter], index: int | None) -> None:
    """Make a gradient infinite."""
    if index is not None:
        grad = params[index].grad
        assert grad is not None
        grad.view(-1)[1] = math.inf


@pytest.fixture
def scalers() -> tuple[GradScaler, ...]:
    """Two equal scalers. Their scale is a power of two, so that scaling gradients loses nothing."""
    return tuple(GradScaler("cpu", init_scale=1024.0, growth_interval=1000) for _ in range(2))


def scale_gradients(scaler: GradScaler, params: Sequence[Parameter]) -> None:
    scaler.scale(torch.zeros(()))  # makes the scaler's tensors
    for p in params:
        p.grad.mul_(scaler.get_scale())


@pytest.mark.parametrize("unscale", [(), (0,), (1,), (0, 1)], ids=["no unscale_", "muon", "adamw", "both"])
@pytest.mark.parametrize("name", ["plain", "fused"])
def test_scaler_with_joined_optimizers(scalers: tuple[GradScaler, ...], unscale: tuple[int, ...], name: str) -> None:
    ours, theirs = joint_pair(**IMPLEMENTATIONS[name])
    step = ours.wrap()
    # Overflow nowhere, in a gradient of Muon's, in one of AdamW's.
    for seed, bad in enumerate([None, 0, None, 4, None]):
        give(ours.params, theirs.params, seed=seed)
        before, scale = ours.everything(), scalers[0].get_scale()
        for joint, scaler in zip((ours, theirs), scalers, strict=True):
            scale_gradients(scaler, joint.params)
            overflow(joint.params, bad)
            for index in unscale:
                scaler.unscale_(joint.optimizers[index])
            if joint is ours or bad is None:
                for optimizer in joint.optimizers:
                    scaler.step(optimizer)
            else:  # two stock optimizers would skip separately; the joint step skips both
                for optimizer in joint.optimizers[:: 1 if bad < NUM_MUON else -1][:1]:
                    scaler.step(optimizer)
            scaler.update()
        assert_same(ours, theirs)
        if bad is None:
            assert scalers[0].get_scale() == scale
        else:
            assert_unchanged(ours, before)
            assert scalers[0].get_scale() == scale / 2
        assert not hasattr(ours.muon, "found_inf")
    assert step.stats.steps == 3
    assert step.stats.compiles == 1


def test_clipping_after_unscale(scalers: tuple[GradScaler, ...]) -> None:
    ours, theirs = joint_pair()
    ours.wrap()
    for seed in range(2):
        give(ours.params, theirs.params, seed=seed)
        for joint, scaler in zip((ours, theirs), scalers, strict=True):
            scale_gradients(scaler, joint.params)
            for optimizer in joint.optimizers:
                scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(joint.params, 1.0)
            for optimizer in joint.optimizers:
                scaler.step(optimizer)
            scaler.update()
        assert_same(ours, theirs)


def test_scaler_steps_one_joined_optimizer_twice() -> None:
    joint, _ = joint_pair()
    joint.wrap()
    scaler = GradScaler("cpu", init_scale=4.0)
    before = joint.everything()
    give(joint.params, seed=0)
    scale_gradients(scaler, joint.params)
    scaler.step(joint.muon)
    scaler.update()  # AdamW's step is missing
    with pytest.raises(RuntimeError, match="twice"):
        scaler.step(joint.muon)
    assert_unchanged(joint, before)


def test_a_disabled_scaler_is_no_scaler() -> None:
    ours, theirs = joint_pair()
    ours.wrap()
    scaler = GradScaler("cpu", enabled=False)
    for seed in range(2):
        give(ours.params, theirs.params, seed=seed)
        for optimizer in itertools.chain(ours.optimizers, theirs.optimizers):
            scaler.step(optimizer)
        scaler.update()
        assert_same(ours, theirs)


@pytest.mark.parametrize("unscale", [False, True])
def test_case_a13_an_overflow_leaves_no_trace(scalers: tuple[GradScaler, ...], unscale: bool) -> None:
    ours, optimizer, theirs, stock = pair()
    wrap(optimizer)
    before = values([*ours, *momenta(optimizer)])
    for params, each, scaler in ((ours, optimizer, scalers[0]), (theirs, stock, scalers[1])):
        scaler.scale(torch.zeros(()))
        for p in params:
            p.grad = torch.full_like(p, math.inf)
        if unscale:
            scaler.unscale_(each)
        scaler.step(each)
        scaler.update()
    assert_equal([*ours, *momenta(optimizer)], before)
    assert scalers[0].get_scale() == 512.0
    give(ours, theirs, seed=0)
    for params, each, scaler in ((ours, optimizer, scalers[0]), (theirs, stock, scalers[1])):
        scale_gradients(scaler, params)
        scaler.step(each)
        scaler.update()
    assert_equal(ours, theirs)
    assert_equal(momenta(optimizer), momenta(stock))
    run_both(ours, optimizer, theirs, stock, range(1, 3))


@pytest.mark.parametrize("name", ["plain", "fused"])
def test_scaler_with_adamw_alone(scalers: tuple[GradScaler, ...], name: str) -> None:
    ours, theirs = joint_pair(**IMPLEMENTATIONS[name])
    wrap(ours.adamw)
    for seed, bad in enumerate([None, 4, None]):
        give(ours.params, theirs.params, seed=seed)
        for joint, scaler in zip((ours, theirs), scalers, strict=True):
            scale_gradients(scaler, joint.params)
            overflow(joint.params, bad)
            scaler.step(joint.adamw)
            scaler.update()
        assert_equal(ours.params[NUM_MUON:], theirs.params[NUM_MUON:], atol=1e-6)
    assert scalers[0].get_scale() == 512.0


@pytest.mark.inductor
def test_joint_step_on_inductor() -> None:
    shapes = (*SHAPES[:2], (8,), (8,))
    ours, theirs = parameters(*shapes), parameters(*shapes)
    pairs = [(torch.optim.Muon(p[:2], lr=0.1), torch.optim.AdamW(p[2:], lr=0.1)) for p in (ours, theirs)]
    step = mc.compile_step(*pairs[0])
    for seed in range(4):
        give(ours, theirs, seed=seed)
        if seed == 2:
            for optimizer, other in zip(*pairs, strict=True):
                optimizer.load_state_dict(copy.deepcopy(other.state_dict()))
        before = values(ours), values(theirs)
        versions = [p._version for p in ours]
        for optimizer in itertools.chain(*pairs):
            optimizer.step()
        for index, (p, q) in enumerate(zip(ours, theirs, strict=True)):
            moved, expected = p.detach() - before[0][index], q.detach() - before[1][index]
            bound = 3e-2 if index < 2 else 1e-5
            assert (moved - expected).norm() <= bound * expected.norm()
            assert p._version > versions[index]
    assert (step.stats.compiles, step.stats.host_launches, step.stats.graph_breaks) == (1, 1, 0)
