"""Every strategy on real ranks: the assembled result is that of one process with the whole stack, bit for bit."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx import GraphModule, Node

from muon_compile.build.gram import gram_polynomial, pack_triangles, unpack_triangles
from muon_compile.build.orthogonalize import orthogonalize
from muon_compile.build.phases import Solve, run_side_by_side
from muon_compile.build.strategies import GRAM, WHOLE, run_exchange
from muon_compile.config import MuonConfig
from muon_compile.plan.exchange import STRATEGY_NAMES, Exchange, Place, Strategy
from muon_compile.plan.strategies import collectives, sent_bytes
from muon_compile.run.nodes import node_groups
from tests.dist.cases import WORLD, Case, cases, replica_cases
from tests.dist.ranks import Ranks
from tests.reference import gaussian, orthogonal, relative_error

SHARDED = tuple(name for name in STRATEGY_NAMES if name != "local")
# What the 2 shard ranks of each of 2 replicas can do: they are no two nodes.
REPLICATED = tuple(name for name in STRATEGY_NAMES if name != "hierarchical_all_to_all")


# -- on the ranks -----------------------------------------------------------------------------------------------------


@functools.cache
def group_names(replicas: int) -> tuple[str, ...]:
    """Names of this rank's shard, replica, node and peer group; every rank makes all of them, in the same order."""
    if replicas == 1:
        return dist.group.WORLD.group_name, "", *node_groups(dist.group.WORLD, 2)
    mesh = torch.arange(WORLD).view(replicas, -1)
    names = []
    for lines in (mesh.tolist(), mesh.T.tolist()):
        groups = {tuple(line): dist.new_group(line) for line in lines}
        names += [group.group_name for line, group in groups.items() if dist.get_rank() in line]
    return names[0], names[1], "", ""


def call(case: Case, place: Place) -> Callable[[Tensor], Tensor]:
    return lambda x: alone(x, case.exchange, place, case.whole, case.gram)


def alone(x: Tensor, exchange: Exchange, place: Place, whole: Solve, gram: Solve) -> Tensor:
    """One part by itself, phase after phase."""
    (result,), _ = run_side_by_side([run_exchange(x, exchange, place, whole, gram)], lambda: None)
    return result


def trace(x: Tensor, run: Callable[[Tensor], Tensor]) -> GraphModule:
    """The graph of ``run`` on a tensor like x; it returns a tuple, as AOTAutograd wants it."""
    # Imported here: it takes seconds, which ranks can do without.
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    mode = FakeTensorMode()
    with torch.no_grad(), mode:
        return make_fx(lambda x: (run(x),))(mode.from_tensor(x))


def run_eager(rank: int, wanted: dict[str, Case]) -> dict[str, Tensor]:
    results = {}
    for name, case in wanted.items():
        place = case.place(rank, group_names(case.replicas))
        results[name] = call(case, place)(case.shard(place.shard_rank))
        assert results[name].is_contiguous()
    return results


def run_traced(rank: int, wanted: dict[str, Case]) -> dict[str, Tensor]:
    """Traced, and then through AOTAutograd, as a backend gets it."""
    from torch._functorch.aot_autograd import aot_module_simplified, make_boxed_func

    results = {}
    for name, case in wanted.items():
        place = case.place(rank, group_names(case.replicas))
        x = case.shard(place.shard_rank)
        with torch.no_grad():
            graph = trace(x, call(case, place))
            compiled = aot_module_simplified(graph, [x], fw_compiler=lambda g, _: make_boxed_func(g.forward))
            (results[name],) = compiled(x)
            assert torch.equal(graph(x)[0], results[name])
    return results


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(WORLD) as started:
        yield started


def assembled(case: Case, shards: list[Tensor]) -> Tensor:
    """The units of their shards; replicas have to agree."""
    per_replica = torch.stack(shards) if case.strategy == "local" else None
    if per_replica is None:
        width = len(case.exchange.sizes)
        per_replica = torch.stack([torch.cat(shards[i : i + width], dim=1) for i in range(0, WORLD, width)])
    for other in per_replica[1:]:
        assert torch.equal(other, per_replica[0])
    return per_replica[0]


