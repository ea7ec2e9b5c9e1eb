"""The pure parts (inspect_params, make_plan, init_state, build_step), with no optimizer and under every tracer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch import Tensor
from torch._dynamo.utils import counters
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import Parameter

import muon_compile as mc
from muon_compile.build.pure import rank_places
from muon_compile.spec import ShardLayout

# "a" and "b" share a bucket; "e" is a stack of two matrices.
SHAPES = {"a": (4, 6), "b": (4, 6), "c": (6, 4), "e": (2, 5, 4), "bias": (7,), "gain": ()}
CONFIG = mc.MuonConfig(ns_dtype="float32")
LR, DECAY = 0.5, 0.1
State = dict[str, dict[str, Tensor]]


def normal(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES.values()]


def named(tensors: Sequence[Any]) -> dict[str, Any]:
    return dict(zip(SHAPES, tensors, strict=True))


def hyper(lr: float = LR, *, tensors: bool = True) -> dict[str, Any]:
    numbers = {"lr": lr, "weight_decay": DECAY, "momentum": 0.9, "beta1": 0.8, "beta2": 0.95}
    return {name: torch.tensor(v, dtype=torch.float64) for name, v in numbers.items()} if tensors else numbers


@pytest.fixture
def plan() -> mc.Plan:
    return mc.make_plan(mc.inspect_params(named(normal(0))), config=CONFIG)


def run(update: Callable[..., Any], params: Any, state: State, seeds: Sequence[int], lr: float = LR) -> Any:
    """One step per seed of gradients; returns parameters and state."""
    for seed in seeds:
        params, state = update(params, state, normal(seed), hyper(lr))
    return params, state


def flat(state: State) -> list[Tensor]:
    return [tensor for bucket in state.values() for tensor in bucket.values()]


def directions(old: Sequence[Tensor], new: Sequence[Tensor], lr: float = LR) -> list[Tensor]:
    """What was added to each parameter, the decay and lr taken out."""
    return [(n - o * (1 - lr * DECAY)) / lr for o, n in zip(old, new, strict=True)]


def assert_close(actual: Sequence[Tensor], expected: Sequence[Tensor], atol: float) -> None:
    for index, (a, e) in enumerate(zip(actual, expected, strict=True)):
        torch.testing.assert_close(a, e, rtol=0, atol=atol, msg=lambda m, i=index: f"[{i}] {m}")


# -- plain calls --------------------------------------------------------------------------------------------------


def test_inspect_reads_parameters_and_their_gradients() -> None:
    params = {name: Parameter(tensor) for name, tensor in named(normal(0)).items()}
    params["b"].grad_dtype = torch.bfloat16
    params["b"].grad = torch.zeros(4, 6, dtype=torch.bfloat16)
    specs = mc.inspect_params(iter(params.items()))
    assert [(s.name, s.shape, s.algorithm) for s in specs] == [
        (name, shape, "muon" if len(shape) > 1 else "adamw") for name, shape in SHAPES.items()
    ]
    assert [s.grad_dtype for s in specs if s.name in "ab"] == ["float32", "bfloat16"]
    assert specs == mc.inspect_params(params)
    assert {s.config for s in mc.inspect_params({"a": params["a"]}, config=CONFIG)} == {CONFIG}
    assert mc.inspect_params({"a": params["a"]}, config=mc.AdamWConfig())[0].algorithm == "adamw"
    assert mc.inspect_params({"a": params["a"]}, algorithm="adamw", group=3)[0].group == 3


def test_state_is_one_stacked_tensor_per_bucket(plan: mc.Plan) -> None:
    state = mc.init_state(plan, normal(0))
    shapes = {name: {n: tuple(t.shape) for n, t in bucket.items()} for name, bucket in state.items()}
    assert shapes == {
        "muon0": {"momentum_buffer": (2, 4, 6)},
        "muon1": {"momentum_buffer": (1, 6, 4)},
        "muon2": {"momentum_buffer": (1, 2, 5, 4)},
        "adamw3": {"step": (1,), "exp_avg": (1, 7), "exp_avg_sq": (1, 7)},
        "adamw4": {"step": (1,), "exp_avg": (1,), "exp_avg_sq": (1,)},
    }
    assert all(not tensor.any() for tensor in flat(state))
    assert {t.device.type for t in flat(mc.init_state(plan, [p.to("meta") for p in normal(0)]))} == {"meta"}


def test_a_list_gives_a_list_and_a_mapping_a_mapping(plan: mc.Plan) -> None:
    update, params, grads = mc.build_step(plan), normal(0), normal(1)
    listed, list_state = update(params, mc.init_state(plan), grads, hyper())
    shuffled = {name: named(grads)[name] for name in reversed(SHAPES)}
    mapped, map_state = update(named(params), mc.init_state(plan), shuffled, hyper())
    assert isinstance(listed, list) and list(mapped) == list(SHAPES)
    assert_close(list(mapped.values()), listed, 0)
    assert_close(flat(map_state), flat(list_state), 0)
    assert not any(torch.equal(new, old) for new, old in zip(listed, params, strict=True))


def test_no_argument_is_written(plan: mc.Plan) -> None:
    given = (normal(0), mc.init_state(plan), normal(1), hyper())
    kept = copy.deepcopy(given)
    tensors = [*given[0], *flat(given[1]), *given[2], *given[3].values()]
    versions = [t._version for t in tensors]
    new_params, new_state = mc.build_step(plan)(*given)
    assert [t._version for t in tensors] == versions
    assert_close(tensors, [*kept[0], *flat(kept[1]), *kept[2], *kept[3].values()], 0)
    addresses = {t.untyped_storage().data_ptr() for t in tensors}
    assert addresses.isdisjoint(t.untyped_storage().data_ptr() for t in [*new_params, *flat(new_state)])


@pytest.mark.parametrize("missing", [{"a"}, {"a", "c", "gain"}, set(SHAPES)], ids=lambda names: "".join(sorted(names)))
def test_a_missing_gradient_leaves_its_parameter_and_state(plan: mc.Plan, missing: set[str]) -> None:
    update = mc.build_step(plan)
    params, state = run(update, normal(0), mc.init_state(plan), [1])
    grads = named(normal(2))
    full_params, full_state = update(params, state, grads, hyper())
    holed = {name: None if name in missing else grad for name, grad in grads.items()}
    new_params, new_state = update(params, state, list(holed.values()), hyper())
    left_out = {name: grad for name, grad in grads.items() if name not in missing}
    assert_close(list(update(named(params), state, left_out, hyper())[0].values()), new_params, 0)
    for name, old, full, new in zip(SHAPES, params, full_params, new_params, strict=True):
        assert torch.equal(new, old if name in missing else full), name
    for bucket in plan.buckets:
        for row, index in enumerate(bucket.params):
            source = state if list(SHAPES)[index] in missing else full_state
            for name, tensor in new_state[bucket.name].items():
                assert torch.equal(tensor[row], source[bucket.name][name][row]), (bucket.name, name)


def test_it_equals_stock_optimizers() -> None:
    """bfloat16 products, as ``torch.optim.Muon`` has them; the bar is that of a standard form, 2e-2."""
    plan = mc.make_plan(mc.inspect_params(named(normal(0))))
    weights = [Parameter(p.clone()) for p in normal(0)]
    matrices = [*weights[:3], *(Parameter(half.clone()) for half in weights[3])]
    stock = [
        torch.optim.Muon(matrices, lr=LR, weight_decay=DECAY, momentum=0.9),
        torch.optim.AdamW(weights[4:], lr=LR, weight_decay=DECAY, betas=(0.8, 0.95)),
    ]
    update, params, state = mc.build_step(plan), normal(0), mc.init_state(plan)
    for seed in (1, 2, 3):
        old = [w.detach().clone() for w in [*matrices, *weights[4:]]]
        grads = normal(seed)
        for weight, grad in zip([*matrices, *weights[4:]], [*grads[:3], *grads[3], *grads[4:]], strict=True):
            weight.grad = grad
        for optimizer in stock:
            optimizer.step()
        before = params
        params, state = update(params, state, grads, hyper())
        expected = directions(old, [w.detach() for w in [*matrices, *weights[4:]]])
        actual = directions([*before[:3], *before[3], *before[4:]], [*params[:3], *params[3], *params[4:]])
        assert_close(actual[:5], expected[:5], 2e-2)
        assert_close(actual[5:], expected[5:], 1e-5)


def test_it_equals_the_installed_step() -> None:
    params = named([Parameter(p) for p in normal(0)])
    matrices = [(n, p) for n, p in params.items() if p.dim() > 1]
    rest = [(n, p) for n, p in params.items() if p.dim() <= 1]
    optimizer = mc.Muon(
        [
            {"params": matrices, "lr": LR, "weight_decay": DECAY, "momentum": 0.9, "config": CONFIG},
            {"params": rest, "algorithm": "adamw", "lr": LR / 4, "weight_decay": DECAY, "betas": (0.8, 0.95)},
        ],
        backend="aot_eager",
    )
    plan = optimizer.compiled.plan
    assert [spec.name for spec in plan.specs] == list(SHAPES)
    update, pure, state = mc.build_step(plan), normal(0), mc.init_state(plan)
    for seed in (1, 2, 3):
        before = [p.detach().clone() for p in params.values()]
        for param, grad in zip(params.values(), normal(seed), strict=True):
            param.grad = grad
        optimizer.step()
        old = pure
        pure, state = update(pure, state, normal(seed), [hyper(), hyper(LR / 4)])
        moved = [p.detach() for p in params.values()]
        assert_close(directions(old[:4], pure[:4]), directions(before[:4], moved[:4]), 1e-5)
        assert_close(directions(old[4:], pure[4:], LR / 4), directions(before[4:], moved[4:], LR / 4), 1e-5)
    for bucket in plan.buckets:
        for name, tensor in state[bucket.name].items():
            held = [optimizer.state[params[list(SHAPES)[i]]][name] for i in bucket.params]
            assert_close(list(tensor), held, 1e-6)


def test_what_does_not_fit_the_plan_is_named(plan: mc.Plan) -> None:
    update, state = mc.build_step(plan), mc.init_state(plan)
    params, grads = normal(0), normal(1)
    with pytest.raises(ValueError, match=r"grads: expected 6 tensors.*got 5"):
        update(params, state, grads[:-1], hyper())
    with pytest.raises(ValueError, match=r"params: .*none for \['bias'\]"):
        update({n: p for n, p in named(params).items() if n != "bias"}, state, grads, hyper())
    with pytest.raises(ValueError, match=r"grads: 'c': expected shape \(6, 4\), got \(4, 6\)"):
        update(params, state, [*grads[:2], grads[2].T, *grads[3:]], hyper())
    with pytest.raises(ValueError, match=r"group 0 \(adamw\).*'beta2'"):
        update(params, state, grads, {n: v for n, v in hyper().items() if n != "beta2"})
    with pytest.raises(ValueError, match=r"one mapping per group \(1\), got 2"):
        update(params, state, grads, [hyper(), hyper()])
    with pytest.raises(ValueError, match=r"state: .*'muon0'"):
        update(params, {n: s for n, s in state.items() if n != "muon0"}, grads, hyper())
    with pytest.raises(ValueError, match=r"rank: expected 0 <= rank < 1, got 1"):
        mc.build_step(plan, rank=1)
    with pytest.raises(ValueError, match=r"groups: .*'shard'"):
        mc.build_step(plan, groups={"shard": "3"})


# -- tracers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("functional", [False, True], ids=["make_fx", "functionalize"])
@pytest.mark.parametrize("exact", [False, True], ids=["", "exact"])
def test_make_fx_gives_the_same_step_for_other_values(functional: bool, exact: bool) -> None:
    plan = mc.make_plan(mc.inspect_params(named(normal(0))), config=None if exact else CONFIG, exact=exact)
    update, state = mc.build_step(plan), mc.init_state(plan)
    traced = make_fx(torch.func.functionalize(update) if functional else update)(normal(0), state, normal(1), hyper())
    if functional:
        written = [n for n in traced.graph.nodes if getattr(getattr(n.target, "_schema", None), "is_mutable", False)]
        assert not written
    actual = run(traced, normal(5), state, [6, 7], lr=0.125)
    expected = run(update, normal(5), state, [6, 7], lr=0.125)
    assert_close([*actual[0], *flat(actual[1])], [*expected[0], *flat(expected[1])], 0)


def test_make_fx_under_fake_tensors_holds_no_values(plan: mc.Plan) -> None:
    update, state = mc.build_step(plan), mc.init_state(plan)
    traced = make_fx(update, tracing_mode="fake")(normal(0), state, normal(1), hyper())
    assert_close(
        traced(normal(2), state, normal(3), hyper(0.25))[0], update(normal(2), state, normal(3), hyper(0.25))[0], 0
    )


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
    counters.clear()


def graphs() -> int:
    """Graphs that Dynamo kept. (A counting backend also sees attempts that Dynamo restarts: it first takes float64
    hyperparameters for scalars.)"""
    return int(counters["stats"]["unique_graphs"])


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("wrap", [list, named], ids=["list", "mapping"])
def test_inside_torch_compile_one_graph_serves_every_value(plan: mc.Plan, wrap: Callable[[Any], Any]) -> None:
    update = mc.build_step(plan)
    compiled = torch.compile(update, fullgraph=True, backend="aot_eager")
    params, state = wrap(normal(0)), mc.init_state(plan)
    expected, expected_state = params, state
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seed, lr in enumerate((0.5, 0.25, 0.1, 1e-3, 0.0)):
            params, state = compiled(params, state, wrap(normal(seed)), hyper(lr))
            expected, expected_state = update(expected, expected_state, wrap(normal(seed)), hyper(lr))
    assert graphs() == 1 and not counters["graph_break"]
    listed = [list(p.values()) if isinstance(p, Mapping) else p for p in (params, expected)]
    assert_close(*listed, 1e-6)
    assert_close(flat(state), flat(expected_state), 1e-6)


@pytest.mark.usefixtures("fresh_dynamo")
def test_inside_torch_compile_missing_gradients_add_a_graph_per_pattern(plan: mc.Plan) -> None:
    update, state = mc.build_step(plan), mc.init_state(plan)
    compiled = torch.compile(update, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        for missing in ((), (0, 4)):
            grads = [None if i in missing else g for i, g in enumerate(normal(1))]
            actual, expected = (step(normal(0), state, grads, hyper()) for step in (compiled, update))
            assert_close([*actual[0], *flat(actual[1])], [*expected[0], *flat(expected[1])], 1e-6)
    assert graphs() == 2 and not counters["graph_break"]


def train_step(update: Callable[..., Any]) -> Callable[..., Any]:
    """Forward, backward and the update, as a user would put them into one function."""

    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.tanh(x @ params["a"].T + params["bias"]).square().mean()

    def step(params: dict[str, Tensor], state: State, x: Tensor, numbers: Any) -> Any:
        return update(params, state, torch.func.grad(loss)(params, x), numbers)

    return step


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_a_users_whole_train_step_is_one_graph(backend: str) -> None:
    params = {"a": normal(0)[0], "bias": torch.ones(4)}
    plan = mc.make_plan(mc.inspect_params(params), config=mc.MuonConfig(ns_dtype="float32", ns_steps=1))
    step = train_step(mc.build_step(plan))
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    state, x = mc.init_state(plan), torch.linspace(-1, 1, 18).view(3, 6)
    expected, expected_state = params, state
    # No search for vector extensions and no pool of compilers: both take longer than this step.
    with torch._inductor.config.patch({"cpp.simdlen": 1, "compile_threads": 1}):
        for lr in (0.1, 0.01, 0.001):
            params, state = compiled(params, state, x, hyper(lr))
            expected, expected_state = step(expected, expected_state, x, hyper(lr))
    assert graphs() == 1 and not counters["graph_break"]
    assert_close([*params.values(), *flat(state)], [*expected.values(), *flat(expected_state)], 1e-5)


def test_nodes_take_groups_of_their_own() -> None:
    mesh = mc.MeshSpec(axes=(("shard", 4),))
    specs = [mc.MatrixSpec(name=f"w{i}", shape=(8, 4)) for i in range(4)]
    plan = mc.make_plan(specs, mesh=mesh, strategy="hierarchical_all_to_all", node_size=2)
    with pytest.raises(ValueError, match=r"every axis of \['shard', 'shard/node', 'shard/peers'\]"):
        mc.build_step(plan, groups={"shard": "1"})
    (place,) = set(rank_places(plan, 3, {"shard": "1", "shard/node": "2", "shard/peers": "3"}).values())
    assert (place.shard_rank, place.shard_group, place.node_group, place.peer_group) == (3, "1", "2", "3")


def test_a_rank_stands_elsewhere_on_every_mesh() -> None:
    whole, cut = mc.MeshSpec(axes=(("all", 4),)), mc.MeshSpec(axes=(("copies", 2), ("parts", 2)))
    layouts = [
        ShardLayout(mesh=whole, axis="all", dim=0, sizes=(2, 2, 2, 2)),
        ShardLayout(mesh=cut, axis="parts", dim=0, sizes=(4, 4), replica_axis="copies"),
    ]
    specs = [mc.MatrixSpec(name=f"w{i}", shape=(8, 4), layout=layout) for i, layout in enumerate(layouts)]
    plan = mc.make_plan(specs, strategy="all_gather")
    names = {"all": "1", "copies": "2", "parts": "3"}
    mc.build_step(plan, rank=2, groups=names)
    stands = {plan.buckets[plan.parts[i].bucket].layout: place for i, place in rank_places(plan, 2, names).items()}
    assert (stands[layouts[0]].shard_rank, stands[layouts[0]].shard_group) == (2, "1")
    there = stands[layouts[1]]
    assert (there.shard_rank, there.shard_group, there.replica_rank, there.replica_group) == (0, "3", 1, "2")
