"""A stand-in for the one extension module of TorchAir, so that its Python loads and lowers without an NPU.

Everything but ``torchair.core._torchair`` is TorchAir's own: its passes over the traced graph, its converters, its
passes over the GE graph. What the graph engine would be handed is recorded, and run on the CPU by ``interpret``.

Importing TorchAir changes the process. It replaces meta kernels, maps ``dist.broadcast``, ``send``, ``recv`` and
``all_to_all`` in compiled functions to its own operators, and sets logging's class of loggers: do it in a process of
its own. It also installs an ``atexit`` hook and handlers of SIGTERM and SIGINT that shut the device down; the stand-in,
which has no device, takes these out again, so that Ctrl-C stays what it was.

Source: TorchAir's Python in torch_npu 2.10 to 2.14: every name that it takes from ``_torchair``.
"""

from __future__ import annotations

import atexit
import importlib
import importlib.metadata
import importlib.util
import logging
import re
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, cast

import torch
from torch import Tensor

from muon_compile.npu.graph import GeGraph, parse
from muon_compile.npu.interpret import run

_LOG = logging.getLogger("muon_compile")

MODULE = "torchair.core._torchair"
# By this attribute of the module others tell it from the real one; it holds the StandIn.
MARKER = "muon_compile_stand_in"
_DTYPES = "BOOL UINT8 INT8 INT16 UINT16 INT32 UINT32 INT64 UINT64 BF16 FLOAT16 FLOAT32 FLOAT64 COMPLEX64 COMPLEX128"
# What placeholders are defined in, as long as the process lasts.
_KEPT: list[torch.library.Library] = []
# Handlers that TorchAir's import replaces.
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@dataclass(slots=True, kw_only=True)
class LoadedGraph:
    """A graph that TorchAir handed to the graph engine.

    Args:
        name: Name.
        serialized: A serialized ``ModelDef``.
        options: The graph's options.
        input_placements: 1 for each input on the device, 0 for each on the host.
        output_dtypes: dtypes of its outputs, by their number in GE (``ops.GE_DTYPES``).
        executor_type: 1 for an NPU, 0 for the CPU.
        compiled: How often it was compiled.
        runs: How often it ran.
        ref_outputs: For the index of each output that a run wrote to an input, the index of that input.
    """

    name: str
    serialized: bytes = field(repr=False)
    options: Mapping[str, str]
    input_placements: tuple[int, ...]
    output_dtypes: tuple[int, ...]
    executor_type: int
    compiled: int = 0
    runs: int = 0
    ref_outputs: Mapping[int, int] = field(default_factory=dict)
    _parsed: GeGraph | None = field(default=None, repr=False)

    @property
    def graph(self) -> GeGraph:
        """The graph as plain data."""
        if self._parsed is None:
            self._parsed = parse(self.serialized)
        return self._parsed


@dataclass(slots=True, kw_only=True)
class StandIn:
    """What the stand-in has seen.

    Args:
        folder: The folder with the package ``torchair``.
        global_options: Options that the graph engine was last initialized with.
        graphs: Graphs that were loaded, in order.
        placeholders: Names that this torch has no more and this TorchAir asks for, defined so that it loads.
    """

    folder: Path
    global_options: Mapping[str, str] = field(default_factory=dict)
    graphs: list[LoadedGraph] = field(default_factory=list)
    placeholders: tuple[str, ...] = ()


def installed() -> StandIn | None:
    """The stand-in of this process, if there is one."""
    return cast("StandIn | None", getattr(sys.modules.get(MODULE), MARKER, None))


def install(folder: Path) -> StandIn:
    """Let a later ``import torchair`` find TorchAir's Python in ``folder``, and the stand-in for its extension.

    Args:
        folder: What ``wheel.torchair_sources`` gave.

    Raises:
        ValueError: ``folder`` holds no TorchAir.
        RuntimeError: torch_npu is there, TorchAir is already loaded, the stand-in is in use with another folder, or
            protobuf or packaging is missing.
    """
    found = installed()
    if found is not None:
        if found.folder != folder:
            raise RuntimeError(f"expected one TorchAir in a process, got {folder} after {found.folder}; start another.")
        return found
    if not (folder / "torchair" / "__init__.py").is_file():
        raise ValueError(f"folder: expected one that holds the package torchair, got {folder}.")
    _check_process()
    record = StandIn(folder=folder)
    record.placeholders = _define_placeholders(folder)
    if record.placeholders:
        _LOG.info("names that torch %s has no more, defined for TorchAir: %s", torch.__version__, record.placeholders)
    sys.modules[MODULE] = _module(record)
    sys.path.insert(0, str(folder))
    return record


def _check_process() -> None:
    loaded = [name for name in ("torch_npu", "torchair") if name in sys.modules]
    if loaded:
        raise RuntimeError(
            f"expected {' and '.join(loaded)} not to be loaded; install the stand-in first, in a process of its own."
        )
    if importlib.util.find_spec("torch_npu") is not None:
        raise RuntimeError("torch_npu is installed here, and TorchAir would load it; use backend='torchair' as it is.")
    missing = []
    for package in ("protobuf", "packaging"):  # TorchAir asks for their versions; torch_npu does not install them
        try:
            importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            missing.append(package)
    if missing:
        raise RuntimeError(f"TorchAir needs {' and '.join(missing)}: pip install {' '.join(missing)}")