def in_owners_batches(case: Case, units: Tensor) -> Tensor:
    """What one process makes of the units, in the batches in which their owners take them."""
    counts = case.exchange.replica_counts or (case.units,)
    if case.exchange.owner_counts:
        counts = tuple(count for row in case.exchange.owner_counts for count in row)
    return torch.cat([case.whole(run) for run in units.split(counts)])


def check(wanted: dict[str, Case], per_rank: list[dict[str, Tensor]]) -> None:
    for name, case in wanted.items():
        actual = assembled(case, [results[name] for results in per_rank])
        units = case.whole_units
        expected = case.whole(units)
        assert actual.shape == expected.shape, name
        assert actual.dtype == units.dtype, name
        if case.strategy in GRAM:
            exact = torch.stack([orthogonal(unit) for unit in units]) if case.units else expected
            assert relative_error(actual, exact) <= (2e-3 if case.dtype == "float32" else 4e-3), name
        else:
            assert torch.equal(actual, in_owners_batches(case, units)), (name, relative_error(actual, expected))
            if case.units:
                # Some CPUs' products round a batch of one otherwise than a larger one.
                assert relative_error(actual, expected) <= (1e-6 if case.dtype == "float32" else 2e-2), name


# -- results ----------------------------------------------------------------------------------------------------------


@pytest.mark.dist
@pytest.mark.parametrize("strategy", SHARDED)
def test_the_result_is_that_of_one_process(ranks: Ranks, strategy: Strategy) -> None:
    for dtype in ("float32", "bfloat16"):
        wanted = cases(strategy, dtype)
        check(wanted, ranks.run(run_eager, wanted))


@pytest.mark.dist
@pytest.mark.parametrize("strategy", REPLICATED)
def test_replicas_divide_or_repeat(ranks: Ranks, strategy: Strategy) -> None:
    wanted = replica_cases(strategy)
    check(wanted, ranks.run(run_eager, wanted))


@pytest.mark.dist
@pytest.mark.parametrize("strategy", SHARDED)
def test_a_traced_exchange_does_the_same(ranks: Ranks, strategy: Strategy) -> None:
    names = ("2,2,1,0 rows", "skewed, uneven")
    wanted = {name: case for name, case in cases(strategy).items() if name in names}
    if strategy in REPLICATED:
        wanted["divided"] = replica_cases(strategy)["divided"]
    check(wanted, ranks.run(run_traced, wanted))


# -- graphs: no rank is needed to look at them ------------------------------------------------------------------------


def collectives_of(graph: GraphModule) -> list[Node]:
    """The collectives; each is waited for."""
    nodes = [node for node in graph.graph.nodes if str(node.target).startswith("_c10d_functional.")]
    found = [node for node in nodes if "wait_tensor" not in str(node.target)]
    for node in found:
        assert [str(user.target) for user in node.users] == ["_c10d_functional.wait_tensor.default"], node
    return found


def names_of(case: Case, place: Place) -> list[str]:
    """Names of the collectives of a rank's graph."""
    run = functools.partial(alone, exchange=case.exchange, place=place, whole=doubled, gram=doubled)
    return [str(node.target).split(".")[1] for node in collectives_of(trace(case.shard(place.shard_rank), run))]


def doubled(y: Tensor) -> Tensor:
    return y * 2.0


EXPECTED: dict[Strategy, list[str]] = {
    "local": [],
    "all_gather": ["all_gather_into_tensor"],
    "gather_broadcast": ["all_gather_into_tensor"],
    "gather_scatter": ["all_gather_into_tensor", "all_to_all_single"],
    "all_to_all": ["all_to_all_single", "all_to_all_single"],
    "gram_all_reduce": ["all_reduce"],
    "gram_scatter": ["reduce_scatter_tensor", "all_gather_into_tensor"],
    "hierarchical_all_to_all": ["all_to_all_single"] * 4,
}


