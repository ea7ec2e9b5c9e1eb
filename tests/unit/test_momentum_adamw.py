"""Momentum, direction and AdamW of a bucket against float64, one row at a time."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import Tensor

import muon_compile as mc
from muon_compile.build.adamw import adamw_update
from muon_compile.build.lion import lion_update
from muon_compile.build.momentum import direction, exact_direction
from tests.reference import RULES, adamw_step, gaussian, momentum_step, relative_error

# A few float32 roundings (6e-8 each) of numbers of one size.
FLOAT32 = 5e-7


def double(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


@pytest.mark.parametrize(("form", "nesterov"), [(f, n) for f in ("ema", "sum") for n in (True, False)])
@pytest.mark.parametrize("shape", [(6, 8), (3, 6, 8), ()])
def test_momentum_and_direction(form: Literal["ema", "sum"], nesterov: bool, shape: tuple[int, ...]) -> None:
    rules = next(rule for rule in RULES.values() if rule.ema is (form == "ema"))
    config = mc.MuonConfig(momentum_form=form, nesterov=nesterov)
    grad, momentum = gaussian(4, *shape, seed=1), gaussian(4, *shape, seed=2)
    new, update = direction(grad, momentum, double(0.9), config)
    m = 0.9 * momentum.double() + (0.1 if form == "ema" else 1.0) * grad.double()
    assert relative_error(new, m) <= FLOAT32
    if not nesterov:
        assert torch.equal(new, update)
    else:
        assert relative_error(update, momentum_step(grad, momentum, 0.9, rules)[1]) <= FLOAT32


def test_momentum_of_one_and_of_zero() -> None:
    grad, momentum = gaussian(2, 3, 4, seed=1), gaussian(2, 3, 4, seed=2)
    for form in ("ema", "sum"):
        config = mc.MuonConfig(momentum_form=form)  # type: ignore[arg-type]
        new, update = direction(grad, momentum, double(0.0), config)
        assert torch.equal(update, grad)
        assert relative_error(new, grad) <= FLOAT32
        kept, _ = direction(grad, momentum, double(1.0), config)
        assert torch.equal(kept, momentum if form == "ema" else momentum + grad)


@pytest.mark.parametrize("form", [direction, exact_direction])
def test_every_row_may_have_its_own_coefficient(form: object) -> None:
    assert callable(form)
    config = mc.MuonConfig()
    grad, momentum = gaussian(3, 5, 4, seed=1), gaussian(3, 5, 4, seed=2)
    values = [0.5, 0.9, 0.99]
    mu = torch.tensor(values, dtype=torch.float64).view(3, 1, 1)
    new, update = form(grad, momentum, mu, config)
    for row, value in enumerate(values):
        m, u = momentum_step(grad[row], momentum[row], value, RULES["torch"])
        assert relative_error(new[row], m) <= FLOAT32
        assert relative_error(update[row], u) <= FLOAT32


@pytest.mark.parametrize(
    ("grad_dtype", "state_dtype", "wide"),
    [
        (torch.bfloat16, torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.float32, torch.bfloat16, torch.float32),
        (torch.float16, torch.float16, torch.float32),
        (torch.float64, torch.float32, torch.float64),
    ],
    ids=lambda dtype: str(dtype).removeprefix("torch."),
)
def test_narrow_tensors_are_combined_in_float32(
    grad_dtype: torch.dtype, state_dtype: torch.dtype, wide: torch.dtype
) -> None:
    # In bfloat16 arithmetic the error would be 2^-9 and more.
    grad, momentum = gaussian(4, 6, 8, seed=1, dtype=grad_dtype), gaussian(4, 6, 8, seed=2, dtype=state_dtype)
    new, update = direction(grad, momentum, double(0.95), mc.MuonConfig())
    assert new.dtype == update.dtype == wide
    m, u = momentum_step(grad, momentum, 0.95, RULES["torch"])
    assert relative_error(new, m) <= FLOAT32
    assert relative_error(update, u) <= FLOAT32


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mu", [0.0, 0.3, 0.5, 0.95, 0.999])
def test_exact_direction_has_the_bits_of_lerp(dtype: torch.dtype, mu: float) -> None:
    # As torch.optim.Muon writes it, with Python numbers as weights.
    grad, momentum = gaussian(4, 6, 8, seed=1, dtype=dtype), gaussian(4, 6, 8, seed=2, dtype=dtype)
    for nesterov in (True, False):
        new, update = exact_direction(grad, momentum, double(mu), mc.MuonConfig(nesterov=nesterov))
        expected = momentum.lerp(grad, 1 - mu)
        assert new.dtype == update.dtype == dtype
        assert torch.equal(new, expected)
        assert torch.equal(update, grad.lerp(expected, mu) if nesterov else expected)


def test_arguments_are_left_alone() -> None:
    grad, momentum, step = gaussian(2, 3, 4, seed=1), gaussian(2, 3, 4, seed=2), torch.tensor([1.0, 5.0])
    square = gaussian(2, 3, 4, seed=3).square()
    tensors = [grad, momentum, step, square]
    before = [t.clone() for t in tensors]
    direction(grad, momentum, double(0.9), mc.MuonConfig())
    exact_direction(grad, momentum, double(0.9), mc.MuonConfig())
    state = {"exp_avg": momentum, "exp_avg_sq": square, "step": step, "max_exp_avg_sq": square}
    hyper = {"lr": double(0.1), "beta1": double(0.9), "beta2": double(0.999)}
    adamw_update(grad, state, hyper, mc.AdamWConfig(amsgrad=True, maximize=True))
    for tensor, old in zip(tensors, before, strict=True):
        assert torch.equal(tensor, old)


# -- AdamW ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (7,), (6, 8), (2, 3, 4, 5)])
@pytest.mark.parametrize("eps", [1e-8, 0.1])
def test_adamw_rows_with_step_counts_of_their_own(shape: tuple[int, ...], eps: float) -> None:
    # A count of 1 is where 1 - beta2 ** step cancels most: 1 - 0.999 in float32 is off by 5e-5.
    steps = [0, 1, 9, 10_000]
    grad, first = gaussian(4, *shape, seed=1), gaussian(4, *shape, seed=2)
    second = gaussian(4, *shape, seed=3).square()
    state = {"exp_avg": first, "exp_avg_sq": second, "step": torch.tensor(steps, dtype=torch.float32)}
    hyper = {"lr": double(0.3), "beta1": double(0.9), "beta2": double(0.999)}
    new, update = adamw_update(grad, state, hyper, mc.AdamWConfig(eps=eps))
    assert new["step"].tolist() == [1, 2, 10, 10_001]
    numbers = {name: float(value) for name, value in hyper.items()} | {"weight_decay": 0.0}
    for row, step in enumerate(steps):
        zero = torch.zeros(shape, dtype=torch.float64)
        expected, moments = adamw_step(zero, grad[row], (first[row], second[row]), step + 1, numbers, eps)
        assert relative_error(update[row], expected) <= FLOAT32
        assert relative_error(new["exp_avg"][row], moments[0]) <= FLOAT32
        assert relative_error(new["exp_avg_sq"][row], moments[1]) <= FLOAT32


def test_adamw_of_float32_hyperparameters_loses_no_digits() -> None:
    """NPUs have no float64. Plainly computed, 1 - beta2 ** step would be off by 3e-5 in the second step."""
    steps = [0, 1, 2, 9, 999, 10_000]
    grad, first = gaussian(6, 40, seed=1), gaussian(6, 40, seed=2)
    second = gaussian(6, 40, seed=3).square()
    state = {"exp_avg": first, "exp_avg_sq": second, "step": torch.tensor(steps, dtype=torch.float32)}
    narrow = {name: torch.tensor(value) for name, value in (("lr", 0.3), ("beta1", 0.9), ("beta2", 0.999))}
    # The same coefficients, in float64 from there on.
    _, expected = adamw_update(grad, state, {n: value.double() for n, value in narrow.items()}, mc.AdamWConfig())
    _, update = adamw_update(grad, state, narrow, mc.AdamWConfig())
    for row in range(len(steps)):
        assert relative_error(update[row], expected[row]) <= 1e-6


def test_adamw_rows_with_hyperparameters_of_their_own() -> None:
    grad, first, second = gaussian(2, 5, seed=1), gaussian(2, 5, seed=2), gaussian(2, 5, seed=3).square()
    rows = [{"lr": 0.3, "beta1": 0.9, "beta2": 0.999}, {"lr": 0.1, "beta1": 0.5, "beta2": 0.9}]
    hyper = {name: torch.tensor([row[name] for row in rows], dtype=torch.float64) for name in rows[0]}
    state = {"exp_avg": first, "exp_avg_sq": second, "step": torch.tensor([3.0, 3.0])}
    _, update = adamw_update(grad, state, hyper, mc.AdamWConfig())
    for i, row in enumerate(rows):
        numbers = row | {"weight_decay": 0.0}
        expected, _ = adamw_step(torch.zeros(5), grad[i], (first[i], second[i]), 4, numbers)
        assert relative_error(update[i], expected) <= FLOAT32


def test_adamw_amsgrad_and_maximize() -> None:
    grad, first, second = gaussian(1, 50, seed=1), gaussian(1, 50, seed=2), gaussian(1, 50, seed=3).square()
    largest = gaussian(1, 50, seed=4).square()
    state = {"exp_avg": first, "exp_avg_sq": second, "step": torch.tensor([6.0]), "max_exp_avg_sq": largest}
    hyper = {"lr": double(0.3), "beta1": double(0.9), "beta2": double(0.99)}
    numbers = {"lr": 0.3, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0}
    zero = torch.zeros(1, 50)

    new, update = adamw_update(grad, state, hyper, mc.AdamWConfig(amsgrad=True))
    _, (m, v) = adamw_step(zero, grad, (first, second), 7, numbers)
    top = torch.maximum(v, largest.double())
    assert 0 < int((top > v).sum()) < 50  # either of the two wins somewhere
    expected = -0.3 * m / (1 - 0.9**7) / (torch.sqrt(top / (1 - 0.99**7)) + 1e-8)
    assert relative_error(update, expected) <= FLOAT32
    assert relative_error(new["max_exp_avg_sq"], top) <= FLOAT32
    assert relative_error(new["exp_avg_sq"], v) <= FLOAT32

    _, update = adamw_update(grad, state, hyper, mc.AdamWConfig(maximize=True))
    expected, _ = adamw_step(zero, -grad, (first, second), 7, numbers)
    assert relative_error(update, expected) <= FLOAT32


def test_adamw_of_bfloat16_is_computed_in_float32() -> None:
    grad, first = gaussian(2, 40, seed=1, dtype=torch.bfloat16), gaussian(2, 40, seed=2, dtype=torch.bfloat16)
    second = gaussian(2, 40, seed=3, dtype=torch.bfloat16).square()
    state = {"exp_avg": first, "exp_avg_sq": second, "step": torch.tensor([2.0, 2.0])}
    hyper = {"lr": double(0.3), "beta1": double(0.9), "beta2": double(0.999)}
    new, update = adamw_update(grad, state, hyper, mc.AdamWConfig())
    numbers = {"lr": 0.3, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.0}
    expected, moments = adamw_step(torch.zeros(2, 40), grad, (first, second), 3, numbers)
    assert update.dtype == torch.float32
    assert relative_error(update, expected) <= FLOAT32
    assert relative_error(new["exp_avg_sq"], moments[1]) <= FLOAT32


def test_adamw_of_a_zero_gradient_moves_nothing() -> None:
    zero = torch.zeros(1, 5)
    state = {"exp_avg": zero, "exp_avg_sq": zero, "step": torch.zeros(1)}
    hyper = {"lr": double(0.3), "beta1": double(0.9), "beta2": double(0.999)}
    _, update = adamw_update(zero, state, hyper, mc.AdamWConfig())
    assert torch.equal(update, zero)


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_adamw_with_eps_inside_the_bias_correction(step: int) -> None:
    """Moonlight: ``lr sqrt(1 - beta2 ** t) / (1 - beta1 ** t) m / (sqrt(v) + eps)``."""
    grad, first, second = gaussian(1, 9, seed=1), gaussian(1, 9, seed=2), gaussian(1, 9, seed=3).square()
    state = {"exp_avg": first, "exp_avg_sq": second, "step": torch.tensor([step - 1.0])}
    hyper = {"lr": double(0.3), "beta1": double(0.9), "beta2": double(0.95)}
    _, update = adamw_update(grad, state, hyper, mc.AdamWConfig(eps=0.1, corrected_eps=True))
    m, v = 0.9 * first.double() + 0.1 * grad.double(), 0.95 * second.double() + 0.05 * grad.double() ** 2
    expected = -0.3 * (1 - 0.95**step) ** 0.5 / (1 - 0.9**step) * m / (v.sqrt() + 0.1)
    assert relative_error(update, expected) <= FLOAT32


def test_adamw_counts_absent_parameters_only_where_steps_are_shared() -> None:
    mask = torch.tensor([True, False])
    state = {name: gaussian(2, 3, seed=4).square() for name in ("exp_avg", "exp_avg_sq")}
    state["step"] = torch.tensor([4.0, 4.0])
    hyper = {"lr": double(0.3), "beta1": double(0.9), "beta2": double(0.95)}
    for shared in (False, True):
        config = mc.AdamWConfig(shared_steps=shared)
        new, update = adamw_update(torch.zeros(2, 3), state, hyper, config, mask)
        assert new["step"].tolist() == [5.0, 5.0 if shared else 4.0]
        assert torch.equal(new["exp_avg"][1], state["exp_avg"][1]) and not update[1].any() and update[0].any()


# -- Lion, and an average that the gradient is added to ---------------------------------------------------------------


def test_lion_by_its_formula() -> None:
    grad, first = gaussian(3, 5, 4, seed=1), gaussian(3, 5, 4, seed=2)
    hyper = {"lr": double(0.3), "beta1": torch.tensor([0.9, 0.5, 0.9]), "beta2": double(0.99)}
    new, update = lion_update(grad, {"exp_avg": first}, hyper, torch.tensor([True, True, False]))
    for row, beta1 in enumerate((0.9, 0.5)):
        g, m = grad[row].double(), first[row].double()
        assert relative_error(update[row], -0.3 * torch.sign(beta1 * m + (1 - beta1) * g)) <= 1e-7
        assert relative_error(new["exp_avg"][row], 0.99 * m + 0.01 * g) <= FLOAT32
    assert torch.equal(new["exp_avg"][2], first[2]) and not update[2].any()


def test_lion_stands_still_where_it_has_no_direction() -> None:
    hyper = {"lr": double(0.3), "beta1": double(0.9), "beta2": double(0.99)}
    _, update = lion_update(torch.zeros(1, 4), {"exp_avg": torch.zeros(1, 4)}, hyper)
    assert not update.any()


@pytest.mark.parametrize("nesterov", [True, False])
def test_an_average_that_the_gradient_is_added_to(nesterov: bool) -> None:
    grad, momentum = gaussian(2, 3, 4, seed=1), gaussian(2, 3, 4, seed=2)
    config = mc.MuonConfig(momentum_form="ema_added", nesterov=nesterov)
    new, ahead = direction(grad, momentum, double(0.9), config)
    wanted = 0.9 * momentum.double() + 0.1 * grad.double()
    assert relative_error(new, wanted) <= FLOAT32
    assert relative_error(ahead, wanted + grad.double() if nesterov else wanted) <= FLOAT32
