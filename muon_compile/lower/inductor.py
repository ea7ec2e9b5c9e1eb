"""Inductor: CPU and GPU. The only file that knows Inductor's entry points.

The traced graph is flat, free of autograd and already in place, so it goes straight to ``compile_fx_inner``, Inductor's
own (private) entry, which costs about half of ``torch.compile``. ``standalone`` is the documented way round.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import logging
import os
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from muon_compile.lower.check import found_collectives
from muon_compile.lower.compiled import CompiledGraph, CompileError
from muon_compile.lower.trace import TracedStep

_LOG = logging.getLogger(__name__)

# Inputs are checked before the call; collectives (later) keep the traced order on every rank: Inductor's reordering is
# decided per graph, and ranks whose graphs differ would deadlock.
_OPTIONS: dict[str, Any] = {
    "size_asserts": False,
    # Round where the traced operators round, as eager does, instead of keeping float32 through a fused chain.
    "emulate_precision_casts": True,
    "reorder_for_compute_comm_overlap": False,
    "bucket_all_gathers_fx": "none",
    "bucket_reduce_scatters_fx": "none",
    "bucket_all_reduces_fx": "none",
    "aten_distributed_optimizations.enable_overlap_scheduling": False,
    # A phase of the step is one C++ file however many buckets it has: g++ spends its time on files, not on loops.
    "cpp.max_horizontal_fusion_size": 64,
}


_LIB = torch.library.Library("muon_compile", "FRAGMENT")
_LIB.define("fence_(Tensor(a!) x) -> ()")


def _fence(x: Tensor) -> None:
    """Nothing: what comes before it and what comes after it are different kernels."""


_LIB.impl("fence_", _fence, "CompositeExplicitAutograd")
torch.library.register_fake("muon_compile::fence_", _fence, lib=_LIB)


def _fenced(x: Tensor) -> Tensor:
    """Keep a reduction over ``x`` out of the kernel that makes ``x``.

    torch 2.13's C++ backend fails (KeyError in LoopBody.get_read_expr) where a reduction shares its outer loop with the
    in-place write of a momentum that has per-matrix hyperparameters.
    """
    if x.device.type == "cpu":
        torch.ops.muon_compile.fence_(x)
    return x


def _matrix_amax(x: Tensor) -> Tensor:
    return _fenced(x).abs().amax(dim=(-2, -1), keepdim=True)


def _matrix_norm(x: Tensor) -> Tensor:
    x = _fenced(x)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * wide).sum(dim=(-2, -1), keepdim=True).sqrt().to(x.dtype)


def _row_squares(x: Tensor) -> Any:
    if x.device.type == "cpu":
        return NotImplemented  # an operator of its own, for the reason above
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * wide).sum(dim=list(range(1, x.dim()))) if x.dim() > 1 else wide * wide


def _squared_error(x: Tensor, signs: Tensor, native: bool) -> Any:
    if x.device.type == "cpu":
        return NotImplemented
    x = (x if x.shape[-2] <= x.shape[-1] else x.mT).to(torch.promote_types(x.dtype, torch.float32))
    v = signs[:, None].to(x.dtype)
    once = (x * v).sum(dim=1, keepdim=True)
    left = (x * once).sum(dim=2, keepdim=True) - v
    return (left * left).sum(dim=[1, 2]) / v.shape[0]


@functools.lru_cache(maxsize=1)
def operators_fingerprint() -> bytes:
    """Hash of the files that define this library's operators.

    Inductor's cache key has an operator's name, not what it does or how it lays its result out. Without this an upgrade
    of the library would run kernels that were compiled for the operators of before.
    """
    root = Path(__file__).parent.parent
    digest = hashlib.sha256()
    kernels = sorted((root / "kernels").glob("*"))
    names = ("build/opaque.py", "build/native_ops.py", "build/symmetric.py", "build/probe_ops.py")
    named = [root / name for name in names]
    for path in (*named, root / "lower/boundary.py", Path(__file__), *kernels):
        if path.is_file():
            digest.update(path.read_bytes())
    return digest.digest()


def _key_pass() -> Any:
    """A graph pass that changes nothing and puts the fingerprint into Inductor's cache key."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class KeyPass(CustomGraphPass):
        def __call__(self, graph: Any) -> None:
            return None

        def uuid(self) -> bytes:
            return operators_fingerprint()

    return KeyPass()


