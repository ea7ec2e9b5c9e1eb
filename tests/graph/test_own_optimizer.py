"""``muon_compile.Muon``: groups, options, checkpoints, schedulers."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import lr_scheduler

import muon_compile as mc
from tests.graph.twins import EXACT, SHAPES, assert_equal, give, parameters, values
from tests.unit.untouched import refused

MATRICES = len(SHAPES)


def own(params: list[Parameter], **kwargs: Any) -> mc.Muon:
    """Matrices to Muon, the rest to AdamW."""
    groups = [{"params": params[:MATRICES]}, {"params": params[MATRICES:], "algorithm": "adamw"}]
    return mc.Muon([g for g in groups if g["params"]], backend="aot_eager", compile_config=EXACT, **kwargs)


def stock(params: list[Parameter], **kwargs: Any) -> list[torch.optim.Optimizer]:
    return [torch.optim.Muon(params[:MATRICES], **kwargs), torch.optim.AdamW(params[MATRICES:], lr=0.05)]


def both(seed: int = 0) -> tuple[list[Parameter], list[Parameter]]:
    shapes = (*SHAPES, (8,), ())
    return parameters(*shapes, seed=seed), parameters(*shapes, seed=seed)


def step_all(*optimizers: torch.optim.Optimizer) -> None:
    for optimizer in optimizers:
        optimizer.step()


def agree(ours: list[Parameter], theirs: list[Parameter]) -> None:
    """Muon bit for bit; AdamW to 1e-6."""
    assert_equal(ours[:MATRICES], theirs[:MATRICES])
    assert_equal(ours[MATRICES:], theirs[MATRICES:], atol=1e-6)


def momenta_of(optimizer: torch.optim.Optimizer, params: list[Parameter]) -> list[list[float]]:
    return [optimizer.state[p]["momentum_buffer"].flatten().tolist() for p in params[:MATRICES]]


# -- groups -------------------------------------------------------------------------------------------------------


def test_it_equals_the_stock_pair_in_one_graph() -> None:
    ours, theirs = both()
    optimizer, reference = own(ours), [torch.optim.Muon(theirs[:MATRICES]), torch.optim.AdamW(theirs[MATRICES:])]
    for seed in range(4):  # with the defaults of both
        give(ours, theirs, seed=seed)
        step_all(optimizer, *reference)
    agree(ours, theirs)
    assert momenta_of(optimizer, ours) == momenta_of(reference[0], theirs)
    stats = optimizer.compiled.stats
    assert (stats.graphs, stats.compiles, stats.steps, stats.host_launches) == (1, 1, 4, 1)


def test_every_group_has_its_own_numbers() -> None:
    ours, theirs = parameters(*SHAPES, (8,), (8,)), parameters(*SHAPES, (8,), (8,))
    kinds: list[dict[str, Any]] = [{}, {"lr": 0.3}, {"momentum": 0.5, "weight_decay": 0.0}]
    adam: list[dict[str, Any]] = [{"betas": (0.5, 0.9)}, {"lr": 0.2, "weight_decay": 0.5}]
    optimizer = mc.Muon(
        [
            *({"params": [p], **kind} for p, kind in zip(ours, kinds, strict=False)),
            *({"params": [p], "algorithm": "adamw", **kind} for p, kind in zip(ours[3:], adam, strict=True)),
        ],
        lr=0.1,
        adamw_lr=0.05,
        backend="aot_eager",
        compile_config=EXACT,
    )
    reference = [
        torch.optim.Muon([{"params": [p], **kind} for p, kind in zip(theirs, kinds, strict=False)], lr=0.1),
        torch.optim.AdamW([{"params": [p], **kind} for p, kind in zip(theirs[3:], adam, strict=True)], lr=0.05),
    ]
    for seed in range(3):
        give(ours, theirs, seed=seed)
        step_all(optimizer, *reference)
    agree(ours, theirs)
    plan = optimizer.compiled.plan
    assert plan.num_groups == 5 and plan.buckets[0].groups == (0, 1)  # one bucket, whatever the group


def test_a_group_may_have_its_own_config() -> None:
    ours, theirs = parameters(*SHAPES), parameters(*SHAPES)
    shallow = mc.MuonConfig(ns_steps=2, nesterov=False, scale="match_rms_adamw")
    optimizer = mc.Muon(
        [{"params": ours[:1]}, {"params": ours[1:], "config": shallow}],
        lr=0.1,
        backend="aot_eager",
        compile_config=EXACT,
    )
    reference = [
        torch.optim.Muon(theirs[:1], lr=0.1),
        torch.optim.Muon(theirs[1:], lr=0.1, ns_steps=2, nesterov=False, adjust_lr_fn="match_rms_adamw"),
    ]
    for seed in range(3):
        give(ours, theirs, seed=seed)
        step_all(optimizer, *reference)
    assert_equal(ours, theirs)
    assert len(optimizer.compiled.plan.buckets) == 3  # equal shapes, other mathematics


@pytest.mark.parametrize(
    "config", [mc.MuonConfig(split_sizes=(16, 8, 8)), mc.MuonConfig(num_heads=4)], ids=["split_sizes", "num_heads"]
)
def test_a_fused_weight_is_several_matrices(config: mc.MuonConfig) -> None:
    sizes = config.split_sizes or (8,) * 4
    (fused,) = parameters((32, 12))
    parts = [Parameter(part.clone()) for part in fused.detach().split(sizes)]
    plain, twin = parameters((8, 12), seed=5), parameters((8, 12), seed=5)
    optimizer = mc.Muon(
        [{"params": [fused], "config": config}, {"params": plain}],
        lr=0.1,
        backend="aot_eager",
        compile_config=EXACT,
    )
    reference = torch.optim.Muon([*parts, *twin], lr=0.1)
    for seed in range(3):
        give([fused, *plain], seed=seed)
        for part, grad in zip(parts, fused.grad.split(sizes), strict=True):
            part.grad = grad.clone()
        twin[0].grad = plain[0].grad.clone()
        step_all(optimizer, reference)
    # Blocks of other shapes have other scales, which one product over the whole parameter cannot round as stock does.
    assert_equal([*fused.split(sizes), *plain], [*parts, *twin], atol=0.0 if config.num_heads else 2e-7)
    assert optimizer.state[fused]["momentum_buffer"].shape == (32, 12)
    (eights,) = [batch for batch in optimizer.compiled.plan.batches if batch.rows == 8]
    assert eights.num_matrices == 1 + sizes.count(8)


def test_named_parameters_keep_their_names() -> None:
    weights, bias = parameters((4, 6), (4, 6)), parameters((4,))
    optimizer = mc.Muon(
        [
            {"params": [("up.weight", weights[0]), ("down.weight", weights[1])]},
            {"params": [("up.bias", bias[0])], "algorithm": "adamw"},
        ],
        backend="aot_eager",
    )
    assert [spec.name for spec in optimizer.compiled.plan.specs] == ["up.weight", "down.weight", "up.bias"]
    assert optimizer.param_groups[0]["param_names"] == ["up.weight", "down.weight"]


def test_a_group_added_later_makes_a_new_plan() -> None:
    ours, theirs = parameters(*SHAPES), parameters(*SHAPES)
    optimizer = mc.Muon(ours[:2], lr=0.1, backend="aot_eager", compile_config=EXACT)
    reference = torch.optim.Muon(theirs[:2], lr=0.1)
    give(ours[:2], theirs[:2], seed=0)
    step_all(optimizer, reference)
    optimizer.add_param_group({"params": ours[2], "lr": 0.3})
    reference.add_param_group({"params": theirs[2], "lr": 0.3})
    for seed in (1, 2):
        give(ours, theirs, seed=seed)
        step_all(optimizer, reference)
    assert_equal(ours, theirs)
    assert momenta_of(optimizer, ours) == momenta_of(reference, theirs)


# -- stepping -----------------------------------------------------------------------------------------------------


def test_a_closure_is_evaluated_with_gradients_and_its_loss_returned() -> None:
    (param,) = parameters((8, 12))
    optimizer = mc.Muon([param], lr=0.1, backend="aot_eager")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = param.square().sum()
        loss.backward()
        return loss

    losses = [optimizer.step(closure) for _ in range(3)]
    assert all(loss.requires_grad for loss in losses) and losses[2] < losses[1] < losses[0]
    assert optimizer.step() is None


def test_hooks_fire_once_per_step() -> None:
    (param,) = parameters((8, 12))
    optimizer = mc.Muon([param], backend="aot_eager")
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("pre"))
    optimizer.register_step_post_hook(lambda *_: seen.append("post"))
    for seed in range(2):
        give([param], seed=seed)
        optimizer.step()
    assert seen == ["pre", "post"] * 2


@pytest.mark.parametrize("cycle_momentum", [False, True])
def test_one_cycle(cycle_momentum: bool) -> None:
    ours, theirs = both()
    optimizer = own(ours, lr=0.1, adamw_lr=0.05)
    reference = stock(theirs, lr=0.1)
    schedule: dict[str, Any] = {"total_steps": 6, "cycle_momentum": cycle_momentum}
    mine = lr_scheduler.OneCycleLR(optimizer, max_lr=[0.3, 0.1], **schedule)
    # Cycled momentum is Muon's; the optimizer's defaults name it, and AdamW groups have none.
    others = [
        lr_scheduler.OneCycleLR(reference[0], max_lr=0.3, **schedule),
        lr_scheduler.OneCycleLR(reference[1], max_lr=0.1, total_steps=6, cycle_momentum=False),
    ]
    seen = []
    for seed in range(5):
        give(ours, theirs, seed=seed)
        step_all(optimizer, *reference)
        for scheduler in (mine, *others):
            scheduler.step()
        seen.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]))
        agree(ours, theirs)
    assert len(set(seen)) == 5 and len({momentum for _, momentum in seen}) == (5 if cycle_momentum else 1)
    assert optimizer.compiled.stats.compiles == 1


def test_a_lambda_schedule_over_both_groups() -> None:
    ours, theirs = both()
    optimizer, reference = own(ours, lr=0.1, adamw_lr=0.05), stock(theirs, lr=0.1)
    schedulers = [lr_scheduler.LambdaLR(o, lambda epoch: 0.5**epoch) for o in (optimizer, *reference)]
    for seed in range(4):
        give(ours, theirs, seed=seed)
        step_all(optimizer, *reference)
        for scheduler in schedulers:
            scheduler.step()
    agree(ours, theirs)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.1 / 16, 0.05 / 16])


# -- compile_step chooses -----------------------------------------------------------------------------------------


def test_compile_step_chooses_how_it_is_compiled() -> None:
    ours, theirs = parameters(*SHAPES), parameters(*SHAPES)
    optimizer, reference = mc.Muon(ours, lr=0.1), torch.optim.Muon(theirs, lr=0.1)
    step = mc.compile_step(optimizer, backend="aot_eager", config=EXACT)
    for seed in range(3):
        give(ours, theirs, seed=seed)
        step_all(optimizer, reference)
    assert_equal(ours, theirs)
    assert step.stats.steps == 3 and step.plan.exact
    assert optimizer.compiled is step
    assert momenta_of(optimizer, ours) == momenta_of(reference, theirs)


def test_compile_step_after_the_first_step_and_back() -> None:
    ours, theirs = parameters(*SHAPES), parameters(*SHAPES)
    optimizer = mc.Muon(ours, lr=0.1, backend="aot_eager", compile_config=EXACT)
    reference = torch.optim.Muon(theirs, lr=0.1)

    def steps(*seeds: int) -> None:
        for seed in seeds:
            give(ours, theirs, seed=seed)
            step_all(optimizer, reference)
            assert momenta_of(optimizer, ours) == momenta_of(reference, theirs), seed
            assert_equal(ours, theirs)

    steps(0, 1)
    step = mc.compile_step(optimizer, backend="aot_eager", config=EXACT)
    steps(2, 3)
    step.uninstall()
    steps(4, 5)


# -- checkpoints --------------------------------------------------------------------------------------------------


def through_a_file(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Save and load as a careful user does: no pickled code."""
    buffer = io.BytesIO()
    torch.save(state_dict, buffer)
    buffer.seek(0)
    loaded: dict[str, Any] = torch.load(buffer, weights_only=True)
    return loaded


