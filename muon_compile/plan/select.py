"""Which strategy a bucket takes: the one predicted to be fastest, of those that the network can hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from muon_compile.config import MuonConfig
from muon_compile.plan.accuracy import auto_forms
from muon_compile.plan.assign import assign_grid
from muon_compile.plan.exchange import GATHERS, GRAMS, OWNED, STRATEGIES, Exchange, Strategy, StrategyChoice
from muon_compile.plan.exchange_cost import ExchangeCost, exchange_cost
from muon_compile.plan.feasible import feasible
from muon_compile.plan.forms import parse_form
from muon_compile.plan.hardware import Hardware, network_of
from muon_compile.plan.network import Group
from muon_compile.plan.strategies import gathers_results
from muon_compile.plan.traffic import fastest, open_connections, over_limit
from muon_compile.spec import FLOAT_BYTES, MeshSpec

# Gram strategies iterate on Grams alone: float32, all steps in one segment.
_GRAM_FORM = "gram"


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What a bucket's choice depends on beside the bucket.

    Args:
        mesh: Its mesh.
        node_size: Shard ranks of a node, for hierarchical_all_to_all.
        names_nodes: Whether that was asked for.
        replicas: Ranks of the replica axis that divide units among them; 1 where none do.
        hardware: What a rank computes with, and what joins the ranks.
        max_gather_bytes: Bound on what is gathered at once.
        share: Of all units' FLOPs in the world those of one unit of this bucket: no rank has less to do than that.
    """

    mesh: MeshSpec
    node_size: int
    names_nodes: bool
    replicas: int
    hardware: Hardware
    max_gather_bytes: int
    share: float


def why_not(cut: Exchange, config: MuonConfig, name: Strategy, node_size: int) -> str | None:
    """Why a strategy cannot make a bucket's units whole, in words; None where it can."""
    return feasible(
        name,
        rows=cut.rows,
        cols=cut.cols,
        sizes=cut.sizes,
        blocks_cut=bool(cut.blocks),
        relative_eps=config.eps == "relative",
        node_size=node_size,
    )


def with_strategy(cut: Exchange, name: Strategy, node_size: int) -> Exchange:
    """The exchange under a strategy, its owners apart."""
    made = replace(cut, strategy=name, node_size=node_size if name == "hierarchical_all_to_all" else 0)
    return replace(made, form=_GRAM_FORM, kernel="graph") if name in GRAMS else made


def rank_by_time(cut: Exchange, config: MuonConfig, around: Surroundings) -> tuple[StrategyChoice, ...]:
    """The strategies that can be used, by predicted time; of equal ones the first of ``STRATEGIES`` comes first.

    Each is predicted for the bucket alone, one thing after another, but with owners' work spread as over all buckets.
    Left out are those that cannot make the units whole, Gram strategies where their form is less accurate than the
    standard one (``plan.accuracy``), and those whose connections the network's devices cannot hold. Over nodes, which
    takes process groups of its own, matrices are exchanged only where nodes are named or an all-to-all is refused.

    Args:
        cut: Its units, cut over ranks.
        config: Its mathematics.
        around: The rest.

    Raises:
        ValueError: The network can hold none.
    """
    precise = parse_form(_GRAM_FORM, config.ns_steps) in auto_forms(cut.rows, cut.cols, config)
    found: list[tuple[float, Strategy]] = []
    refused: dict[Strategy, str] = {}
    for name in STRATEGIES:
        if why_not(cut, config, name, around.node_size) is not None or (name in GRAMS and not precise):
            continue
        if name == "hierarchical_all_to_all" and not around.names_nodes and "all_to_all" not in refused:
            continue
        candidate = _candidate(cut, name, around)
        cost = exchange_cost(candidate, config, around.mesh, around.hardware)
        limit = _limit(cost, cut, around)
        if limit is None:
            found.append((_seconds(candidate, cost, around), name))
        else:
            refused[name] = limit
    if not found:
        raise ValueError("no strategy can be used here: " + "; ".join(f"{n}: {why}" for n, why in refused.items()))
    ranked = sorted(found, key=lambda item: item[0])
    return tuple(_in_words(place, ranked, list(refused)) for place in range(len(ranked)))


def _in_words(place: int, ranked: Sequence[tuple[float, Strategy]], refused: Sequence[str]) -> StrategyChoice:
    seconds, name = ranked[place]
    reason = f"predicted {seconds * 1e3:.3g} ms"
    other = ranked[1 if place == 0 else 0] if len(ranked) > 1 else None
    if other is not None:
        reason += f"; {other[1]} {other[0] / max(seconds, 1e-12):.2f}x of that"
    if refused:
        reason += f"; over a limit: {', '.join(refused)}"
    return StrategyChoice(
        name=name,
        reason=reason,
        seconds=seconds,
        runner_up=None if other is None else other[1],
        runner_up_seconds=None if other is None else other[0],
    )


def _candidate(cut: Exchange, name: Strategy, around: Surroundings) -> Exchange:
    """The bucket's exchange as if its units were shared out alone."""
    shared = around.replicas > 1
    owned = name in OWNED
    shards = len(cut.sizes) if owned else 1
    (run,), (owners,) = assign_grid([(cut.num_units, 1)], around.replicas, shards, divide=shared)
    counts = owners if owned else ()
    return replace(
        with_strategy(cut, name, around.node_size),
        replica_counts=run if shared else (),
        owner_counts=counts,
        replica_axis=cut.replica_axis if shared else None,
        gathers_results=name == "gather_broadcast" and gathers_results(counts),
    )


def _seconds(candidate: Exchange, cost: ExchangeCost, around: Surroundings) -> float:
    """Everything that everyone does, and of what owners do the share of the busiest rank."""
    busy = around.replicas
    if candidate.strategy in OWNED:
        # A wave of gathers has so many units, and the other ranks have none of it.
        unit = 2 * candidate.rows * candidate.cols * FLOAT_BYTES[candidate.comm_dtype]
        at_once = around.max_gather_bytes // max(1, unit) if candidate.strategy in GATHERS else candidate.num_units
        busy *= max(1, min(len(candidate.sizes), at_once))
    spread = min(1.0, max(1 / busy, around.share))
    sent = sum(spec_cost.seconds for phase in cost.phases for _, spec_cost in phase)
    everyone = sum(stage.everyone.seconds for stage in cost.stages)
    owned = sum(stage.by_owned[candidate.num_units].seconds for stage in cost.stages if stage.by_owned)
    return sent + everyone + owned * spread


def _limit(cost: ExchangeCost, cut: Exchange, around: Surroundings) -> str | None:
    network = network_of(around.hardware)
    opened = [(spec.axis, sent) for phase in cost.phases for spec, sent in phase]
    for axis in (cut.shard_axis, cut.replica_axis):  # where the ranks agree on gradients first
        if axis is not None:
            opened.append((axis, fastest("all_reduce", 4 * cut.num_units, Group.along(around.mesh, axis), network)))
    return over_limit(open_connections(opened, network), network)
