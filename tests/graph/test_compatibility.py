"""What training loops do around the step: the same bits as on stock, and no compile that was not needed.

Every test is a row of docs/compatibility.md.
"""

from __future__ import annotations

import copy
import itertools
import math
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.amp import GradScaler
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim import Optimizer, lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import muon_compile as mc
from tests.graph.loops import STEPS, compare, loss_of, state_of, train
from tests.graph.twins import EXACT, assert_equal, values

# -- gradients ------------------------------------------------------------------------------------------------------


def test_gradient_accumulation() -> None:
    def loop(model: nn.Module, optimizer: Optimizer) -> Sequence[Tensor]:
        for number in STEPS:
            for micro in range(3):
                (loss_of(model, 10 * number + micro) / 3).backward()
            optimizer.step()
            optimizer.zero_grad()
        return ()

    compare(loop)


@pytest.mark.parametrize("unscale", [False, True])
def test_grad_scaler(unscale: bool) -> None:
    def loop(model: nn.Module, optimizer: Optimizer) -> Sequence[Tensor]:
        scaler = GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        scales = []
        for number in STEPS:
            optimizer.zero_grad()
            scaler.scale(loss_of(model, number)).backward()
            if number == 2:
                grad = next(model.parameters()).grad
                assert grad is not None
                grad.view(-1)[3] = math.inf
            before = values([*model.parameters(), *state_of(optimizer)])
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            same = [
                torch.equal(a, b) for a, b in zip(before, [*model.parameters(), *state_of(optimizer)], strict=False)
            ]
            assert all(same) if number == 2 else not any(same)
            scales.append(torch.tensor(scaler.get_scale()))
        return scales

    compare(loop)


@pytest.mark.parametrize("foreach", [False, True])
def test_clipping_gradients(foreach: bool) -> None:
    def loop(model: nn.Module, optimizer: Optimizer) -> Sequence[Tensor]:
        norms = []
        for number in STEPS:
            optimizer.zero_grad()
            loss_of(model, number).backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.05, foreach=foreach))
            optimizer.step()
        assert all(norm > 0.05 for norm in norms)
        return norms

    compare(loop)


def test_zero_grad_keeping_the_gradients() -> None:
    def loop(model: nn.Module, optimizer: Optimizer) -> Sequence[Tensor]:
        for number in STEPS:
            optimizer.zero_grad(set_to_none=False)
            (loss_of(model, number) if number != 3 else loss_of(lambda x: model[0](x)[:, :12], number)).backward()  # type: ignore[index]
            optimizer.step()
        return ()

    compare(loop)


# -- models ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant: bool) -> None:
    def loop(model: nn.Module, optimizer: Optimizer) -> Sequence[Tensor]:
        assert isinstance(model, nn.Sequential)

        def forward(x: Tensor) -> Tensor:
            x.requires_grad_()
            middle = checkpoint(model[:4], x, use_reentrant=reentrant)
            assert isinstance(middle, Tensor)
            return model[4](middle)  # type: ignore[no-any-return]

        train(forward, optimizer, STEPS)
        return ()

    compare(loop)


def test_compiled_models() -> None:
    compiled_models = CompileCounterWithBackend("aot_eager")

    def loop(model: nn.Module, optimizer: Optimizer) -> Sequence[Tensor]:
        torch._dynamo.reset()
        compiled_models.frame_count = 0
        forward = torch.compile(model, backend=compiled_models, fullgraph=True)
        losses = []
        for number in STEPS:
            optimizer.zero_grad()
            loss = loss_of(forward, number)
            loss.backward()
            optimizer.step()
            # The compiled model reads what the step wrote.
            assert torch.equal(loss_of(forward, 0).detach(), loss_of(model, 0).detach())
            losses.append(loss.detach())
        assert compiled_models.frame_count == 1
        return losses

    compare(loop)


def tied() -> nn.Module:
    torch.manual_seed(0)
    sizes = (12, 16, 12, 16, 12)
    model = nn.Sequential(*[nn.Linear(a, b, bias=False) for a, b in itertools.pairwise(sizes)])
    model[2].weight = model[0].weight
    return model


def test_tied_weights() -> None:
    def loop(model: nn.Module, optimizer: Optimizer) -> Sequence[Tensor]:
        assert isinstance(model, nn.Sequential)
        train(model, optimizer, STEPS)
        assert model[2].weight is model[0].weight
        return ()

    compare(loop, make=tied)


@pytest.mark.parametrize("around", ["forward", "everything"])
def test_autocast(around: str) -> None:
    def loop(model: nn.Module, optimizer: Optimizer) -> Sequence[Tensor]:
        for number in STEPS:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(model, number)
                if around == "everything":
                    loss.backward()
                    optimizer.step()
            if around == "forward":
                loss.backward()
                optimizer.step()
        return ()

    compare(loop)


# -- parameters that change -----------------------------------------------------------------------------------------