CONFIG = mc.MuonConfig(coefficients=((3.4445, -4.775, 2.0315),) * 2, ns_steps=2, momentum_dtype="float32")


@pytest.mark.parametrize("ran_before", [False, True])
def test_a_checkpoint_goes_on_where_it_was_saved(ran_before: bool) -> None:
    ours, theirs = both()
    first = own(ours, lr=0.1, config=CONFIG, adamw_config=mc.AdamWConfig(amsgrad=True))
    for seed in range(2):
        give(ours, seed=seed)
        first.step()
    saved = through_a_file(first.state_dict())
    second = own(theirs, lr=0.7)  # other numbers and mathematics: the checkpoint's count
    if ran_before:
        give(theirs, seed=9)
        second.step()
    second.load_state_dict(saved)
    with torch.no_grad():
        for mine, his in zip(theirs, ours, strict=True):
            mine.copy_(his)
    assert second.param_groups[0]["lr"] == 0.1 and second.param_groups[0]["config"] == CONFIG
    assert second.param_groups[1]["config"] == mc.AdamWConfig(amsgrad=True)
    for seed in (2, 3):
        give(ours, theirs, seed=seed)
        step_all(first, second)
    assert_equal(theirs, ours)
    assert momenta_of(second, theirs) == momenta_of(first, ours)
    assert first.state_dict()["param_groups"] == second.state_dict()["param_groups"]
    assert first.param_groups[0]["config"] is CONFIG  # saving did not touch the live group


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_steps_saves_and_loads_on_its_own(how: str) -> None:
    ours = parameters(*SHAPES)
    optimizer = mc.Muon(ours, lr=0.1, backend="aot_eager", compile_config=EXACT)
    give(ours, seed=0)
    optimizer.step()
    clone = copy.deepcopy(optimizer) if how == "deepcopy" else pickle.loads(pickle.dumps(optimizer))
    copied = clone.param_groups[0]["params"]
    kept = values(ours)
    give(copied, seed=1)
    clone.step()
    assert_equal(ours, kept)
    give(ours, seed=1)
    optimizer.step()
    assert_equal(copied, ours)
    clone.load_state_dict(through_a_file(optimizer.state_dict()))
    optimizer.load_state_dict(through_a_file(clone.state_dict()))
    give(ours, copied, seed=2)
    step_all(optimizer, clone)
    assert_equal(copied, ours)


