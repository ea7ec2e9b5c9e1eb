"""What a step is made of as files: texts by name, and how they are written."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from muon_compile.inspect.collectives import collective_rows
from muon_compile.inspect.dot import graph_dot
from muon_compile.inspect.graph_nodes import commented_code, counts_table, graph_rows, operator_counts
from muon_compile.inspect.report import render_report
from muon_compile.inspect.trace import Measured, timeline
from muon_compile.plan.exchange import Place
from muon_compile.plan.hardware import Hardware, default_hardware
from muon_compile.plan.plan import Plan
from muon_compile.plan.sharding import promises
from muon_compile.plan.step_cost import Event, predict_step

if TYPE_CHECKING:
    from muon_compile.lower.compiled import CompiledGraph
    from muon_compile.lower.trace import TracedStep


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """What there is of a step beside its plan once it is compiled, on one rank.

    Args:
        graphs: By kind, ``"all"`` gradients present or ``"masked"``, the traced graph and what a backend made of it.
        plan: The plan as this rank runs it.
        places: Where the rank stands, for every part with an exchange.
        stats: Counters by name.
        hyper: Hyperparameters by name, of every group.
        measured: A step that was measured.
    """

    graphs: Mapping[str, tuple[TracedStep, CompiledGraph]]
    plan: Plan
    places: Mapping[int, Place] = field(default_factory=dict)
    stats: Mapping[str, Any] = field(default_factory=dict)
    hyper: Sequence[Mapping[str, Any]] = ()
    measured: Measured | None = None


def dump_files(plan: Plan, compiled: Compiled | None = None, *, hardware: Hardware | None = None) -> dict[str, str]:
    """Everything that can be said of a step, as texts by relative file name.

    Args:
        plan: The plan, of all ranks.
        compiled: What there is of it on this rank; None: the files that need no graph are made.
        hardware: What the prediction counts with; None: the preset for the plan's devices.

    Returns:
        ``plan.json``, ``plan.txt``, ``collectives.json`` (``collective_rows``), ``predicted.trace.json`` and
        ``report.html``. Of a compiled step also ``stats.json``, and in a folder for each graph ``graph.py``,
        ``graph.json`` (``graph_rows``), ``graph.dot``, ``op_counts.json`` and ``.txt``, and the backend's code. Of a
        measured one also ``measured.trace.json``, and ``timeline.trace.json``, which has both.
    """
    files = {"plan.json": plan.to_json(), "plan.txt": plan.describe() + "\n"}
    graphs: dict[str, list[dict[str, Any]]] = {}
    traced: TracedStep | None = None
    for kind, (traced, code) in compiled.graphs.items() if compiled is not None else ():
        assert compiled is not None
        graphs[kind] = rows = graph_rows(compiled.plan, traced)
        counts = operator_counts(rows)
        made = {
            "graph.py": commented_code(compiled.plan, traced),
            "graph.json": _lines(rows),
            "graph.dot": graph_dot(rows, f"{kind} gradients"),
            "op_counts.json": json.dumps(counts, indent=1) + "\n",
            "op_counts.txt": counts_table(counts),
            **code.code,
        }
        files |= {f"{kind}_gradients/{name}": text for name, text in made.items()}
    # Only ranks that exchange nothing have graphs of several kinds, and no collective in any of them.
    own, places = (plan, None) if compiled is None else (compiled.plan, compiled.places)
    collectives = collective_rows(own, traced, places)
    stats, hyper = (None, None) if compiled is None else (compiled.stats, list(compiled.hyper))
    files["collectives.json"] = _lines(collectives)
    if stats is not None:
        files["stats.json"] = json.dumps(stats, indent=1) + "\n"
    files |= _traces(plan, hardware, None if compiled is None else compiled.measured)
    files["report.html"] = render_report(
        plan,
        graphs=graphs or None,
        collectives=None if traced is None else _in_plan_order(plan, collectives),
        stats=stats,
        hyper=hyper,
        title=f"muon_compile step, plan {plan.digest}",
    )
    return files


def dump_plan(plan: Plan, directory: str | Path, *, hardware: Hardware | None = None) -> list[Path]:
    """Write what can be said of a plan alone: no ranks, no tensors, no graph.

    Args:
        plan: The plan.
        directory: Where to; made if need be.
        hardware: What the prediction counts with; None: the preset for the plan's devices.

    Returns:
        The paths written.

    Raises:
        OSError: The directory cannot be written to; nothing has been.
    """
    return write_files(Path(directory), dump_files(plan, hardware=hardware))


def _lines(rows: Sequence[Mapping[str, Any]]) -> str:
    """A JSON list with a line for each row."""
    return "[" + ",".join(f"\n{json.dumps(row)}" for row in rows) + "\n]\n"


def _traces(plan: Plan, hardware: Hardware | None, measured: Measured | None) -> dict[str, str]:
    machine = _machine(plan, hardware)
    cost = predict_step(plan, machine)
    predicted = f"predicted for {machine.name}"
    about = f"Predicted for {machine.name}, on the rank with the most to do: {cost.seconds * 1e3:,.3f} ms."
    files = {"predicted.trace.json": timeline({predicted: cost.events}, [about])}
    if measured is not None:
        name, whole = "measured, operator by operator", measured.compiled_seconds
        steps: dict[str, Sequence[Event]] = {name: measured.events}
        if whole is not None:
            bar = Event(name="compiled step", lane="compute", start=0.0, seconds=whole)
            steps["measured, the compiled call"] = [bar]
        files["measured.trace.json"] = timeline(steps, measured.notes)
        both = {predicted: cost.events, name: measured.events}
        files["timeline.trace.json"] = timeline(both, [about, *measured.notes])
    return {name: json.dumps(trace) + "\n" for name, trace in files.items()}


def _machine(plan: Plan, hardware: Hardware | None) -> Hardware:
    """The figures for the plan's devices, those given if they are about their type."""
    device = plan.buckets[0].device
    return hardware if hardware is not None and hardware.device == device.split(":")[0] else default_hardware(device)