def test_frozen_and_unfrozen_parameters() -> None:
    def loop(model: nn.Module, optimizer: Optimizer) -> Sequence[Tensor]:
        first, last = list(model.parameters())[::2]
        last.requires_grad_(False)  # from the start
        for number in range(8):
            first.requires_grad_(number not in (2, 3, 6))
            last.requires_grad_(number >= 4)
            optimizer.zero_grad()
            loss_of(model, number).backward()
            before = first.detach().clone(), last.detach().clone()
            optimizer.step()
            assert torch.equal(first, before[0]) is not first.requires_grad
            assert torch.equal(last, before[1]) is not last.requires_grad
        return ()

    # One graph for all gradients, one for every pattern of missing ones.
    compare(loop, compiles=2)


def test_frozen_parameters_in_a_distributed_checkpoint() -> None:
    def loop(model: nn.Module, optimizer: Optimizer) -> Sequence[Tensor]:
        train(model, optimizer, range(2))
        first = next(model.parameters())
        first.requires_grad_(False)
        saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
        kept = copy.deepcopy(optimizer.state_dict())
        set_optimizer_state_dict(model, optimizer, saved)
        lost = optimizer.state[first].get("momentum_buffer", torch.zeros(()))
        assert lost.norm() == 0
        optimizer.load_state_dict(kept)
        assert optimizer.state[first]["momentum_buffer"].norm() > 0
        set_optimizer_state_dict(model, optimizer, saved)
        first.requires_grad_(True)
        train(model, optimizer, range(2, 4))
        return ()

    compare(loop)


def test_a_group_added_in_mid_run() -> None:
    def loop(model: nn.Module, optimizer: Optimizer) -> Sequence[Tensor]:
        torch.manual_seed(1)
        head = nn.Linear(12, 12, bias=False)
        for number in STEPS:
            if number == 2:
                optimizer.add_param_group({"params": head.parameters(), "lr": 0.2})
            optimizer.zero_grad()
            head.zero_grad()
            loss_of(lambda x: head(model(x)), number).backward()
            optimizer.step()
        return list(head.parameters())

    compare(loop, compiles=2, recompiles=1)


# -- around the optimizer -------------------------------------------------------------------------------------------

SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=4),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.3, total_steps=8),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, total_iters=2), lr_scheduler.ExponentialLR(o, 0.5)], milestones=[2]
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=10.0),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_lr_schedulers(name: str) -> None:
    def loop(model: nn.Module, optimizer: Optimizer) -> Sequence[Tensor]:
        scheduler = SCHEDULERS[name](optimizer)
        rates = []
        for number in STEPS:
            optimizer.zero_grad()
            loss = loss_of(model, number)
            loss.backward()
            optimizer.step()
            scheduler.step(*([loss.detach()] if name == "ReduceLROnPlateau" else []))
            rates.append(torch.tensor(optimizer.param_groups[0]["lr"]))
        assert len(set(map(float, rates))) > 1
        return rates

    compare(loop)


def test_ema_of_the_weights() -> None:
    def loop(model: nn.Module, optimizer: Optimizer) -> Sequence[Tensor]:
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        for number in STEPS:
            train(model, optimizer, range(number, number + 1))
            average.update_parameters(model)
        assert not any(torch.equal(p, q) for p, q in zip(average.module.parameters(), model.parameters(), strict=True))
        return list(average.module.parameters())

    compare(loop)


def pickled(thing: Any) -> Any:
    return pickle.loads(pickle.dumps(thing))


@contextmanager
def left_alone(model: nn.Module, optimizer: Optimizer) -> Iterator[None]:
    before = values([*model.parameters(), *state_of(optimizer)])
    yield
    assert_equal([*model.parameters(), *state_of(optimizer)], before)


def copied_by(duplicate: Callable[[Any], Any]) -> None:
    def loop(model: nn.Module, optimizer: Optimizer) -> Sequence[Tensor]:
        train(model, optimizer, range(2))
        twin, twin_optimizer = duplicate((model, optimizer))
        assert type(twin_optimizer) is type(optimizer)
        if isinstance(optimizer, torch.optim.Muon):
            assert "step" not in twin_optimizer.__dict__  # stock, to be wrapped anew
        with left_alone(model, optimizer):
            train(twin, twin_optimizer, range(2, 4))
        with left_alone(twin, twin_optimizer):
            train(model, optimizer, range(2, 4))
        assert_equal(list(twin.parameters()), list(model.parameters()))
        if isinstance(optimizer, torch.optim.Muon):
            mc.compile_step(twin_optimizer, backend="aot_eager", config=EXACT)
        train(twin, twin_optimizer, range(4, 6))
        return [*twin.parameters(), *state_of(twin_optimizer)]

    compare(loop)


def test_deepcopy() -> None:
    copied_by(copy.deepcopy)


def test_pickling() -> None:
    copied_by(pickled)
