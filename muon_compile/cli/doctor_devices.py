"""What doctor looks at of devices, and of what drives them: backends, Triton, process groups."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from muon_compile.cli.findings import Finding, note, ok, problem

# What a CPU's speed on bfloat16 products depends on, as Linux names it.
_FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
_LIMITS = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA")
# Compute capability that Triton needs. Source: torch._inductor, GPUTooOldForTriton.
_OLDEST_GPU = (7, 0)
_GPU_NODES, _NPU_NODES = "nvidia[0-9]*", "davinci[0-9]*"
_CANN = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME", "ASCEND_OPP_PATH")


def processor() -> Iterator[Finding]:
    """The CPU's instructions, and what holds them back."""
    import torch

    from muon_compile.kernels import cpu

    features = [name for name in _FEATURES if name in cpu.cpu_flags()]
    found = f"{platform.machine()}, {', '.join(features) or 'no vector instructions known here'}"
    found += f"; torch uses {torch.backends.cpu.get_cpu_capability()}"
    limits = [f"{name}={os.environ[name]}" for name in _LIMITS if os.environ.get(name)]
    if limits:
        yield note("CPU", f"{found}; held back by {', '.join(limits)}", f"unset {' '.join(_LIMITS)} to use all of it")
    elif platform.machine() == "x86_64" and not {"avx512_bf16", "amx_bf16"} & set(features):
        todo = "on this CPU take MuonConfig(ns_dtype='auto') or 'float32'"
        yield note("CPU", f"{found}. It has no bfloat16 instructions, so bfloat16 products are emulated, slowly", todo)
    else:
        yield ok("CPU", found)


def gpus() -> Iterator[Finding]:
    """NVIDIA and AMD GPUs, and whether torch can use them."""
    import torch

    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {hip}" if (hip := torch.version.hip) else ""
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            about = torch.cuda.get_device_properties(index)
            capability = (about.major, about.minor)
            text = f"cuda:{index}: {about.name}, {about.total_memory / 2**30:,.0f} GiB, "
            text += f"capability {about.major}.{about.minor}"
            if torch.version.cuda and capability < _OLDEST_GPU:
                todo = "take backend='aot_eager' on it, or a newer GPU"
                yield problem("GPUs", f"{text}; Inductor needs 7.0 or newer", todo)
            else:
                yield ok("GPUs", f"{text}, {built}")
    elif not _nodes(_GPU_NODES):
        yield ok("GPUs", f"none here; this torch is built for {built or 'the CPU alone'}")
    elif built:
        todo = (
            "compare the driver with nvidia-smi, and see CUDA_VISIBLE_DEVICES; this torch needs a driver for " + built
        )
        yield problem("GPUs", "there is one, and torch cannot use it", todo)
    else:
        todo = "install a build of torch for CUDA (pytorch.org, Get Started), or stay on the CPU"
        yield note("GPUs", "there is one, and this torch is built for the CPU alone", todo)


def npus() -> Iterator[Finding]:
    """Ascend NPUs, and what drives them."""
    here = _nodes(_NPU_NODES)
    missing = _torchair_lacks()
    if not here:
        yield ok("NPUs", "none here")
    elif missing:
        packages = [name for name in missing if name != "CANN"]
        steps = [f"pip install {' '.join(packages)}"] if packages else []
        steps += ["install CANN and source its set_env.sh before Python starts"] if "CANN" in missing else []
        todo = "; ".join(steps)
        yield problem("NPUs", f"{len(here)} here, and missing for them: {', '.join(missing)}", todo)
    elif failed := _import_failure("torch_npu, torchair"):
        todo = "source CANN's set_env.sh before Python starts; take the torch_npu that is for this torch and CANN"
        yield problem("NPUs", f"{len(here)} here, and importing torch_npu and torchair fails: {failed}", todo)
    else:
        yield ok("NPUs", f"{len(here)} here, torch_npu {_version('torch_npu')}")


