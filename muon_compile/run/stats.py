"""What a compiled step did, counted."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(slots=True, kw_only=True)
class StepStats:
    """Counters of a compiled step.

    Args:
        graphs: Compiled graphs in use: one for all gradients present, one more once any was missing.
        recompiles: Compiles of a graph that had been compiled before, each because the plan changed.
        compiles: All compiles.
        cached: Compiles that the backend answered from its disk cache.
        compile_seconds: Wall time of tracing and compiling, in seconds.
        host_launches: Calls from the host into compiled code during the last step, counted as they are made.
        steps: Steps that ran a graph.
        collectives: Collectives per step.
        bytes: Payload per rank and step, in bytes.
        collectives_by_kind: The same, by the functional operator's name.
        bytes_by_kind: Likewise.
        fx_nodes: Nodes of the last traced graph.
        temp_bytes: Most memory that a step's temporaries take at once, as planned; ``max_temp_bytes`` bounds it.
        scratch_bytes: Memory that the CPU kernels hold beside that for their threads, in the whole process, after the
            last step.
    """

    graphs: int = 0
    recompiles: int = 0
    compiles: int = 0
    cached: int = 0
    compile_seconds: float = 0.0
    host_launches: int = 0
    steps: int = 0
    collectives: int = 0
    bytes: int = 0
    collectives_by_kind: dict[str, int] = field(default_factory=dict)
    bytes_by_kind: dict[str, int] = field(default_factory=dict)
    fx_nodes: int = 0
    temp_bytes: int = 0
    scratch_bytes: int = 0

    @property
    def graph_breaks(self) -> int:
        """Breaks inside the last step: its compiled segments, each one call of the host, less one."""
        return max(0, self.host_launches - 1)

    def as_dict(self) -> dict[str, Any]:
        """Plain values by name."""
        return asdict(self) | {"graph_breaks": self.graph_breaks}
