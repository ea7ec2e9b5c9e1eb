"""Units and how 4 ranks share them out: what every strategy has to bear."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from muon_compile.build.gram import gram_polynomial
from muon_compile.build.orthogonalize import orthogonalize
from muon_compile.config import DTypeName, MuonConfig
from muon_compile.plan.exchange import OWNED, Exchange, Place, Strategy, default_node_size, run_of
from muon_compile.plan.strategies import gathers_results
from tests.reference import gaussian

WORLD = 4


def chunk_sizes(rows: int, ranks: int) -> tuple[int, ...]:
    """Rows of each rank, as ``torch.chunk`` cuts them: 5 on 4 are 2, 2, 1, 0."""
    each = -(-rows // ranks)
    return tuple(max(0, min(each, rows - rank * each)) for rank in range(ranks))


def even_counts(units: int, ranks: int) -> tuple[int, ...]:
    """Runs as equal as can be, the first ones longer."""
    return tuple(units // ranks + (rank < units % ranks) for rank in range(ranks))


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Units of one part and how ranks share them out; ``Exchange`` has the fields' meanings."""

    strategy: Strategy
    units: int
    rows: int
    cols: int
    transposed: bool = False
    replicas: int = 1
    replica_counts: tuple[int, ...] = ()
    owner_counts: tuple[tuple[int, ...], ...] | None = None
    dtype: DTypeName = "float32"

    @property
    def exchange(self) -> Exchange:
        shards = 1 if self.strategy == "local" else WORLD // self.replicas
        runs = self.replica_counts or (self.units,)
        owners = self.owner_counts or tuple(even_counts(run, shards) for run in runs)
        gathers = self.strategy == "gather_broadcast" and gathers_results(owners)
        return Exchange(
            strategy=self.strategy,
            num_units=self.units,
            rows=self.rows,
            cols=self.cols,
            transposed=self.transposed,
            shard_axis=None if shards == 1 else "shard",
            sizes=chunk_sizes(self.rows, shards),
            replica_axis="replica" if self.replicas > 1 else None,
            replica_counts=self.replica_counts,
            owner_counts=owners if self.strategy in OWNED else (),
            comm_dtype=self.dtype,
            form="standard",
            kernel="graph",
            gathers_results=gathers,
            node_size=default_node_size(shards) if self.strategy == "hierarchical_all_to_all" else 0,
        )

    @property
    def config(self) -> MuonConfig:
        return MuonConfig(ns_dtype=self.dtype)

    @property
    def whole_units(self) -> Tensor:
        units = gaussian(self.units, self.rows, self.cols, seed=self.units + 10 * self.rows + 100 * self.cols)
        return units.to(getattr(torch, self.dtype))

    def whole(self, y: Tensor) -> Tensor:
        """As a part's matrices are: sharded along their columns, they lie transposed in memory."""
        return orthogonalize(y.mT, self.config).mT if self.transposed else orthogonalize(y, self.config)

    def gram(self, r: Tensor) -> Tensor:
        return gram_polynomial(r, self.config)

    def shard(self, shard_rank: int) -> Tensor:
        start, stop = run_of(self.exchange.sizes, shard_rank)
        return self.whole_units[:, start:stop].contiguous()

    def place(self, rank: int, names: tuple[str, ...] = ("shard", "replica", "node", "peers")) -> Place:
        shards = len(self.exchange.sizes)
        return Place(
            shard_rank=rank % shards,
            shard_group=names[0],
            replica_rank=rank // shards,
            replica_group=names[1] if self.replicas > 1 else "",
            node_group=names[2],
            peer_group=names[3],
        )


def cases(strategy: Strategy, dtype: DTypeName = "float32") -> dict[str, Case]:
    """Shapes and owners that a strategy has to bear, on 4 ranks."""
    make = functools.partial(Case, strategy=strategy, dtype=dtype)
    found = {
        "even": make(units=8, rows=8, cols=6),
        "tall": make(units=4, rows=64, cols=5),
        "2,2,1,0 rows": make(units=6, rows=5, cols=3),
        "1,1,1,0 rows": make(units=5, rows=3, cols=5),
        "one row": make(units=4, rows=1, cols=4),
        "columns": make(units=6, rows=8, cols=5, transposed=True),
        "uneven columns": make(units=6, rows=7, cols=4, transposed=True),
        "fewer units than ranks": make(units=2, rows=8, cols=3),
        "one unit": make(units=1, rows=6, cols=3),
        "no unit": make(units=0, rows=5, cols=3),
    }
    if strategy in OWNED:
        skewed = functools.partial(make, owner_counts=((0, 4, 0, 1),))
        found |= {"skewed": skewed(units=5, rows=8, cols=3), "skewed, uneven": skewed(units=5, rows=5, cols=4)}
    return found


def replica_cases(strategy: Strategy) -> dict[str, Case]:
    """2 replicas of 2 shards (of 4 replicas of whole units, for ``"local"``)."""
    replicas = 4 if strategy == "local" else 2
    make = functools.partial(Case, strategy=strategy, replicas=replicas, cols=4)
    return {
        "repeated": make(units=5, rows=7),
        "divided": make(units=5, rows=7, replica_counts=even_counts(5, replicas)),
        "divided evenly": make(units=8, rows=8, replica_counts=even_counts(8, replicas)),
        "one replica idle": make(units=1, rows=3, replica_counts=even_counts(1, replicas)),
        "first replica idle": make(units=3, rows=3, replica_counts=(0,) * (replicas - 1) + (3,)),
        "no unit": make(units=0, rows=3, replica_counts=(0,) * replicas),
    }
