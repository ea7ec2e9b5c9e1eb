"""Forward, backward and update in one graph, held against the eager loop."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

import muon_compile as mc
from tests.unit.untouched import refused

STEPS = 4
# A plain AdamW's first steps divide a gradient by its own size, and would show the rounding of a tiny one as a whole.
ADAMW = mc.AdamWConfig(eps=0.1)
# float32 throughout: the graph's own order of sums is all that differs.
TOLERANCE = 1e-5


class Model(nn.Module):
    """Matrices of one shape in a bucket, a tied weight, buffers that forward writes, a layer that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embedding.weight
        self.unused = nn.Linear(3, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(F.gelu(self.first(self.embedding(x))))
        result: Tensor = self.head(x + self.second(x))
        return result


def model_of(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model()


def optimizer_of(model: nn.Module, **more: Any) -> mc.Muon:
    config = mc.MuonConfig(ns_dtype="float32", ns_steps=2)
    groups = mc.route(model, verbose=False)
    rest = {"adamw_lr": 3e-3, "adamw_config": ADAMW, "backend": "aot_eager"} | more
    return mc.Muon(groups, lr=0.02, weight_decay=0.1, config=config, **rest)


def two_rates(model: Model) -> mc.Muon:
    """One bucket with two values of lr."""
    matrices = [model.first.weight, model.second.weight]
    rest = [p for p in model.parameters() if all(p is not m for m in matrices)]
    groups: list[dict[str, Any]] = [{"params": [m], "lr": lr} for m, lr in zip(matrices, (0.02, 0.01), strict=True)]
    groups.append({"params": rest, "algorithm": "adamw"})
    config = mc.MuonConfig(ns_dtype="float32", ns_steps=2)
    return mc.Muon(groups, lr=0.02, weight_decay=0.1, config=config, adamw_config=ADAMW, backend="aot_eager")


def batch_of(number: int, size: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(0, 12, (size,), generator=generator), torch.randint(0, 12, (size,), generator=generator)


def eager_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]) -> Tensor:
    loss = F.cross_entropy(model(batch[0]), batch[1])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def assert_alike(actual: nn.Module, expected: nn.Module, start: nn.Module) -> None:
    """Changes since the start, relative to themselves; buffers likewise."""
    first = start.state_dict()
    for (name, a), b in zip(actual.state_dict().items(), expected.state_dict().values(), strict=True):
        change = b.double() - first[name].double()
        error = float((a.double() - b.double()).norm() / change.norm().clamp(min=1e-12))
        assert error <= TOLERANCE or torch.equal(a, b), f"{name}: {error}"


def with_model(model: nn.Module, x: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(model(x), target)


class WithLoss(nn.Module):
    """A model that returns its loss, as a field of something."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, *, target: Tensor) -> Any:
        return self.Output(F.cross_entropy(self.model(x), target))

    class Output:
        def __init__(self, loss: Tensor) -> None:
            self.loss = loss


@pytest.mark.parametrize(
    "loss_fn", [nn.CrossEntropyLoss(), F.cross_entropy, with_model], ids=["module", "function", "model"]
)
def test_it_is_the_eager_loop(loss_fn: Callable[..., Tensor]) -> None:
    start = model_of()
    model, other = copy.deepcopy(start), copy.deepcopy(start)
    optimizer, reference = optimizer_of(model), optimizer_of(other)
    schedulers = [LambdaLR(o, lambda step: 1 / (step + 1)) for o in (optimizer, reference)]
    step = mc.compile_train_step(model, loss_fn, optimizer, backend="aot_eager")
    losses = []
    for number in range(STEPS):
        losses.append((step(*batch_of(number)), eager_step(other, reference, batch_of(number))))
        for scheduler in schedulers:
            scheduler.step()
    for loss, expected in losses:
        assert not loss.requires_grad
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    assert_alike(model, other, start)
    for mine, theirs in zip(optimizer.state.values(), reference.state.values(), strict=True):
        for name in mine:
            torch.testing.assert_close(mine[name], theirs[name], rtol=1e-4, atol=1e-7)
    assert torch.equal(model.unused.weight, start.unused.weight), "no gradient, no decay"
    assert model.head.weight is model.embedding.weight
    assert len(step.graphs) == 1, "values never compile anew"
    assert step.step.stats.steps == STEPS
    assert step.step.stats.compiles == 0, "the step by itself was never needed"
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.inductor
def test_on_inductor() -> None:
    start = model_of()
    model, other = copy.deepcopy(start), copy.deepcopy(start)
    optimizers = [two_rates(m) for m in (model, other)]
    step = mc.compile_train_step(model, nn.CrossEntropyLoss(), optimizers[0])
    for number in range(STEPS):
        loss = step(*batch_of(number))
        expected = eager_step(other, optimizers[1], batch_of(number))
        torch.testing.assert_close(loss, expected, rtol=1e-4, atol=0)
    assert_alike(model, other, start)
    assert len(step.graphs) == 1


def test_a_model_that_returns_its_loss() -> None:
    model, other = WithLoss(model_of()), model_of()
    optimizer, reference = optimizer_of(model), optimizer_of(other)
    step = mc.compile_train_step(model, None, optimizer, backend="aot_eager")
    for number in range(2):
        x, target = batch_of(number)
        torch.testing.assert_close(step(x, target=target), eager_step(other, reference, (x, target)))
    assert_alike(model.model, other, model_of())


def test_freezing_and_thawing_is_followed() -> None:
    start = model_of()
    model, other = copy.deepcopy(start), copy.deepcopy(start)
    optimizer, reference = optimizer_of(model), optimizer_of(other)
    step = mc.compile_train_step(model, nn.CrossEntropyLoss(), optimizer, backend="aot_eager")
    for number, frozen in enumerate((False, True, True, False)):
        for m in (model, other):
            m.first.weight.requires_grad_(not frozen)
        before = model.first.weight.detach().clone()
        step(*batch_of(number))
        eager_step(other, reference, batch_of(number))
        assert torch.equal(model.first.weight, before) == frozen
    assert_alike(model, other, start)


def test_eval_mode_and_other_shapes_are_new_graphs_of_the_same_state() -> None:
    start = model_of()
    model, other = copy.deepcopy(start), copy.deepcopy(start)
    optimizer, reference = optimizer_of(model), optimizer_of(other)
    step = mc.compile_train_step(model, nn.CrossEntropyLoss(), optimizer, backend="aot_eager")
    for number, (training, size) in enumerate(((True, 6), (False, 6), (True, 9))):
        for m in (model, other):
            m.train(training)
        step(*batch_of(number, size))
        eager_step(other, reference, batch_of(number, size))
    assert_alike(model, other, start)


def test_a_checkpoint_goes_on_in_either_loop() -> None:
    start = model_of()
    model, other = copy.deepcopy(start), copy.deepcopy(start)
    optimizer, reference = optimizer_of(model), optimizer_of(other)
    step = mc.compile_train_step(model, nn.CrossEntropyLoss(), optimizer, backend="aot_eager")
    for number in range(2):
        step(*batch_of(number))
        eager_step(other, reference, batch_of(number))
    model.load_state_dict(copy.deepcopy(other.state_dict()))
    optimizer.load_state_dict(copy.deepcopy(reference.state_dict()))
    for number in range(2, 4):
        step(*batch_of(number))
        eager_step(other, reference, batch_of(number))
    eager_step(model, optimizer, batch_of(4))
    eager_step(other, reference, batch_of(4))
    assert_alike(model, other, start)
    assert len(step.graphs) == 1


def test_joined_optimizers_and_hooks() -> None:
    start = model_of()
    model, other = copy.deepcopy(start), copy.deepcopy(start)
    heard: list[str] = []

    def pair(of: Model) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
        hidden, rest = mc.route(of, verbose=False)
        return torch.optim.Muon(hidden["params"], lr=0.02), torch.optim.AdamW(rest["params"], lr=3e-3)

    muon, adamw = pair(model)
    muon.register_step_pre_hook(lambda *_: heard.append("before"))
    adamw.register_step_post_hook(lambda *_: heard.append("after"))
    joined = mc.compile_step(muon, adamw, backend="aot_eager", ns="standard")
    step = mc.compile_train_step(model, nn.CrossEntropyLoss(), joined, backend="aot_eager")
    stock = pair(other)
    for number in range(2):
        step(*batch_of(number))
        loss = F.cross_entropy(other(batch_of(number)[0]), batch_of(number)[1])
        other.zero_grad()
        loss.backward()
        for optimizer in stock:
            optimizer.step()
    assert heard == ["before", "after"] * 2
    for (name, a), b in zip(model.named_parameters(), other.parameters(), strict=True):
        # bfloat16 products, in an order of their own: 2 of their units.
        change = (b - dict(start.named_parameters())[name]).detach().norm().clamp(min=1e-12)
        assert float((a - b).detach().norm() / change) <= 2e-2, name


def test_autocast_is_the_forwards_alone() -> None:
    model, other = model_of(), model_of()
    optimizer, reference = optimizer_of(model), optimizer_of(other)
    step = mc.compile_train_step(model, nn.CrossEntropyLoss(), optimizer, backend="aot_eager")
    for number in range(2):
        with torch.autocast("cpu", enabled=number == 0):
            step(*batch_of(number))
            loss = F.cross_entropy(other(batch_of(number)[0]), batch_of(number)[1])
        other.zero_grad()
        loss.backward()
        reference.step()
    assert_alike(model, other, model_of())


def nothing_of(model: nn.Module, x: Tensor, target: Tensor) -> Any:
    return model(x)


def test_what_does_not_fit_is_refused_and_changes_nothing() -> None:
    model = model_of()
    optimizer = optimizer_of(model)
    step = mc.compile_train_step(model, nothing_of, optimizer, backend="aot_eager")
    with refused(ValueError, "expected the loss to be one number", "shape (6, 12)", by=[optimizer]):
        step(*batch_of(0))
    with refused(ValueError, "expected an optimizer of the model's parameters", "first.weight", by=[optimizer]):
        mc.compile_train_step(model_of(1), F.cross_entropy, optimizer, backend="aot_eager")
    with refused(ValueError, "backend", "'inductor', 'aot_eager'", "'torchair'", by=[optimizer]):
        mc.compile_train_step(model, F.cross_entropy, optimizer, backend="torchair")
    config = mc.CompileConfig(exact=True)
    stock = torch.optim.Muon([model.first.weight])
    with pytest.raises(ValueError, match="expected exact=False"):
        mc.compile_train_step(model, F.cross_entropy, stock, backend="aot_eager", config=config)


def test_a_first_step_that_fails_in_its_kernels_is_not_gone_on_from() -> None:
    """It has just been compiled, and that it was is no excuse."""
    optimizer = optimizer_of(model := model_of())
    step = mc.compile_train_step(model, F.cross_entropy, optimizer, backend="aot_eager")
    x, target = batch_of(0)
    with pytest.raises(IndexError):
        step(x + 99, target)
    assert len(step.graphs) == 1
    with pytest.raises(RuntimeError, match="An earlier step failed inside its kernels"):
        step(x, target)


def test_a_hyperparameter_that_poisons_is_refused_before_anything() -> None:
    model = model_of()
    optimizer = optimizer_of(model)
    step = mc.compile_train_step(model, F.cross_entropy, optimizer, backend="aot_eager")
    step(*batch_of(0))
    optimizer.param_groups[0]["lr"] = float("nan")
    with refused(ValueError, "lr", "expected a finite number", "nan", by=[optimizer], tensors=list(model.buffers())):
        step(*batch_of(1))
