"""TorchAir: Ascend NPUs. The only file that imports torch_npu and torchair, and only when a step needs them.

The traced step goes through AOTAutograd, which makes it functional, and TorchAir's converters, which make it one static
GE graph: one launch per step, collectives included. The graph is then held against the plan's promises before it runs.
"""

from __future__ import annotations

import importlib.util
import logging
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import ProcessGroup
from torch.fx import GraphModule

from muon_compile.lower.compiled import CompiledGraph, CompileError
from muon_compile.lower.cut_inputs import Cut, cut_inputs
from muon_compile.lower.functional import functionalize
from muon_compile.lower.torchair_options import ONCE, VERSIONS, compiler_config
from muon_compile.lower.trace import TracedStep
from muon_compile.npu import stand_in
from muon_compile.npu.graph import GeGraph, parse
from muon_compile.spec import CollectiveSpec

_LOG = logging.getLogger("muon_compile")

# The functional collectives' names by GE's.
_KINDS: Mapping[str, str] = {
    "HcomAllGather": "all_gather_into_tensor",
    "HcomReduceScatter": "reduce_scatter_tensor",
    "HcomAllReduce": "all_reduce",
    "HcomBroadcast": "broadcast",
    "HcomAllToAll": "all_to_all_single",
    "HcomAllToAllV": "all_to_all_single",
}


def check_torchair(devices: Sequence[str], groups: Sequence[ProcessGroup]) -> None:
    """Refuse what TorchAir cannot compile here.

    Args:
        devices: Where parameters are.
        groups: Process groups of the step's collectives.

    Raises:
        CompileError: torch_npu, CANN, protobuf or packaging is missing; names all that is.
        ValueError: Parameters elsewhere than on NPUs, or a process group that is not of HCCL alone.
    """
    load_torchair()
    alone = stand_in.installed() is not None
    wrong = sorted({device for device in devices if device.split(":")[0] not in ("npu", *(("cpu",) if alone else ()))})
    if wrong:
        raise ValueError(
            f"backend='torchair': expected all parameters on NPUs, got some on {wrong}; move the model there first, or "
            "take backend='inductor' for them in an optimizer of their own."
        )
    for group in groups:
        backends = set(str(dist.get_backend_config(group)).split(","))
        kinds = {entry.partition(":")[2] or entry for entry in backends}
        if not alone and kinds != {"hccl"}:
            raise ValueError(
                f"backend='torchair': expected process groups of HCCL alone, got {group.group_name!r} of "
                f"{dist.get_backend_config(group)}: TorchAir takes the HCCL communicator's name from the group, and "
                "from a mixed one it takes a wrong one. Call init_process_group('hccl'), and give checkpoints on the "
                "host a gloo group of their own."
            )


def load_torchair() -> ModuleType:
    """TorchAir, imported after torch_npu; or under the stand-in for an NPU alone.

    Importing it installs handlers of SIGTERM and SIGINT, replaces some meta kernels and maps ``dist.broadcast`` and
    ``dist.all_to_all`` inside compiled functions to its own operators, for the whole process.

    Raises:
        CompileError: Something it needs is missing; names all that is.
    """
    loaded = sys.modules.get("torchair")
    if loaded is not None:
        return loaded
    alone = stand_in.installed() is not None
    needed = {"google.protobuf": "protobuf", "packaging": "packaging"} | ({} if alone else {"torch_npu": "torch_npu"})
    missing = [package for module, package in needed.items() if not _found(module)]
    if missing:
        raise CompileError(
            f"backend='torchair' needs {VERSIONS}; and protobuf (3.13 or newer) and packaging, which torch_npu does "
            f"not install by itself. Missing here: {', '.join(missing)} (torch is {torch.__version__}). On an NPU "
            f"host: pip install {' '.join(missing)}, and source CANN's set_env.sh before Python starts. Without an "
            "NPU take backend='inductor' or 'aot_eager'."
        )
    try:
        if not alone:
            import torch_npu  # noqa: F401
        import torchair
    except Exception as error:
        raise CompileError(
            f"backend='torchair' needs {VERSIONS}. Importing {'torchair' if alone else 'torch_npu and torchair'} "
            f"failed here (torch {torch.__version__}): {type(error).__name__}: {error}\nWhere a library such as "
            "libascendcl.so or libhccl.so is not found, CANN is not installed or its set_env.sh was not sourced before "
            "Python started."
        ) from error
    module: ModuleType = torchair
    return module