def results_of(case: Case, replica: int) -> list[str]:
    """How the results of gather_broadcast travel."""
    if case.strategy != "gather_broadcast":
        return []
    if case.exchange.gathers_results:
        return ["all_gather_into_tensor"]
    return ["broadcast" for count in case.exchange.owned(replica) if count]


def test_results_are_gathered_and_broadcast_in_the_cases() -> None:
    everywhere = [*cases("gather_broadcast").values(), *replica_cases("gather_broadcast").values()]
    assert {case.exchange.gathers_results for case in everywhere if case.units} == {False, True}


@pytest.mark.parametrize("strategy", SHARDED)
def test_every_rank_issues_the_same_collectives(strategy: Strategy) -> None:
    for name in {"even", "2,2,1,0 rows", "one unit", "no unit", "skewed"} & cases(strategy).keys():
        case = cases(strategy)[name]
        for rank in range(WORLD):
            assert names_of(case, case.place(rank)) == EXPECTED[strategy] + results_of(case, 0), (name, rank)


@pytest.mark.parametrize("strategy", REPLICATED)
def test_dividing_over_replicas_adds_one_gather(strategy: Strategy) -> None:
    for name in ("repeated", "divided", "one replica idle"):
        case = replica_cases(strategy)[name]
        for rank in range(WORLD):
            found = names_of(case, case.place(rank))
            replica = rank // len(case.exchange.sizes) if case.replica_counts else 0
            added = ["all_gather_into_tensor"] if case.replica_counts else []
            assert found == EXPECTED[strategy] + results_of(case, replica) + added, (name, rank)


