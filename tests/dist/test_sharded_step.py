"""The compiled step over ranks: fully_shard in one and two dims does what one process does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

import muon_compile as mc
from tests.dist.models import (
    MATRICES,
    TALL,
    WORLD,
    Job,
    Model,
    Outcome,
    assert_same,
    compiled,
    finish,
    give,
    optimizer_of,
    raised,
    sharded_model,
    train,
    train_alone,
)
from tests.dist.ranks import Ranks
from tests.reference import RULES, muon_step, relative_error

pytestmark = pytest.mark.dist

HSDP = (2, 2)
BIT_EQUAL = ("auto", "all_gather", "all_to_all", "gather_broadcast", "gather_scatter")
HIERARCHICAL = "hierarchical_all_to_all"
SMALL = {name: MATRICES[name] for name in ("even", "even_too", "five", "vector")}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(WORLD) as started:
        yield started


def only(*names: str) -> dict[str, tuple[int, ...]]:
    return {name: MATRICES[name] for name in names}


def check_same(outcomes: list[Outcome], expected: Outcome) -> None:
    for outcome in outcomes:
        assert_same(outcome.params, expected.params)
        assert_same(outcome.momenta, expected.momenta)


def close(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], bound: float) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert relative_error(actual[name], tensor) <= bound, name


def updates(outcome: Outcome, job: Job) -> dict[str, Tensor]:
    """What one step did to the parameters, in units of lr; the decay is 0."""
    before = dict(Model(job).named_parameters())
    return {name: (before[name].detach() - after) / job.lr for name, after in outcome.params.items()}


# -- the same as one process ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", [*BIT_EQUAL, HIERARCHICAL])
def test_fsdp_is_one_process_bit_for_bit(ranks: Ranks, strategy: str) -> None:
    job = Job(shapes={k: v for k, v in MATRICES.items() if "cols" not in k}, strategy=strategy)
    outcomes = ranks.run(train, job)
    check_same(outcomes, train_alone(job))
    if strategy != "auto":
        assert set(outcomes[0].strategies.values()) == {strategy}
    assert {"even", "five", "three", "wide"} == outcomes[0].strategies.keys() - {"even_too"}


@pytest.mark.parametrize("strategy", BIT_EQUAL)
def test_hsdp_is_one_process_bit_for_bit(ranks: Ranks, strategy: str) -> None:
    job = Job(shapes=only("even", "even_too", "three", "one", "experts", "vector"), mesh=HSDP, strategy=strategy)
    outcomes = ranks.run(train, job)
    check_same(outcomes, train_alone(job))
    assert outcomes[0].strategies["experts"] == "local"


def refuse(rank: int, job: Job) -> str:
    model = sharded_model(job)
    return raised(compiled, optimizer_of(model, job), job)


@pytest.mark.parametrize(
    ("mesh", "size", "says"), [(HSDP, None, "2 shard ranks do not divide into nodes"), ((4,), 3, "into nodes of 3")]
)
def test_ranks_that_make_no_nodes_are_refused(ranks: Ranks, mesh: tuple[int, ...], size: int | None, says: str) -> None:
    config = mc.CompileConfig(node_size=size)
    job = Job(shapes=only("even"), mesh=mesh, strategy=HIERARCHICAL, compile_config=config)
    for message in ranks.run(refuse, job):
        assert message.startswith("ValueError: Parameter 'even'") and says in message


@pytest.mark.parametrize("strategy", ["auto", "all_to_all", HIERARCHICAL])
def test_columns_may_be_sharded(ranks: Ranks, strategy: str) -> None:
    """They are summed in another order, so the last bit may differ."""
    job = Job(shapes={"cols": (6, 16), "cols_too": (6, 16), "square_cols": (8, 8)}, strategy=strategy)
    expected = train_alone(job)
    for outcome in ranks.run(train, job):
        close(outcome.params, expected.params, 1e-6)
        assert_same(outcome.momenta, expected.momenta)


@pytest.mark.parametrize("strategy", ["gram_all_reduce", "gram_scatter"])
@pytest.mark.parametrize("mesh", [(4,), HSDP])
def test_gram_strategies_on_tall_matrices(ranks: Ranks, strategy: str, mesh: tuple[int, ...]) -> None:
    job = Job(shapes=TALL, strategy=strategy, mesh=mesh, weight_decay=0.0, steps=1)
    expected = updates(train_alone(job), job)
    for outcome in ranks.run(train, job):
        assert set(outcome.strategies.values()) == {strategy}
        close(updates(outcome, job), expected, 2e-3)


def test_bfloat16_errs_no_more_than_one_process(ranks: Ranks) -> None:
    shapes = {"square": (24, 24), "wide": (13, 40), "tall": (64, 20)}
    job = Job(shapes=shapes, config=mc.MuonConfig(), steps=1, weight_decay=0.0)
    model = Model(job)
    give(model, 0)
    hyper = {"lr": 1.0, "weight_decay": 0.0, "momentum": 0.95}
    exact = {}
    for name, param in model.named_parameters():
        zero = torch.zeros(param.shape)
        assert param.grad is not None
        exact[name] = -muon_step(zero, param.grad, zero, RULES["torch"], hyper)[0]
    alone = updates(train_alone(job), job)
    for outcome in ranks.run(train, job):
        for name, update in updates(outcome, job).items():
            error, own = relative_error(update, exact[name]), relative_error(alone[name], exact[name])
            assert 0 < error <= 1.2 * own, (name, error, own)


@pytest.mark.parametrize("rows", [256, 250])
def test_the_update_does_not_depend_on_the_number_of_shards(ranks: Ranks, rows: int) -> None:
    job = Job(shapes={"w": (rows, 256)}, config=mc.MuonConfig(), ns="auto", steps=1, weight_decay=0.0)
    expected = updates(train_alone(job), job)["w"]
    update = updates(ranks.run(train, job)[0], job)["w"]
    assert relative_error(update, expected) <= 1e-2
    # The smallest singular value of a square matrix may be too small for five steps to lift.
    values = torch.linalg.svdvals(update)
    assert values.max() <= 1.25
    assert values[: int(0.95 * len(values))].min() >= 0.6


def test_every_number_of_rows_works(ranks: Ranks) -> None:
    job = Job(shapes={f"rows{n}": (n, 8) for n in (1, 2, 3, 5, 8, 13)})
    check_same(ranks.run(train, job), train_alone(job))


def test_weight_decay_acts_where_the_gradient_is_zero(ranks: Ranks) -> None:
    job = Job(shapes={**SMALL, "plain": (4, 4)}, plain=("plain",), ones=True, lr=0.1, weight_decay=2.0, steps=1)
    for outcome in ranks.run(train, job):
        for name, value in outcome.params.items():
            torch.testing.assert_close(value, torch.full_like(value, 0.8), msg=lambda m, n=name: f"{n}: {m}")


def test_plain_and_sharded_parameters_mix(ranks: Ranks) -> None:
    # Of other shapes than the sharded ones: alone they would share a bucket.
    job = Job(shapes={**SMALL, "plain": (12, 8), "plain_vector": (7,)}, plain=("plain", "plain_vector"))
    check_same(ranks.run(train, job), train_alone(job))


def test_adamw_takes_sharded_matrices(ranks: Ranks) -> None:
    job = Job(shapes=SMALL, adamw=("five", "even_too"))
    outcomes = ranks.run(train, job)
    check_same(outcomes, train_alone(job))
    assert outcomes[0].strategies.keys() == {"even"}


def test_replicas_that_repeat_do_the_same(ranks: Ranks) -> None:
    shapes = only("even", "even_too", "three", "experts")
    job = Job(shapes=shapes, mesh=HSDP, compile_config=mc.CompileConfig(replicas="repeat"))
    outcomes = ranks.run(train, job)
    check_same(outcomes, train_alone(job))
    assert "experts" not in outcomes[0].strategies  # nothing to share out, so nothing to send


def test_every_group_may_have_its_strategy(ranks: Ranks) -> None:
    wanted = {"even": "gather_broadcast", "even_too": "all_to_all", "wide": "gather_scatter"}
    job = Job(shapes=only("even", "even_too", "wide", "five", "experts"), strategy="all_gather", strategies=wanted)
    outcomes = ranks.run(train, job)
    check_same(outcomes, train_alone(job))
    assert outcomes[0].strategies == {**wanted, "five": "all_gather"}


def change_a_strategy(rank: int) -> list[str]:
    job = Job(shapes=only("even", "wide"), strategies={"even": "all_gather"}, steps=1)
    model = sharded_model(job)
    optimizer = optimizer_of(model, job)
    step = compiled(optimizer, job)
    found = []
    for strategy in ("all_gather", "all_to_all", "gather"):
        optimizer.param_groups[-1]["strategy"] = strategy
        give(model, 0)
        before = model.even.detach().to_local().clone()
        message = raised(optimizer.step) if strategy == "gather" else str(optimizer.step())
        assert torch.equal(before, model.even.detach().to_local()) is (strategy == "gather")
        kinds = {c.kind for c in step.plan.collectives if c.kind.startswith("all_to_all")}
        found.append(f"{message} {sorted(kinds)}")
    return found


def test_a_group_may_change_its_strategy(ranks: Ranks) -> None:
    for first, second, third in ranks.run(change_a_strategy):
        assert first == "None []"
        assert second == "None ['all_to_all_single']"
        assert third.startswith("ValueError: Parameter 'even': strategy: expected one of ('auto', 'local',")


# -- what is sent, and what is not ------------------------------------------------------------------------------------


def test_experts_alone_send_nothing(ranks: Ranks) -> None:
    job = Job(shapes=only("experts", "even_experts"))
    expected = train_alone(job)
    outcomes = ranks.run(train, job)
    check_same(outcomes, expected)
    for outcome in outcomes:
        assert outcome.collectives == ()
        assert outcome.operators
        assert not [name for name in outcome.operators if "c10d" in name]


def test_heads_that_end_where_shards_end_send_nothing(ranks: Ranks) -> None:
    for heads, sends in ((8, False), (3, True)):
        job = Job(shapes={"heads": (24, 12)}, config=mc.MuonConfig(ns_dtype="float32", num_heads=heads))
        outcomes = ranks.run(train, job)
        check_same(outcomes, train_alone(job))
        for outcome in outcomes:
            assert bool(outcome.collectives) is sends
            assert any("c10d" in name for name in outcome.operators) is sends


def test_small_gathers_make_more_waves_and_the_same_bits(ranks: Ranks) -> None:
    # Two matrices of 768 bytes and their results are gathered at once.
    shapes = {f"m{i}": (16, 12) for i in range(6)} | {"five": (5, 8)}
    waves = {}
    for bound in (1024**3, 3100):
        job = Job(shapes=shapes, strategy="all_gather", compile_config=mc.CompileConfig(max_gather_bytes=bound))
        outcomes = ranks.run(train, job)
        check_same(outcomes, train_alone(job))
        waves[bound] = outcomes[0].waves
    assert waves == {1024**3: 1, 3100: 4}


def local_on_a_sharded_matrix(rank: int) -> str:
    job = Job(shapes=only("even", "experts"), strategy="local")
    optimizer = optimizer_of(sharded_model(job), job)
    return raised(compiled, optimizer, job)


def test_local_cannot_make_a_sharded_matrix_whole(ranks: Ranks) -> None:
    for message in ranks.run(local_on_a_sharded_matrix):
        assert message.startswith("ValueError: Parameter 'even'")
        assert "'local'" in message


# -- compiling --------------------------------------------------------------------------------------------------------


def train_with_schedule(rank: int, job: Job) -> Outcome:
    model = sharded_model(job)
    optimizer = optimizer_of(model, job)
    step = compiled(optimizer, job)
    for number in range(job.steps):
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (1 + number)
        give(model, number)
        optimizer.step()
        assert step.stats.host_launches == 1
    return finish(model, optimizer, step)


def test_ten_steps_compile_once(ranks: Ranks) -> None:
    job = Job(shapes=SMALL, steps=10)
    outcomes = ranks.run(train_with_schedule, job)
    for outcome in outcomes:
        counts = {name: outcome.stats[name] for name in ("graphs", "compiles", "recompiles", "host_launches", "steps")}
        assert counts == {"graphs": 1, "compiles": 1, "recompiles": 0, "host_launches": 1, "steps": 10}
        assert outcome.stats["collectives"] == len(outcome.collectives) > 0
    first = train_alone(Job(shapes=SMALL, steps=1))
    assert relative_error(outcomes[0].params["even"], first.params["even"]) > 1e-3


@pytest.mark.inductor
def test_inductor_does_the_same(ranks: Ranks) -> None:
    job = Job(shapes=only("five"), backend="inductor", steps=2)
    expected = train_alone(job)
    for outcome in ranks.run(train, job, timeout=100):
        assert outcome.strategies["five"] == "all_gather"
        close(outcome.params, expected.params, 1e-5)
        close(outcome.momenta, expected.momenta, 1e-5)
        assert (outcome.stats["compiles"], outcome.stats["host_launches"]) == (1, 1)


def is_sharded(rank: int, job: Job) -> dict[str, tuple[int, ...]]:
    """Rows (or columns) that a rank holds."""
    found = {}
    for name, param in sharded_model(job).named_parameters():
        assert isinstance(param, DTensor)
        found[name] = tuple(param._local_tensor.shape)
    return found


def test_the_models_are_sharded_as_these_tests_suppose(ranks: Ranks) -> None:
    held = ranks.run(is_sharded, Job())
    assert [rank["five"] for rank in held] == [(2, 8), (2, 8), (1, 8), (0, 8)]
    assert [rank["three"][0] for rank in held] == [1, 1, 1, 0]
    assert [rank["one"][0] for rank in held] == [1, 0, 0, 0]
    assert [rank["cols"] for rank in held] == [(6, 4)] * 4
    assert [rank["experts"][0] for rank in held] == [2, 2, 2, 0]
