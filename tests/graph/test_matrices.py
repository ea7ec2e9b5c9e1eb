"""What counts as a matrix: experts, fused weights, heads, convolutions; scales, eps and zeros. Pure and compiled.

A step from zero parameters with lr 1, no momentum and no decay leaves minus the scaled, orthogonalized gradient.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Muon

import muon_compile as mc
from muon_compile.config import EpsMode, Preset
from tests.reference import RULES, gaussian, orthogonal, relative_error, scale_original, scale_rms

# float32 products: in bfloat16 every matrix errs by 2e-2, which would hide a block cut one row off in a long weight.
FLOAT32 = mc.MuonConfig(ns_dtype="float32")
# Five steps enlarge float32 roundings of 6e-8 about a hundredfold.
TOLERANCE = 1e-5
HYPER = {"lr": 1.0, "weight_decay": 0.0, "momentum": 0.0}

Updates = Callable[[Mapping[str, Tensor], mc.MuonConfig], dict[str, Tensor]]


def pure(grads: Mapping[str, Tensor], config: mc.MuonConfig, **plan: int) -> dict[str, Tensor]:
    zeros = {name: torch.zeros_like(grad) for name, grad in grads.items()}
    made = mc.make_plan(mc.inspect_params(zeros, config=config), **plan)  # type: ignore[arg-type]
    params, _ = mc.build_step(made)(zeros, mc.init_state(made, zeros), grads, HYPER)
    return {name: -p for name, p in params.items()}


def compiled(grads: Mapping[str, Tensor], config: mc.MuonConfig) -> dict[str, Tensor]:
    params = {name: Parameter(torch.zeros_like(grad)) for name, grad in grads.items()}
    optimizer = mc.Muon(list(params.items()), **HYPER, config=config, backend="aot_eager")  # type: ignore[arg-type]
    for name, param in params.items():
        param.grad = grads[name].clone()
    optimizer.step()
    return {name: -p.detach() for name, p in params.items()}


@pytest.fixture(params=[pure, compiled], ids=["pure", "aot_eager"])
def updates(request: pytest.FixtureRequest) -> Updates:
    """Updates by parameter name, of gradients by parameter name."""
    result: Updates = request.param
    return result


def check(got: Tensor, grad: Tensor, scale: Callable[[int, int], float] = scale_original) -> None:
    """``got`` is the float64 reference's update of one matrix."""
    assert relative_error(got, scale(*grad.shape) * orthogonal(grad)) <= TOLERANCE


# -- experts ----------------------------------------------------------------------------------------------------------


def test_case_a03_experts_are_matrices_of_their_own(updates: Updates) -> None:
    grad = gaussian(4, 10, 6, seed=1)
    got = updates({"w": grad}, FLOAT32)["w"]
    for expert in range(4):
        check(got[expert], grad[expert])  # scaled by sqrt(10 / 6), not by sqrt(4 / 10) or 1
        alone = updates({"w": grad[expert].clone()}, FLOAT32)["w"]
        assert relative_error(got[expert], alone) <= TOLERANCE


def test_case_a03_permuted_experts_give_permuted_updates(updates: Updates) -> None:
    grad, order = gaussian(4, 10, 6, seed=1), torch.tensor([2, 0, 3, 1])
    got, permuted = updates({"w": grad}, FLOAT32)["w"], updates({"w": grad[order]}, FLOAT32)["w"]
    assert relative_error(permuted, got[order]) <= TOLERANCE
    assert relative_error(permuted, got) > 0.1


@pytest.mark.parametrize("name", ["moe.experts.w1", "embed", "router.bias", "x", "blocks.0.conv.weight"])
def test_case_a03_a_name_changes_nothing(name: str, updates: Updates) -> None:
    grad = gaussian(4, 10, 6, seed=1)
    assert torch.equal(updates({name: grad}, FLOAT32)[name], updates({"w": grad}, FLOAT32)["w"])


def test_one_hot_expert_does_not_move_the_idle_ones(updates: Updates) -> None:
    grad = torch.zeros(4, 10, 6)
    grad[2] = gaussian(10, 6, seed=1)
    got = updates({"w": grad}, FLOAT32)["w"]
    check(got[2], grad[2])
    assert torch.equal(got[[0, 1, 3]], torch.zeros(3, 10, 6))