def _module(record: StandIn) -> ModuleType:
    module = ModuleType(MODULE, "A stand-in for TorchAir's extension module, by muon_compile.")
    setattr(module, MARKER, record)

    def initialize(options: Mapping[str, str]) -> None:
        record.global_options = dict(options)

    provided: dict[str, Any] = {
        "TorchNpuGraphBase": _graph_base(record),
        "TorchDataType": type("TorchDataType", (), {name: at for at, name in enumerate(_DTYPES.split())}),
        "InitializeGraphEngine": initialize,
        "FinalizeGraphEngine": lambda: None,
        "SetDebugLogPath": lambda path: None,  # of the extension's own log, and this one writes none
        "StupidRepeat": lambda word, times: word * times,
        "GetSocName": lambda: "Ascend910B2",
        "check_cann_compat": lambda *what: "",  # nothing is wrong with it
        "get_registered_ir_def": lambda op_type: ("None", [], [], []),  # no library to look it up in
    }
    provided |= {name: _needs_device(name) for name in ("export", "as_torch_tensors", "InitDeviceStdoutChannel")}
    provided |= {name: _needs_device(name) for name in ("AclmdlSetDump", "AclopStartDumpArgs", "AclopStopDumpArgs")}
    for name, value in provided.items():
        setattr(module, name, value)
    return module


def _needs_device(name: str) -> Callable[..., NoReturn]:
    def refuse(*args: object) -> NoReturn:
        raise RuntimeError(f"TorchAir's {name} needs an NPU and CANN; this is a stand-in on the CPU.")

    return refuse


def _graph_base(record: StandIn) -> type:
    before = {number: signal.getsignal(number) for number in _SIGNALS}

    class TorchNpuGraphBase:
        def __init_subclass__(cls) -> None:
            super().__init_subclass__()
            # TorchAir derives its graph at the end of the file that installs the hook and the handlers.
            _leave_process_alone(cls.__module__, before)

        def __init__(self, name: str = "") -> None:
            self._name = name
            self._loaded: LoadedGraph | None = None

        def load(
            self,
            serialized: bytes,
            options: Mapping[str, str],
            input_placements: Sequence[int],
            output_dtypes: Sequence[int],
            executor_type: int,
        ) -> None:
            self._loaded = LoadedGraph(
                name=self._name,
                serialized=bytes(serialized),
                options=dict(options),
                input_placements=tuple(input_placements),
                output_dtypes=tuple(output_dtypes),
                executor_type=executor_type,
            )
            record.graphs.append(self._loaded)

        def set_hint_shape(self, inputs: object, outputs: object) -> None:
            """Sizes of memory to expect; nothing here depends on them."""

        def compile(self) -> None:
            self._graph().compiled += 1

        def auto_tune(self, arguments: object) -> NoReturn:
            _needs_device("auto_tune")()

        def run(self, arguments: tuple[Sequence[Tensor], Sequence[Tensor | None], object]) -> list[Tensor]:
            inputs, assigned, _ = arguments
            loaded = self._graph()
            outputs = run(loaded.graph, inputs, assigned)
            position = {id(x): index for index, x in enumerate(inputs)}
            written = {index: position.get(id(x)) for index, x in enumerate(assigned) if x is not None}
            loaded.ref_outputs = {output: given for output, given in written.items() if given is not None}
            loaded.runs += 1
            return outputs

        def _graph(self) -> LoadedGraph:
            if self._loaded is None:
                raise RuntimeError(f"{self._name}: expected a loaded graph; load it first.")
            return self._loaded

    return TorchNpuGraphBase


def _leave_process_alone(backend: str, before: Mapping[signal.Signals, Any]) -> None:
    """Take out the hook and the handlers of TorchAir's import: there is no device to shut down."""
    module: Any = sys.modules[backend]
    atexit.unregister(module.finalize_graph_engine)
    for number, handler in before.items():
        if getattr(signal.getsignal(number), "__module__", None) == backend:
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _define_placeholders(folder: Path) -> tuple[str, ...]:
    """Define what an older TorchAir registers converters for and this torch has no more, such as overloads of names.

    The file of the converters of ``sum`` also registers one for ``sum.dim_DimnameList``; where there is no such
    overload, TorchAir goes without the whole file, and so without ``sum``.
    """
    defined = []
    library = torch.library.Library("aten", "FRAGMENT")
    sources = [path.read_text(encoding="utf-8") for path in sorted(folder.glob("torchair/_ge_concrete_graph/**/*.py"))]
    pattern = re.compile(r"register_fx_node_ge_converter\(torch\.ops\.aten\.(\w+)\.(\w+)\)")
    for name, overload in sorted({pair for source in sources for pair in pattern.findall(source)}):
        try:
            there = hasattr(getattr(torch.ops.aten, name), overload)
        except AttributeError:
            there = False
        if not there:
            # No call matches this schema by chance.
            library.define(f"{name}.{overload}(str placeholder) -> ()")
            defined.append(f"aten.{name}.{overload}")
    _KEPT.append(library)
    if any("import hint_int" in source for source in sources) and not any("optimization_hint" in s for s in sources):
        symbols: Any = importlib.import_module("torch.fx.experimental.symbolic_shapes")
        if not hasattr(symbols, "hint_int"):
            symbols.hint_int = symbols.optimization_hint  # what TorchAir takes for it from 2.11 on
            defined.append("symbolic_shapes.hint_int")
    return tuple(defined)
