"""What ``verify`` found, for people and as JSON."""

from __future__ import annotations

import io
import json
from dataclasses import asdict, dataclass

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

_WIDTH = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One strategy with one backend.

    Args:
        strategy: How sharded matrices were made whole; ``"local"``: those of them that one rank holds alone.
        backend: What ran the graph.
        form: Iteration forms in use.
        num_params: Parameters that the strategy can take.
        worst_error: Largest relative error of a parameter's direction, over parameters and ranks.
        mean_error: The mean over parameters, each its largest over ranks.
        worst_of_bar: Largest error as a part of what is allowed.
        bytes_per_rank: What a rank puts into its collectives per step, in bytes, as the plan promises.
        sent_bytes: Most bytes that a rank sends per step with ring algorithms, padding included.
        collectives: Collectives per step.
        busiest_over_mean: Newton-Schulz FLOPs of the busiest rank over the mean; 1 is even.
        ok: Every error is within its bar.
    """

    strategy: str
    backend: str
    form: str
    num_params: int
    worst_error: float
    mean_error: float
    worst_of_bar: float
    bytes_per_rank: int
    sent_bytes: int
    collectives: int
    busiest_over_mean: float
    ok: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What ``verify`` found; ``str()`` is a table.

    Args:
        rows: One for every strategy and backend.
        num_params: Parameters of the set.
        axes: Name and size of every mesh axis.
        seed: Of the gradients.
    """

    rows: tuple[Row, ...]
    num_params: int
    axes: tuple[tuple[str, int], ...]
    seed: int

    @property
    def ok(self) -> bool:
        """Whether every row is within its bars."""
        return bool(self.rows) and all(row.ok for row in self.rows)

    def to_json(self) -> str:
        """The report as JSON text."""
        return json.dumps({"ok": self.ok, **asdict(self)}, indent=1)

    def __str__(self) -> str:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        for name in ("strategy", "backend", "form"):
            table.add_column(name, no_wrap=True, overflow="ellipsis", max_width=24)
        for name in ("params", "worst", "mean", "of bar", "payload", "sent", "calls", "busiest", "ok"):
            table.add_column(name, no_wrap=True, justify="right")
        for row in self.rows:
            cells = (row.strategy, row.backend, row.form, f"{row.num_params}/{self.num_params}")
            errors = (f"{row.worst_error:.1e}", f"{row.mean_error:.1e}", f"{row.worst_of_bar:.2f}")
            costs = (f"{row.bytes_per_rank:,}", f"{row.sent_bytes:,}", str(row.collectives))
            rest = (f"{row.busiest_over_mean:.2f}", "yes" if row.ok else "NO")
            table.add_row(*map(Text, (*cells, *errors, *costs, *rest)))
        sink = io.StringIO()
        console = Console(file=sink, width=_WIDTH, color_system=None, highlight=False)
        where = " x ".join(f"{name} {size}" for name, size in self.axes) or "one process"
        console.print(Text(f"muon_compile verify: {self.num_params} parameters, {where}, seed {self.seed}"))
        console.print(table)
        console.print(
            Text(
                "worst, mean: relative error of a parameter's direction against the float64 polynomial; of bar: the "
                "largest part of what is allowed. payload: bytes into collectives per rank; sent: most bytes that a "
                "rank sends. busiest: Newton-Schulz FLOPs of the busiest rank over the mean."
            )
        )
        console.print(Text("ok" if self.ok else "NOT OK: some directions are wrong"))
        return "\n".join(line.rstrip() for line in sink.getvalue().splitlines())