def test_a_stock_checkpoint_is_refused_in_words() -> None:
    """Its groups name no algorithm and no config, so a step could not go on with them."""
    ours, theirs = parameters(*SHAPES), parameters(*SHAPES)
    optimizer, reference = mc.Muon(ours, backend="aot_eager"), torch.optim.Muon(theirs, lr=0.1)
    give(ours, theirs, seed=0)
    step_all(optimizer, reference)
    with refused(ValueError, "load_state_dict", "algorithm", by=[optimizer]):
        optimizer.load_state_dict(reference.state_dict())


# -- groups that cannot be ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("group", "words"),
    [
        ({"algorithm": "adam"}, ("algorithm", "'adamw' or 'lion'", "'adam'")),
        ({"config": mc.AdamWConfig()}, ("algorithm='muon'", "MuonConfig", "AdamWConfig")),
        ({"algorithm": "adamw", "config": mc.MuonConfig()}, ("algorithm='adamw'", "AdamWConfig", "MuonConfig")),
        ({"config": {"preset": "torch"}}, ("MuonConfig", "dict")),
        ({"lr": float("nan")}, ("lr", "nan")),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_an_invalid_group(group: dict[str, Any], words: tuple[str, ...]) -> None:
    first, other = parameters((4, 6), (4, 6))
    optimizer = mc.Muon([first], backend="aot_eager")
    with refused(ValueError, *words, tensors=[other]):
        mc.Muon([{"params": [other], **group}])
    with refused(ValueError, *words, by=[optimizer], tensors=[other]):
        optimizer.add_param_group({"params": [other], **group})


# -- Lion -------------------------------------------------------------------------------------------------------------


def with_lion(*, lr: float = 0.01, **config: Any) -> tuple[list[Parameter], mc.Muon]:
    params = parameters((8, 12), (8,), (3, 4), (8,))
    groups: list[dict[str, Any]] = [
        {"params": params[:1]},
        {"params": params[1:2], "algorithm": "adamw"},
        {"params": params[2:], "algorithm": "lion", "lr": lr, "weight_decay": 0.2, "betas": (0.8, 0.9)},
    ]
    return params, mc.Muon(groups, backend="aot_eager", compile_config=mc.CompileConfig(**config))


def test_a_lion_group_by_its_formula_and_through_a_checkpoint() -> None:
    params, optimizer = with_lion()
    momenta = {2: torch.zeros(3, 4, dtype=torch.float64), 3: torch.zeros(8, dtype=torch.float64)}
    for number in range(6):
        if number == 3:  # resumed in another one
            saved = copy.deepcopy(optimizer.state_dict())
            fresh, optimizer = with_lion()
            with torch.no_grad():
                torch._foreach_copy_(fresh, params)
            params = fresh
            optimizer.load_state_dict(saved)
        give(params, seed=number, missing=(3,) if number == 1 else ())
        before = values(params)
        optimizer.step()
        for index, m in momenta.items():
            grad = params[index].grad
            if grad is None:
                assert torch.equal(params[index], before[index])
                continue
            g, old = grad.double(), before[index].double()
            expected = old * (1 - 0.01 * 0.2) - 0.01 * torch.sign(0.8 * m + 0.2 * g)
            momenta[index] = 0.9 * m + 0.1 * g
            assert torch.allclose(params[index].double(), expected, rtol=1e-6, atol=1e-7)
            assert torch.allclose(optimizer.state[params[index]]["exp_avg"].double(), momenta[index], atol=1e-6)
    assert "lion" in optimizer.compiled.plan.describe()


def test_a_lion_group_needs_a_learning_rate_of_its_own() -> None:
    with pytest.raises(ValueError, match="takes an lr of its own"):
        mc.Muon([{"params": parameters((8,)), "algorithm": "lion"}], backend="aot_eager")


def test_masters_of_a_lion_group_keep_what_bfloat16_loses() -> None:
    optimizer = with_lion(lr=1e-4, master_weights=True)[1]
    for group in optimizer.param_groups:
        group["params"] = [Parameter(p.detach().bfloat16()) for p in group["params"]]
    last = optimizer.param_groups[2]["params"][0]
    start = last.detach().clone()
    for _ in range(20):
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            p.grad = torch.ones_like(p)
        optimizer.step()
    master = optimizer.state[last]["master_weight"]
    expected = start.double()
    for _ in range(20):
        expected = expected * (1 - 1e-4 * 0.2) - 1e-4
    assert torch.allclose(master.double(), expected, atol=1e-6)