# -- convolutions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scale", "expected"),
    # From the four dims as they come it would be 1 and 0.2 sqrt(3).
    [("original", math.sqrt(512 / 27)), ("match_rms_adamw", 0.2 * math.sqrt(512))],
)
def test_case_a02_the_scale_of_a_convolution_is_its_matrix_s(
    scale: Literal["original", "match_rms_adamw"], expected: float, updates: Updates
) -> None:
    grad = gaussian(512, 3, 3, 3, seed=1)
    got = updates({"w": grad}, dataclasses.replace(FLOAT32, scale=scale))["w"]
    check(got.view(512, 27), grad.view(512, 27), lambda *_: expected)


@pytest.mark.parametrize("shape", [(8, 3, 3, 3), (6, 2, 2, 3, 2), (5, 4, 1, 1)])
def test_case_a02_a_convolution_is_one_matrix(shape: tuple[int, ...], updates: Updates) -> None:
    grad = gaussian(*shape, seed=2)
    check(updates({"w": grad}, FLOAT32)["w"].flatten(1), grad.flatten(1))


def test_a_1d_convolution_is_flattened_when_asked_and_by_route() -> None:
    grad = gaussian(16, 4, 5, seed=3)
    flat = updates_of_conv1d(grad)
    check(flat.flatten(1), grad.flatten(1))
    for got in (pure, compiled):
        config = dataclasses.replace(FLOAT32, flatten=True)
        assert relative_error(got({"w": grad}, config)["w"], flat) <= TOLERANCE
        # Without it a 3-D weight is a stack.
        stack = got({"w": grad}, FLOAT32)["w"]
        check(stack[7], grad[7])
        assert relative_error(stack, flat) > 0.1


def updates_of_conv1d(grad: Tensor) -> Tensor:
    model = nn.Sequential(nn.Conv1d(grad.shape[1], grad.shape[0], grad.shape[2], bias=False), nn.Linear(2, 2))
    model[0].weight.data.zero_()
    optimizer = mc.Muon(mc.route(model, verbose=False), **HYPER, config=FLOAT32, backend="aot_eager")  # type: ignore[arg-type]
    model[0].weight.grad = grad.clone()
    optimizer.step()
    result: Tensor = -model[0].weight.detach()
    return result


def test_four_dims_may_be_a_stack(updates: Updates) -> None:
    grad = gaussian(2, 3, 6, 4, seed=4)
    got = updates({"w": grad}, dataclasses.replace(FLOAT32, flatten=False))["w"]
    for i in range(2):
        for j in range(3):
            check(got[i, j], grad[i, j])


# -- fused weights ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", ["original", "match_rms_adamw"])
# Blocks of one scale, of several (24 x 12 is tall), in a square weight and with equal blocks.
@pytest.mark.parametrize("sizes", [(8, 6, 4), (24, 8, 4), (4, 4, 4), (12,)])
def test_every_block_of_a_fused_weight_is_a_matrix(
    sizes: tuple[int, ...], scale: Literal["original", "match_rms_adamw"], updates: Updates
) -> None:
    config = dataclasses.replace(FLOAT32, split_sizes=sizes, scale=scale)
    grads = {name: gaussian(sum(sizes), 12, seed=seed) for seed, name in enumerate("abc")}
    for name, got in updates(grads, config).items():
        for block, grad in zip(got.split(sizes), grads[name].split(sizes), strict=True):
            check(block, grad, scale_original if scale == "original" else scale_rms)


def test_every_expert_of_a_fused_stack_is_cut_alike(updates: Updates) -> None:
    sizes = (16, 4)
    config = dataclasses.replace(FLOAT32, split_sizes=sizes)
    grads = {name: gaussian(3, 20, 6, seed=seed) for seed, name in enumerate("ab")}
    for name, got in updates(grads, config).items():
        for expert in range(3):
            for block, grad in zip(got[expert].split(sizes), grads[name][expert].split(sizes), strict=True):
                check(block, grad)