def decompositions() -> Mapping[Any, Any]:
    """Inductor's own decomposition table, and this library's operators that it can fuse."""
    from torch._inductor.decomposition import select_decomp_table

    operators = torch.ops.muon_compile
    own = {
        operators.matrix_norm.default: _matrix_norm,
        operators.matrix_amax.default: _matrix_amax,
        operators.row_squares.default: _row_squares,
        operators.squared_error.default: _squared_error,
    }
    return {**select_decomp_table(), **own}


def check_compiler() -> None:
    """Find the C++ compiler that Inductor will use for CPU code.

    Raises:
        CompileError: There is none.
    """
    from torch._inductor import exc
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except (exc.InvalidCxxCompiler, RuntimeError) as error:
        raise CompileError(
            "Inductor compiles the step's CPU code with a C++ compiler, and none was found (looked for CXX and g++). "
            "Install one (Debian, Ubuntu: apt-get install g++; macOS: xcode-select --install; conda: "
            "conda install gxx), or pass backend='aot_eager', which needs none and runs the same graph uncompiled."
        ) from error


@functools.lru_cache(maxsize=1)
def _trusted_vector_compiler() -> bool:
    """Whether the compiler surely knows this CPU's vector extensions, so that Inductor need not try each (seconds)."""
    if platform.machine() not in ("x86_64", "AMD64") or not Path("/proc/cpuinfo").exists():
        return False
    from torch._inductor.cpp_builder import get_cpp_compiler

    cxx = get_cpp_compiler()
    try:
        text = subprocess.run([cxx, "--version"], capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return False
    version = re.search(r"\b(\d+)\.\d+\.\d+", text)
    is_gcc = "Free Software Foundation" in text
    # GCC 11 knows AMX and AVX512-BF16, GCC 13 AMX-FP16: gcc.gnu.org/gcc-11/changes.html, gcc-13/changes.html.
    newest = 13 if "amx_fp16" in Path("/proc/cpuinfo").read_text() else 11
    return is_gcc and version is not None and int(version[1]) >= newest


def _options(inputs: tuple[Tensor, ...], given: Mapping[str, Any], cuda_graphs: bool) -> dict[str, Any]:
    options = dict(_OPTIONS)
    # The fingerprint takes a place that the user has left free: without it the cache key is incomplete.
    places = ("post_grad_custom_pre_pass", "post_grad_custom_post_pass")
    free = [name for name in places if name not in given]
    if not free:
        raise CompileError(
            f"inductor_options: expected at most one of {places}, got both; this library needs the other."
        )
    options[free[0]] = _key_pass()
    devices = {x.device.type for x in inputs}
    if "cpu" in devices and "TORCHINDUCTOR_VEC_ISA_OK" not in os.environ and _trusted_vector_compiler():
        options["cpp.vec_isa_ok"] = True
    if devices == {"cuda"}:
        options["triton.cudagraphs"] = cuda_graphs
    options.update(given)
    return options


def compile_inductor(traced: TracedStep, *, route: str, options: Mapping[str, Any], cuda_graphs: bool) -> CompiledGraph:
    """Compile a traced step.

    Args:
        traced: The step.
        route: ``"inner"`` or ``"standalone"``.
        options: Laid over this library's options of ``torch._inductor.config``.
        cuda_graphs: Replay as one CUDA graph where every input is on CUDA.

    Raises:
        CompileError: There is no C++ compiler, an option does not exist, or Inductor itself fails.
    """
    from torch._dynamo.utils import counters
    from torch._inductor import config

    if any(x.device.type == "cpu" for x in traced.inputs):
        check_compiler()
    merged = _options(traced.inputs, options, cuda_graphs)
    hits = counters["inductor"]["fxgraph_cache_hit"]
    compile_route = _inner if route == "inner" else _standalone
    unknown = [name for name in merged if not _has_option(config, name)]
    if unknown:
        raise CompileError(f"inductor_options: expected names of torch._inductor.config, got {unknown}.")
    try:
        with config.patch(merged), torch.no_grad():
            run, code = compile_route(traced, bool(merged.get("triton.cudagraphs")))
    except Exception as error:
        raise CompileError(
            f"Inductor failed to compile the step (torch {torch.__version__}, route {route!r}): "
            f"{type(error).__name__}: {error}\nNothing has changed. backend='aot_eager' runs the graph uncompiled; "
            "CompileConfig(inductor_route='standalone') takes another way into Inductor; please report the graph "
            "that compile_step(..., backend='aot_eager') dumps."
        ) from error
    _check_order(traced, "\n".join(code.values()))
    cached = counters["inductor"]["fxgraph_cache_hit"] > hits
    replays = bool(merged.get("triton.cudagraphs"))
    return CompiledGraph(run=run, code=code, backend=f"inductor ({route})", cached=cached, any_addresses=not replays)


def compile_function(graph: GraphModule, inputs: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """Compile a graph of somebody's function that the step is a part of, as ``torch.compile`` would."""
    from torch._inductor.compile_fx import compile_fx

    tensors = tuple(x for x in inputs if isinstance(x, Tensor))
    return compile_fx(graph, list(inputs), config_patches=_options(tensors, options, cuda_graphs=False))


def _check_order(traced: TracedStep, code: str) -> None:
    """Hold the order of collectives after Inductor's scheduling against the traced one.

    Raises:
        CompileError: They differ; ranks whose graphs differ might then wait for each other for ever.
    """
    traced_kinds = found_collectives(traced)
    if not traced_kinds or not code:
        return
    calls = re.findall(r"torch\.ops\._c10d_functional\.(\w+)\.default\(", code)
    kinds = [re.sub(r"(_out|_)$", "", call) for call in calls if not call.startswith("wait_tensor")]
    if kinds != traced_kinds:
        raise CompileError(
            f"Inductor moved the step's collectives: expected {traced_kinds}, got {kinds}. An option of "
            "inductor_options reorders communication; leave it out."
        )


def _has_option(config: Any, name: str) -> bool:
    for part in name.split("."):
        if not hasattr(config, part):
            return False
        config = getattr(config, part)
    return True


def _inner(traced: TracedStep, cuda_graphs: bool) -> tuple[Any, dict[str, str]]:
    from torch._guards import TracingContext, tracing
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.utils import BoxedBool
    from torch._inductor.virtualized import V

    # Inductor rewrites what it compiles; the traced graph stays as it was, for checks and dumps.
    graph = GraphModule(traced.graph, copy.deepcopy(traced.graph.graph))
    kwargs: dict[str, Any] = {
        "static_input_idxs": range(traced.spec.num_static),
        "is_inference": True,
        "cudagraphs": BoxedBool(cuda_graphs),
    }
    if cuda_graphs:
        from torch._inductor.cudagraph_utils import BoxedDeviceIndex

        kwargs["boxed_forward_device_index"] = BoxedDeviceIndex(traced.inputs[0].device.index or 0)
    with tracing(TracingContext(traced.fake_mode)), V.set_fake_mode(traced.fake_mode):
        compiled = compile_fx_inner(graph, list(traced.inputs), **kwargs)
    code = getattr(compiled, "source_code", "")
    return compiled, {"output_code.py": code} if isinstance(code, str) and code else {}


def _standalone(traced: TracedStep, cuda_graphs: bool) -> tuple[Any, dict[str, str]]:
    from torch._inductor import standalone_compile

    graph = GraphModule(traced.graph, copy.deepcopy(traced.graph.graph))
    artifact = standalone_compile(graph, list(traced.inputs), dynamic_shapes="from_graph")

    def run(inputs: list[Tensor]) -> object:
        return artifact(*inputs)

    return run, {}
