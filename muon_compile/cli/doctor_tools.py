"""What doctor looks at of the software that compiles: Python, torch, g++, OpenMP, this library's CPU kernels."""

from __future__ import annotations

import importlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from muon_compile.cli.findings import Finding, note, ok, problem

# Source: dependencies of pyproject.toml; a test compares them.
TORCH_FROM, TORCH_BELOW = (2, 10), (2, 15)
_RANGE = f"torch>={TORCH_FROM[0]}.{TORCH_FROM[1]},<{TORCH_BELOW[0]}.{TORCH_BELOW[1]}"

_INSTALL = (
    "install GNU g++ (Debian, Ubuntu: apt-get install g++; Fedora: dnf install gcc-c++; conda: conda install gxx; "
    "macOS: xcode-select --install), or pass backend='aot_eager', which needs none"
)
_PROGRAM = "#include <omp.h>\nint main() { return omp_get_max_threads() < 1; }\n"
_PROGRAM_ALONE = "#include <cmath>\nint main() { return 0; }\n"
# Runtimes that a process should have one of, by what their files are called.
RUNTIMES = {"libgomp": "GNU", "libiomp": "Intel", "libomp": "LLVM"}


def python() -> Iterator[Finding]:
    """Python and the system."""
    found = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    if platform.system() == "Linux":
        yield ok("Python", found)
    else:
        yield note("Python", found, "this library is tested on Linux alone; muon-compile verify checks a step here")


def torch_version() -> Iterator[Finding]:
    """torch, and whether this library knows its version."""
    try:
        version = str(importlib.import_module("torch").__version__)
    except Exception as error:  # whatever a broken installation raises
        yield problem("torch", f"cannot be imported: {type(error).__name__}: {error}", f"pip install '{_RANGE}'")
        return
    known = re.match(r"(\d+)\.(\d+)", version)
    if known is not None and TORCH_FROM <= (int(known[1]), int(known[2])) < TORCH_BELOW:
        yield ok("torch", version)
    else:
        yield problem("torch", f"{version}; this library knows {_RANGE}", f"pip install '{_RANGE}'")


def compiler() -> Iterator[Finding]:
    """The C++ compiler, tried on a program that uses OpenMP."""
    command = shlex.split(os.environ.get("CXX") or "g++")
    source = "CXX" if os.environ.get("CXX") else "PATH"
    where = shutil.which(command[0])
    if where is None:
        yield problem("C++ compiler", f"{command[0]!r} was not found (by {source})", _INSTALL)
        return
    failed = _failure([*command, "-fopenmp"], _PROGRAM)
    if failed and _failure(command, _PROGRAM_ALONE):
        yield problem("C++ compiler", f"{where} (by {source}) compiles no program: {failed}", _INSTALL)
        return
    yield ok("C++ compiler", f"{where} (by {source}), {_version(command)}")
    if failed:
        todo = "install its OpenMP (g++ has it: Debian, Ubuntu: apt-get install g++; clang: apt-get install libomp-dev)"
        yield problem("OpenMP", f"{where} compiles and runs no program with -fopenmp: {failed}", todo)
    else:
        yield ok("OpenMP", "a program with -fopenmp compiles and runs")


def _version(command: Sequence[str]) -> str:
    told = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=60, check=False).stdout
    return told.splitlines()[0] if told else "which tells no version"


def _failure(command: Sequence[str], program: str) -> str:
    """Why a program does not compile or run; empty where it does."""
    with tempfile.TemporaryDirectory(prefix="muon_compile-doctor-") as folder:
        source, made = Path(folder) / "program.cpp", Path(folder) / "program"
        source.write_text(program, encoding="utf-8")
        for each in ([*command, str(source), "-o", str(made)], [str(made)]):
            try:
                subprocess.run(each, capture_output=True, text=True, timeout=120, check=True)
            except subprocess.CalledProcessError as error:
                lines = [line for line in error.stderr.splitlines() if line.strip()]
                last = lines[-1] if lines else str(error)
                return next((line for line in lines if "error" in line), last)
            except (OSError, subprocess.SubprocessError) as error:
                return str(error)
    return ""


def python_headers() -> Iterator[Finding]:
    """Python.h, which Inductor's code for the CPU includes."""
    path = Path(sysconfig.get_path("include")) / "Python.h"
    if path.exists():
        yield ok("Python headers", str(path))
    else:
        todo = f"install them (Debian, Ubuntu: apt-get install python{sys.version_info[0]}.{sys.version_info[1]}-dev)"
        yield problem("Python headers", f"{path} is missing; Inductor's code for the CPU includes it", todo)


def openmp() -> Iterator[Finding]:
    """The OpenMP runtimes in this process once torch is."""
    importlib.import_module("torch")
    loaded = loaded_libraries()
    found = {path for path in loaded if Path(path).name.startswith(tuple(RUNTIMES))}
    kinds = sorted({RUNTIMES[name] for name in RUNTIMES for path in found if Path(path).name.startswith(name)})
    if not kinds:
        yield note("OpenMP runtime", "torch has loaded none that is known here, so it may run on one thread")
    elif len(kinds) == 1:
        yield ok("OpenMP runtime", f"{kinds[0]}: {', '.join(sorted(found))}")
    else:
        todo = "find what loads the other one (LD_PRELOAD, a sitecustomize, another package) and leave it out"
        yield note("OpenMP runtime", f"{' and '.join(kinds)} at once, which compete for CPUs: {sorted(found)}", todo)


def loaded_libraries() -> list[str]:
    """Paths of the files that are mapped into this process; none where the system does not tell."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    return list(dict.fromkeys(line.split(maxsplit=5)[5] for line in lines if line.count("/")))


def kernels() -> Iterator[Finding]:
    """This library's CPU kernels, which are compiled if need be."""
    from muon_compile.kernels import cpu

    reason = cpu.why_not()
    if reason is None:
        yield ok("CPU kernels", f"in use, with {cpu.isa()}")
    elif reason.startswith("compiling or loading them failed"):
        yield problem("CPU kernels", reason, "the step runs on torch's operators; get g++ right to have them back")
    else:
        yield note("CPU kernels", f"not in use, the step runs on torch's operators: {reason}")