@pytest.mark.parametrize(("shape", "heads"), [((12, 10), 3), ((12, 2), 3), ((12, 10), 1), ((12, 10), 12)])
def test_every_head_is_a_matrix(shape: tuple[int, int], heads: int, updates: Updates) -> None:
    grads = {name: gaussian(*shape, seed=seed) for seed, name in enumerate("ab")}
    got = updates(grads, dataclasses.replace(FLOAT32, num_heads=heads))
    for name in grads:
        for head, grad in zip(got[name].chunk(heads), grads[name].chunk(heads), strict=True):
            check(head, grad)


def test_heads_of_a_stack_and_of_a_convolution(updates: Updates) -> None:
    config = dataclasses.replace(FLOAT32, num_heads=2)
    grads = {"stack": gaussian(3, 8, 6, seed=1), "conv": gaussian(8, 3, 2, 2, seed=2)}
    got = updates(grads, config)
    for expert in range(3):
        for head in (slice(0, 4), slice(4, 8)):
            check(got["stack"][expert, head], grads["stack"][expert, head])
    for head in (slice(0, 4), slice(4, 8)):
        check(got["conv"][head].flatten(1), grads["conv"][head].flatten(1))


# -- everything together ----------------------------------------------------------------------------------------------


def test_company_changes_nothing(updates: Updates) -> None:
    # All read as 6 x 8 somewhere, so they meet in one batch; and one is alone.
    shapes = {"a": (6, 8), "b": (6, 8), "stack": (3, 6, 8), "conv": (6, 2, 2, 2), "alone": (8, 6)}
    grads = {name: gaussian(*shape, seed=seed) for seed, (name, shape) in enumerate(shapes.items())}
    together = updates(grads, FLOAT32)
    for name, grad in grads.items():
        assert relative_error(together[name], updates({name: grad}, FLOAT32)[name]) <= TOLERANCE
    for matrix in ("a", "b", "alone"):
        check(together[matrix], grads[matrix])


def test_configs_of_one_shape_keep_apart() -> None:
    # Gradients with norms about eps, where every part of a config shows.
    configs = [mc.MuonConfig(preset=preset, ns_dtype="float32") for preset in RULES]
    grads = [gaussian(12, 8, seed=seed) * 1e-8 for seed in range(len(configs))]
    params = [Parameter(torch.zeros(12, 8)) for _ in configs]
    groups = [{"params": [p], "config": config} for p, config in zip(params, configs, strict=True)]
    optimizer = mc.Muon(groups, **HYPER, backend="aot_eager")  # type: ignore[arg-type]
    for p, grad in zip(params, grads, strict=True):
        p.grad = grad.clone()
    optimizer.step()
    for p, grad, rules in zip(params, grads, RULES.values(), strict=True):
        expected = rules.scale(12, 8) * orthogonal(grad, rules.triples, rules.eps, add_eps=rules.add_eps)
        assert relative_error(-p, expected) <= TOLERANCE


def test_waves_change_nothing() -> None:
    shapes = {"a": (6, 8), "b": (8, 6), "c": (6, 8), "d": (3, 6, 8), "e": (12, 8), "bias": (5,)}
    params = {name: gaussian(*shape, seed=100 + seed) for seed, (name, shape) in enumerate(shapes.items())}
    grads = {name: gaussian(*shape, seed=seed) for seed, (name, shape) in enumerate(shapes.items())}
    hyper = {"lr": 0.5, "weight_decay": 0.1, "momentum": 0.9, "beta1": 0.9, "beta2": 0.99}
    results = []
    for bound in (1, 2**31):
        plan = mc.make_plan(mc.inspect_params(params), max_temp_bytes=bound)
        assert len(plan.waves) == (8 if bound == 1 else 1)
        results.append(mc.build_step(plan)(params, mc.init_state(plan, params), grads, hyper))
    (params_1, state_1), (params_2, state_2) = results
    for name in shapes:
        assert torch.equal(params_1[name], params_2[name])
        assert not torch.equal(params_1[name], params[name])
    for bucket, tensors in state_1.items():
        for name, tensor in tensors.items():
            assert torch.equal(tensor, state_2[bucket][name])


def test_a_parameter_without_elements_is_left_in_peace(updates: Updates) -> None:
    grads = {"empty": torch.zeros(0, 5), "full": gaussian(4, 5, seed=1)}
    got = updates(grads, FLOAT32)
    assert got["empty"].shape == (0, 5)
    check(got["full"], grads["full"])