def check_options(options: Mapping[str, Any]) -> None:
    """Refuse options of ``torchair.CompilerConfig`` that do not exist or do not fit.

    Raises:
        CompileError: Says which, and why.
    """
    compiler_config(load_torchair().CompilerConfig(), options)


def _found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def compile_torchair(
    traced: TracedStep, promised: Sequence[CollectiveSpec], options: Mapping[str, Any], inputs: Sequence[Tensor]
) -> CompiledGraph:
    """Lower a traced step to one graph, check it, and compile it.

    Args:
        traced: The step, traced with ``PlainBoundary``.
        promised: The plan's collectives, in order.
        options: Laid over this library's options of ``torchair.CompilerConfig``, by dotted name.
        inputs: The step's inputs, for GE compiles for where they lie; fake ones: it is lowered but not compiled.

    Raises:
        CompileError: An option does not exist or does not fit, an operator has no converter, GE fails, or the lowered
            graph breaks a promise.
    """
    torchair = load_torchair()
    config = compiler_config(torchair.CompilerConfig(), options)
    mode = config.mode.value
    traced, cut = cut_inputs(traced)
    try:
        runner = _lower(torchair, traced, config)
        if mode != "max-autotune":
            return _captured(runner, cut, mode)
        graph = _checked(runner.runner, traced, promised)
        code = _dumps(runner.runner) | {"ge_operators.txt": graph.table()}
        if not any(isinstance(x, FakeTensor) for x in inputs):
            _compile_ahead(runner.runner, cut(inputs))
    except CompileError:
        raise
    except Exception as error:
        raise CompileError(_failure(error)) from error

    def run(flat: list[Tensor]) -> object:
        return runner(*cut(flat))

    frozen = bool(config.experimental_config.frozen_parameter)
    return CompiledGraph(
        run=run, code=code, backend="torchair", cached=False, fixed_addresses=frozen, any_addresses=not frozen
    )


def _lower(torchair: ModuleType, traced: TracedStep, config: Any) -> Any:
    """Through AOTAutograd and TorchAir's converters; what TorchAir made of the one graph."""
    from torchair.npu_fx_compiler import _get_merged_decompositions

    compiler = torchair.get_compiler(config)

    def compile_graph(graph: GraphModule, inputs: Sequence[Tensor]) -> Any:
        for x in inputs[: traced.spec.num_static]:
            x._torchair_is_parameter = True  # type: ignore[attr-defined]
        _scale_by_numbers(graph)
        return compiler(graph, inputs)

    table = _get_merged_decompositions(config)
    exchange = torch.ops._c10d_functional.all_to_all_single.default
    theirs = table[exchange]

    def all_to_all(x: Tensor, output_sizes: list[int], input_sizes: list[int], group: str) -> Any:
        # Theirs counts in rows of x, and where x has none it would have nothing come either. What is sent is told by
        # the counts alone.
        assert x.dim() == 1
        return theirs(x if x.numel() else x.new_zeros(1), output_sizes, input_sizes, group)

    table[exchange] = all_to_all
    return functionalize(traced, compile_graph, table)


def _scale_by_numbers(graph: GraphModule) -> None:
    """Of float32 tensors and numbers take the product that TorchAir makes one operator of; the other one adds a Cast.

    Narrower tensors keep theirs, Muls, whose factor is float32; here it would be rounded to the tensor's dtype.
    """
    for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor):
        x, factor = node.args
        if isinstance(factor, (int, float)) and x.meta["val"].dtype == node.meta["val"].dtype == torch.float32:
            node.target = torch.ops.aten.mul.Scalar
    graph.recompile()