def _nodes(pattern: str) -> list[Path]:
    return sorted(Path("/dev").glob(pattern))


def _torchair_lacks() -> list[str]:
    """What TorchAir needs and is not here."""
    packages = {"torch_npu": "torch-npu", "google.protobuf": "protobuf", "packaging": "packaging"}
    missing = [package for module, package in packages.items() if not _is_here(module)]
    if not any(Path(os.environ[name]).is_dir() for name in _CANN if os.environ.get(name)):
        missing.append("CANN")
    return missing


def _is_here(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of a package above it
        return False


def _import_failure(modules: str) -> str:
    """Last line of what importing says, in a process of its own: it may end it, and installs signal handlers."""
    command = [sys.executable, "-c", f"import {modules}"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    except subprocess.TimeoutExpired:
        return "it takes longer than 3 minutes"
    return "" if told.returncode == 0 else (told.stderr.splitlines() or [f"exit code {told.returncode}"])[-1]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def triton() -> Iterator[Finding]:
    """Triton, in which Inductor's code for GPUs is."""
    import torch

    found = _version("triton") if _is_here("triton") else ""
    if found:
        yield ok("Triton", found)
    elif torch.cuda.is_available():
        todo = "pip install triton, of the version that this torch asks for (pip show torch)"
        yield problem("Triton", "missing; Inductor's code for GPUs is written in it", todo)
    else:
        yield ok("Triton", "not installed, and needed on GPUs alone")


def backends() -> Iterator[Finding]:
    """What can compile a step."""
    from muon_compile.lower.compiled import CompileError
    from muon_compile.lower.inductor import check_compiler

    try:
        check_compiler()
    except CompileError as error:
        todo = "see the C++ compiler; CXX has to name one program, without arguments; or pass backend='aot_eager'"
        yield problem("inductor", f"not for the CPU: {str(error.__cause__ or error).splitlines()[0]}", todo)
    else:
        yield ok("inductor", "available")
    yield ok("aot_eager", "available; it needs nothing")
    missing = _torchair_lacks()
    if missing:
        yield ok("torchair", f"not available, and needed on Ascend NPUs alone: no {', no '.join(missing)}")
    else:
        yield ok("torchair", f"torch_npu {_version('torch_npu')} and CANN are here")


def process_groups() -> Iterator[Finding]:
    """What ranks can talk through. Of gloo, a group of one rank is made."""
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        yield note("process groups", "this torch is built without torch.distributed: one process, no sharding")
        return
    if dist.is_gloo_available():
        from torch._C._distributed_c10d import HashStore

        try:
            dist.ProcessGroupGloo(HashStore(), 0, 1, timedelta(seconds=10))
        except RuntimeError as error:
            todo = "make the host's name resolvable, or set GLOO_SOCKET_IFNAME to a network interface (ip link)"
            reason = re.sub(r"^\[enforce fail at [^\]]*\]\s*", "", str(error)).splitlines()[0]
            yield problem("gloo", f"makes no group: {reason}", todo)
        else:
            yield ok("gloo", "makes a group of one rank")
    else:
        yield problem("gloo", "this torch is built without it", "install a build of torch that has it")
    if dist.is_nccl_available():
        yield ok(
            "nccl", ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "in this torch"
        )
    elif torch.cuda.is_available():
        yield problem("nccl", "this torch is built without it", "install a build of torch that has it")
    else:
        yield ok("nccl", "not in this torch, and needed on GPUs alone")
    if hasattr(dist.Backend, "HCCL") or "hccl" in dist.Backend.backend_list:
        yield ok("hccl", "available")
    elif _nodes(_NPU_NODES):
        todo = "import torch_npu registers it; see NPUs above"
        yield problem("hccl", "not available, and there are NPUs", todo)
    else:
        yield ok("hccl", "not available, and needed on Ascend NPUs alone")