@pytest.mark.parametrize("momentum_dtype", ["float32", "bfloat16"])
def test_momentum_is_kept_in_its_declared_dtype(momentum_dtype: Literal["float32", "bfloat16"]) -> None:
    config = mc.MuonConfig(momentum_dtype=momentum_dtype)
    param = Parameter(torch.zeros(24, 40, dtype=torch.bfloat16))
    optimizer = mc.Muon([param], config=config, momentum=0.9, backend="aot_eager")
    expected = torch.zeros(24, 40, dtype=torch.float64)
    for number in range(5):
        param.grad = gaussian(24, 40, seed=number, dtype=torch.bfloat16)
        optimizer.step()
        expected = 0.9 * expected + 0.1 * param.grad.double()
    buffer = optimizer.state[param]["momentum_buffer"]
    assert buffer.dtype == getattr(torch, momentum_dtype)
    error = relative_error(buffer, expected)
    # Rounded to float32 every time, or to bfloat16: half a unit of 2^-8, some times over.
    assert error <= 1e-6 if momentum_dtype == "float32" else 1e-4 < error <= 5e-3


# -- tiny and zero gradients ------------------------------------------------------------------------------------------

FACTORS = (1.0, 1e-6, 1e-8, 1e-9, 1e-10, 1e-20, 1e-30)


def test_case_a01_the_torch_preset_keeps_stock_s_clamp() -> None:
    base = gaussian(64, 64, seed=1)
    lists = [[Parameter(torch.zeros(64, 64)) for _ in FACTORS] for _ in range(2)]
    stock, ours = (Muon(params, lr=1.0, weight_decay=0.0, momentum=0.0) for params in lists)
    mc.compile_step(ours, backend="aot_eager")
    for params, optimizer in zip(lists, (stock, ours), strict=True):
        for p, factor in zip(params, FACTORS, strict=True):
            p.grad = base * factor
        optimizer.step()
    for p, q in zip(*lists, strict=True):
        assert relative_error(q, p) <= 2e-2  # two bfloat16 iterations
    # The clamp's price: far enough under eps, updates shrink with the gradient.
    norms = [float(q.detach().norm()) for q in lists[1]]
    assert norms[0] > 6 and norms[5] < 1e-6 and norms[6] < 1e-15


@pytest.mark.parametrize("eps_mode", ["clamp", "add"])
@pytest.mark.parametrize("preset", RULES)
def test_case_a01_relative_eps_does_not_see_the_scale(preset: Preset, eps_mode: EpsMode, updates: Updates) -> None:
    base = gaussian(64, 64, seed=1)
    config = mc.MuonConfig(preset=preset, eps="relative", eps_mode=eps_mode, ns_dtype="float32")
    got = updates({str(factor): base * factor for factor in FACTORS}, config)
    for factor in FACTORS:
        assert relative_error(got[str(factor)], got["1.0"]) <= TOLERANCE
    # In bfloat16 each scale rounds in its own way; the norm of the update is the same within a percent.
    narrow = updates({str(f): base * f for f in FACTORS}, dataclasses.replace(config, ns_dtype="bfloat16"))
    for factor in FACTORS:
        assert float(narrow[str(factor)].norm()) == pytest.approx(float(narrow["1.0"].norm()), rel=1e-2)


@pytest.mark.parametrize("eps", [1e-7, 0.0, "relative"])
@pytest.mark.parametrize("preset", RULES)
def test_case_a01_a_zero_gradient_gives_a_zero_update(preset: Preset, eps: Any) -> None:
    config = mc.MuonConfig(preset=preset, eps=eps)
    params = [Parameter(torch.zeros(24, 40)) for _ in range(3)]
    optimizer = mc.Muon(params, lr=1.0, weight_decay=0.0, config=config, backend="aot_eager")
    for number in range(2):
        for index, p in enumerate(params):
            p.grad = torch.zeros(24, 40) if index == 1 else gaussian(24, 40, seed=10 * number + index)
        optimizer.step()
    for index, p in enumerate(params):
        buffer = optimizer.state[p]["momentum_buffer"]
        assert bool(torch.isfinite(p).all()) and bool(torch.isfinite(buffer).all())
        assert bool((p == 0).all()) is (index == 1)
        assert bool((buffer == 0).all()) is (index == 1)