def _checked(concrete: Any, traced: TracedStep, promised: Sequence[CollectiveSpec]) -> GeGraph:
    """The lowered graph, held against what the step promises.

    Raises:
        CompileError: It breaks a promise; a defect of this library or of TorchAir's.
    """
    graph = parse(concrete.graph.SerializeToString())
    faults = []
    if not graph.is_static():
        faults.append("it has shapes that are not static")
    inputs = [info.func.fx_input_idx for info in concrete._input_info_list]
    written = {inputs[index] for index in concrete._graph_output_ref_input.values()}
    expected = {i for i, x in enumerate(traced.inputs[: traced.spec.num_written]) if x.numel()}
    if written != expected:
        names = [traced.spec.names[i] for i in sorted(written ^ expected)]
        faults.append(f"not written in place, or not to be written: {names}")
    late = graph.hazards(concrete._graph_output_ref_input)
    if late:
        faults.append(f"operators that may read an input after it was overwritten: {late}")
    mixed = graph.mixed_dtypes() + graph.wide_dtypes()
    if mixed:
        faults.append(f"operators of mixed or of 64-bit floating dtypes: {mixed}")
    kinds = [_KINDS.get(found.kind, found.kind) for found in graph.collectives()]
    # TorchAir leaves out what gives every rank of its group nothing.
    wanted = [spec.kind for spec in promised if spec.bytes_per_rank or spec.kind == "all_to_all_single"]
    if kinds != wanted:
        faults.append(f"its collectives are {kinds}, promised were {wanted}")
    if faults:
        raise CompileError("TorchAir's graph of the step breaks a promise; please report: " + "; ".join(faults) + ".")
    return graph


def _compile_ahead(concrete: Any, inputs: Sequence[Tensor]) -> None:
    """What TorchAir does in a graph's first call, up to its run: a failure leaves everything as it was.

    Otherwise GE would compile when the step first runs, and a rank where that fails would leave the others waiting in
    a collective. These are TorchAir's own (private) names; without them its first call does it.
    """
    from torchair._ge_concrete_graph import fx2ge_converter
    from torchair.core._backend import initialize_graph_engine

    names = ("_gen_input_process", "update_graph_with_runtime", "_normalize_ge_option", "_input_info_list")
    if concrete.should_auto_tune or not all(hasattr(concrete, name) for name in names):
        _LOG.info("GE compiles the graph in its first run")
        return
    functions = [info.func for info in concrete._input_info_list]
    concrete._input_process = concrete._gen_input_process(
        concrete._fx_input_names, concrete._all_sym_input_idx, functions
    )
    concrete.update_graph_with_runtime(concrete._input_process(*inputs), inputs)
    local, in_common = concrete._normalize_ge_option()
    dump_options = fx2ge_converter._get_ge_dump_options(in_common)
    initialize_graph_engine(in_common)
    fx2ge_converter._set_dump_options_json(dump_options, concrete.graph)
    concrete.graph.load(local)
    concrete.compile()


def _dumps(concrete: Any) -> dict[str, str]:
    """The graph as TorchAir itself dumps it."""
    texts = {}
    with tempfile.TemporaryDirectory(prefix="torchair-") as folder:
        for kind in ("pbtxt", "py"):
            path = Path(folder) / f"ge_graph.{kind}"
            concrete.dump(str(path))
            texts[path.name] = path.read_text(encoding="utf-8")
    return texts


def _captured(runner: Any, cut: Cut, mode: str) -> CompiledGraph:
    """A graph of the modes that record eager kernels: no GE graph, and addresses that must stay."""

    def run(flat: list[Tensor]) -> object:
        return runner(*cut(flat))

    code = {"aclgraph.py": runner.runner.fx_graph.print_readable(print_output=False)}
    return CompiledGraph(
        run=run, code=code, backend=f"torchair ({mode})", cached=False, fixed_addresses=True, any_addresses=False
    )


def _failure(error: Exception) -> str:
    text = str(error).strip()
    first = text.splitlines()[0] if text else ""
    where = re.search(r"While executing (%\S+ : .*|%\S+ = .*)", text)
    if "twice initialtion" in text or "subset of _GLOBAL_COMPILE_OPTION" in text:
        return (
            f"torchair_options: {', '.join(ONCE)} hold for the whole process, since GE is initialized once in it, and "
            "an earlier graph was compiled with others. Give every step of the process the same. TorchAir says: "
            f"{first}"
        )
    return (
        f"TorchAir failed to compile the step (torch {torch.__version__}): {type(error).__name__}: {first}"
        + (f"\nAt: {where[1]}" if where else "")
        + "\nNothing has changed. backend='aot_eager' runs the graph uncompiled; please report the graph that "
        "compile_step(..., backend='aot_eager') dumps."
    )