def _in_plan_order(plan: Plan, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A rank's collectives as the plan of all ranks counts them.

    They are the same but for broadcasts: where replicas share the work out, a rank has those of its replica's owners.
    """
    promised = promises(plan)
    if len(rows) == len(promised):
        return [dict(row) for row in rows]
    left = [dict(row) for row in rows]
    made: list[dict[str, Any]] = []
    for promise in promised:
        wanted = (promise.spec.kind, promise.spec.axis, promise.phase, promise.wave, promise.part)
        same = [row for row in left if tuple(row[key] for key in ("kind", "axis", "phase", "wave", "part")) == wanted]
        if same:
            left.remove(same[0])
        made.append(same[0] if same else {"kind": wanted[0], "axis": wanted[1], "found": None})
    return made + left


# -- writing ----------------------------------------------------------------------------------------------------------


def write_files(directory: Path, files: Mapping[str, str]) -> list[Path]:
    """Write texts into a directory: all of them under other names first, so that a failure leaves no half of a file.

    Args:
        directory: Where to; made if need be.
        files: Texts by relative name.

    Returns:
        The paths, in the order of ``files``.

    Raises:
        OSError: Something cannot be written; the message says what and what to do. Older files are as they were, unless
            the error came while the new ones were put in their places.
    """
    paths = [directory / name for name in files]
    made = _missing(directory)
    try:
        with _told(directory):
            directory.mkdir(parents=True, exist_ok=True)
            taken = next((path for path in paths if path.is_dir()), None)
            if taken is not None:
                raise IsADirectoryError(None, "there is a directory of this name", str(taken))
            staging = Path(tempfile.mkdtemp(prefix=".dump-", dir=directory))
            try:
                for name, text in files.items():
                    (staging / name).parent.mkdir(parents=True, exist_ok=True)
                    # A lone surrogate of a name is no character that a file could hold.
                    (staging / name).write_text(text, encoding="utf-8", errors="backslashreplace")
                for name, path in zip(files, paths, strict=True):
                    path.parent.mkdir(parents=True, exist_ok=True)
                    os.replace(staging / name, path)
            finally:
                shutil.rmtree(staging, ignore_errors=True)
    except OSError:
        with suppress(OSError):  # others write there, too
            for folder in made:
                folder.rmdir()
        raise
    return paths


def _missing(directory: Path) -> list[Path]:
    """The directory and those above it that are not there, the innermost first."""
    return [folder for folder in (directory, *directory.parents) if not folder.exists()]


@contextmanager
def _told(directory: Path) -> Iterator[None]:
    """Say in words what could not be written."""
    try:
        yield
    except OSError as error:
        where = error.filename or directory
        reason = error.strerror or error
        raise type(error)(
            error.errno,
            f"dump: expected a directory that can be written to, got {str(directory)!r} ({where}: {reason}); choose "
            "another, or make room",
            str(where),
        ) from error
