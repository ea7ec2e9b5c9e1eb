"""What a step is made of, for ``inspect.dump`` to write; and a step measured, if that is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from muon_compile.inspect.dump import Compiled, dump_files, write_files
from muon_compile.inspect.trace import Measured
from muon_compile.plan.hardware import Hardware
from muon_compile.run.binding import Binding
from muon_compile.run.profiling import measure_step
from muon_compile.run.stats import StepStats
from muon_compile.run.together import ask_together

Hyper = Sequence[Mapping[str, float | Tensor]]


def measure(binding: Binding) -> Measured:
    """Measure a step on copies of the binding's tensors; every rank that the step sends to has to call.

    Raises:
        RuntimeError: Some of them do not; names them.
    """
    kind = "all" if "all" in binding.graphs else "masked"
    traced, compiled = binding.graphs[kind]
    inputs = binding.copies(kind)
    if binding.places:
        ask_together("profile", binding.reading.meshes.ranks())
    return measure_step(binding.local, traced, compiled, inputs)


def write_artifacts(
    directory: Path,
    binding: Binding,
    stats: StepStats,
    hyper: Hyper,
    *,
    hardware: Hardware | None = None,
    measured: Measured | None = None,
) -> list[Path]:
    """Write everything that ``inspect.dump.dump_files`` makes of a compiled step.

    Returns:
        The paths written.

    Raises:
        OSError: The directory cannot be written to; nothing has been.
    """
    compiled = Compiled(
        graphs=binding.graphs,
        plan=binding.local,
        places=binding.places,
        stats=stats.as_dict(),
        hyper=[{k: v.tolist() if isinstance(v, Tensor) else v for k, v in group.items()} for group in hyper],
        measured=measured,
    )
    return write_files(directory, dump_files(binding.plan, compiled, hardware=hardware))