@pytest.mark.parametrize(("device", "side_by_side"), [("cuda", True), ("cpu", False)])
def test_products_run_while_other_parts_send(device: str, side_by_side: bool) -> None:
    """Every first collective starts before the work meanwhile, and that before anything is waited for."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    case = cases("all_to_all")["even"]
    place = case.place(0)

    def step(x: Tensor) -> tuple[Tensor, ...]:
        parts = [run_exchange(y, case.exchange, place, doubled, doubled) for y in (x, x + 1)]
        results, alone = run_side_by_side(parts, lambda: x.sin())
        return (*results, alone)

    with torch.no_grad(), FakeTensorMode():
        graph = make_fx(step)(torch.empty(case.shard(0).shape, device=device))
    names = [str(n.target).split(".")[1] for n in graph.graph.nodes if n.op == "call_function"]
    found = [name for name in names if name in ("all_to_all_single", "wait_tensor", "sin")]
    sent, came = "all_to_all_single", "wait_tensor"
    if side_by_side:
        assert found == [sent, sent, "sin", came, sent, came, sent, came, came]
    else:
        assert found == [sent, came, sent, came, "sin", sent, came, sent, came]


def test_bytes_over_nodes_are_those_of_the_graphs() -> None:
    for name, case in cases("hierarchical_all_to_all").items():
        inputs = []
        for rank in range(WORLD):
            place = case.place(rank)
            run = functools.partial(alone, exchange=case.exchange, place=place, whole=doubled, gram=doubled)
            found, sent = [], 0
            for node in collectives_of(trace(case.shard(rank), run)):
                x, _, split, group = node.args
                bytes_of = x.meta["val"].element_size()
                found.append(x.meta["val"].numel() * bytes_of)
                mine = rank % 2 if group == "node" else rank // 2
                sent += (sum(split) - split[mine]) * bytes_of
            assert sent == sent_bytes(case.exchange, rank, 0), (name, rank)
            inputs.append(found)
        promised = [spec.bytes_per_rank for spec in collectives(case.exchange)]
        assert list(map(max, zip(*inputs, strict=True))) == (promised if case.units else [0] * 4), name


# What both Inductor and TorchAir 2.13 lower, of what strategies need around the products.
LOWERED = {
    *(
        "_to_copy",
        "_unsafe_view",
        "alias",
        "arange",
        "baddbmm",
        "bmm",
        "cat",
        "clamp",
        "clone",
        "constant_pad_nd",
        "expand",
    ),
    *("new_empty", "new_zeros", "permute", "split_with_sizes", "sqrt", "unsqueeze", "view", "add.Tensor", "div.Tensor"),
    *("eq.Tensor", "ge.Tensor", "mul.Tensor", "select.int", "slice.Tensor", "sum.dim_IntList", "transpose.int"),
    *("unbind.int", "where.self"),
}


@pytest.mark.parametrize("strategy", SHARDED)
def test_a_graph_has_only_operators_that_every_backend_lowers(strategy: Strategy) -> None:
    for name in ("even", "2,2,1,0 rows", "no unit"):
        case = cases(strategy)[name]
        for rank in (0, WORLD - 1):
            place = case.place(rank)
            run = functools.partial(alone, exchange=case.exchange, place=place, whole=doubled, gram=case.gram)
            graph = trace(case.shard(place.shard_rank), run)
            used = {str(node.target) for node in graph.graph.nodes if isinstance(node.target, torch._ops.OpOverload)}
            used = {name.removeprefix("aten.").removesuffix(".default") for name in used if "c10d" not in name}
            assert used <= LOWERED, used - LOWERED


# -- Gram -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("units", [0, 1, 3])
def test_triangles_come_back(n: int, units: int) -> None:
    a = gaussian(units, n, n, seed=n)
    packed = pack_triangles(a)
    assert packed.shape == (units, n * (n + 1) // 2)
    assert torch.equal(unpack_triangles(packed, n), (a + a.mT) / 2)


def test_gram_scatter_sends_a_quarter_of_gather_broadcast() -> None:
    """Float32 triangles for bfloat16 momenta [3072, 768]: (cols + 1) / rows, so a quarter and a diagonal."""

    def sent(strategy: Strategy) -> int:
        case = Case(strategy=strategy, units=8, rows=3072, cols=768, dtype="bfloat16")
        shard = torch.empty(8, 3072 // WORLD, 768, dtype=torch.bfloat16, device="meta")
        inputs = []
        for node in collectives_of(trace(shard, call(case, case.place(0)))):
            value = node.args[0].meta["val"]
            passed_on = WORLD - 1 if "all_gather" in str(node.target) else (WORLD - 1) / WORLD
            inputs.append(value.numel() * value.element_size() * passed_on)
        assert len(inputs) == 2
        return sum(inputs)

    assert sent("gram_scatter") / sent("gather_broadcast") == pytest.approx(769 / 3072)


@pytest.mark.parametrize("preset", ["torch", "keller", "hyperparallel"])
def test_gram_polynomial_is_the_iteration(preset: str) -> None:
    config = MuonConfig(preset=preset, ns_dtype="float32")
    x = gaussian(3, 40, 12, seed=1) * torch.tensor([1.0, 1e-3, 1e-7]).view(3, 1, 1)
    y = x @ gram_polynomial(x.mT @ x, config)
    assert relative_error(y, orthogonalize(x, config)) <= 1e-5


@pytest.mark.parametrize("eps", [0.0, 1e-38, 1e-7])
def test_gram_polynomial_of_nothing_is_finite(eps: float) -> None:
    x = torch.zeros(2, 6, 3)
    x[1] = 1e-30
    y = x @ gram_polynomial(x.mT @ x, MuonConfig(ns_dtype="float32", eps=eps))
    assert torch.isfinite(y).all()
    assert y.abs().max() <= 1e-6


def test_every_strategy_has_its_function() -> None:
    assert {*WHOLE, *GRAM} == set(STRATEGY_NAMES)
    assert not set(WHOLE) & set(GRAM)
