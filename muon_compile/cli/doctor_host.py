"""What doctor looks at of the machine and the process: threads, allocator, caches, disks, environment."""

from __future__ import annotations

import difflib
import math
import os
import platform
import re
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from muon_compile.cli.doctor_tools import loaded_libraries
from muon_compile.cli.findings import Finding, note, ok, problem

# Allocators that replace glibc's, by what their files are called.
_ALLOCATORS = ("jemalloc", "tcmalloc", "mimalloc", "tbbmalloc_proxy")
_LEAST_FREE, _ENOUGH_FREE = 2**30, 5 * 2**30
# How long a cache's files are counted.
_COUNT_SECONDS = 2.0

# This library's variables; a test compares them with its files.
VARIABLES = (
    "MUON_COMPILE_CACHE_DIR",
    "MUON_COMPILE_CPU_ISA",
    "MUON_COMPILE_HARDWARE",
    "MUON_COMPILE_NATIVE",
    "MUON_COMPILE_PROGRESS",
    "MUON_COMPILE_TUNE_SYMMETRIC",
)
_VALUES = {
    "MUON_COMPILE_CPU_ISA": ("avx512_bf16",),
    "MUON_COMPILE_NATIVE": ("0", "1"),
    "MUON_COMPILE_PROGRESS": ("0", "1"),
    "MUON_COMPILE_TUNE_SYMMETRIC": ("0", "1"),
}
# Where torch reads TORCHINDUCTOR_ variables.
_READERS = ("_inductor", "_dynamo", "_functorch", "utils", "testing", "distributed")


# -- threads --------------------------------------------------------------------------------------------------------


def threads() -> Iterator[Finding]:
    """Threads of torch against the CPUs that this process and the ranks beside it may use."""
    import torch

    num_threads, (cpus, limits) = torch.get_num_threads(), usable_cpus()
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    share = max(1, cpus // ranks)
    given = os.environ.get("OMP_NUM_THREADS")
    found = f"{num_threads} in torch (OMP_NUM_THREADS {f'is {given}' if given else 'is not set'}), {limits}"
    found += f", {ranks} ranks here" if ranks > 1 else ""
    todo = f"export OMP_NUM_THREADS={share}"
    if num_threads > share:
        yield problem("threads", f"{found}: more threads than CPUs wait for each other", todo)
    elif ranks > cpus:
        yield note("threads", f"{found}: ranks take turns", f"start at most {cpus} ranks on this machine")
    elif 2 * num_threads < share:  # torch leaves a core's second thread alone
        yield note("threads", f"{found}: CPUs stay idle", todo)
    else:
        yield ok("threads", found)


def usable_cpus() -> tuple[int, str]:
    """CPUs that this process may use, and in words what limits them."""
    here = os.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else here
    quota = cgroup_cpus()
    words = [f"{here} CPUs"]
    if allowed < here:
        words.append(f"affinity allows {allowed}")
    if quota is not None:
        words.append(f"cgroup allows {quota:g}")
    return min(allowed, here if quota is None else max(1, math.ceil(quota))), ", ".join(words)


def cgroup_cpus(root: Path = Path("/")) -> float | None:
    """CPUs that the cgroups of this process, and those above them, allow; None: as many as there are.

    Source: Linux, Documentation: cgroup-v2, cpu.max; scheduler/sched-bwc, cpu.cfs_quota_us.
    """
    quotas = []
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        # Inside a container the path may be the host's, where only the root of it is to be seen.
        folders = [path.strip("/"), *(str(folder) for folder in Path(path.strip("/")).parents)]
        for mount in ("", "unified") if not controllers else (controllers, "cpu"):
            for folder in dict.fromkeys(folders):
                at = root / "sys/fs/cgroup" / mount / folder
                found = (_read(at / "cpu.max") or "").split()
                found = found or [_read(at / f"cpu.cfs_{name}_us") or "" for name in ("quota", "period")]
                if len(found) == 2 and all(text.strip().isdecimal() for text in found):
                    quotas.append(int(found[0]) / int(found[1]))
    return min(quotas, default=None)


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return None


# -- allocator ------------------------------------------------------------------------------------------------------


def allocator() -> Iterator[Finding]:
    """Which malloc serves the step's temporaries."""
    preloaded = [path for path in re.split(r"[ :]+", os.environ.get("LD_PRELOAD", "")) if path]
    missing = [path for path in preloaded if os.sep in path and not Path(path).exists()]
    if missing:
        todo = "correct LD_PRELOAD; the loader goes on without what it does not find"
        yield problem("allocator", f"LD_PRELOAD names files that are not there: {', '.join(missing)}", todo)
    loaded = [*preloaded, *loaded_libraries()]
    others = [name for name in _ALLOCATORS if any(name in Path(path).name for path in loaded)]
    settings = [
        f"{name}={os.environ[name]}" for name in sorted(os.environ) if name.startswith(("MALLOC_", "GLIBC_TUN"))
    ]
    tuned = f", with {', '.join(settings)}" if settings else ""
    if others:
        todo = "CompileConfig(keep_memory=) has no effect on it; it keeps freed memory as its own settings say"
        yield note("allocator", f"{', '.join(others)} in place of the C library's{tuned}", todo)
    elif platform.system() == "Linux" and platform.libc_ver()[0] != "glibc":
        todo = "every step may page-fault its temporaries anew; preload jemalloc where that is slow"
        yield note("allocator", "a C library other than glibc, so that keep_memory has no effect", todo)
    else:
        yield ok("allocator", f"{' '.join(platform.libc_ver()) or platform.system()}{tuned}")


# -- caches and disks -----------------------------------------------------------------------------------------------


def cache_folders() -> dict[str, tuple[Path, str]]:
    """The folders of compiled code, and the variables that name others."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    from muon_compile.kernels.cache import _named_dir

    inductor = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or default_cache_dir()
    return {
        "cache, muon_compile": (_named_dir(), "MUON_COMPILE_CACHE_DIR"),
        "cache, Inductor": (Path(inductor).absolute(), "TORCHINDUCTOR_CACHE_DIR"),
    }


def caches() -> Iterator[Finding]:
    """Where compiled code is kept, and who may write there: it is executed."""
    from torch._inductor import config

    for check, (folder, variable) in cache_folders().items():
        yield _cache(check, folder, f"set {variable} to a folder that only you can write to")
    if config.force_disable_caches or not config.fx_graph_cache:
        todo = "unset TORCHINDUCTOR_FORCE_DISABLE_CACHES and TORCHINDUCTOR_FX_GRAPH_CACHE to start fast again"
        yield note("cache, Inductor", "switched off: every start compiles anew", todo)


def _cache(check: str, folder: Path, elsewhere: str) -> Finding:
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        return problem(check, f"{folder}: {existing} is no folder that can be written to", elsewhere)
    if existing != folder:
        return ok(check, f"{folder}, made when it is needed")
    about = folder.stat()
    mode = stat.S_IMODE(about.st_mode)
    found = f"{folder}, {_size(folder)}, mode {mode:o}"
    if hasattr(os, "getuid") and about.st_uid != os.getuid():
        return problem(
            check, f"{found}: it is another user's (uid {about.st_uid}), and its code is executed", elsewhere
        )
    if mode & 0o022:
        todo = f"chmod 700 {folder}, once you trust what lies there; or {elsewhere}"
        return problem(check, f"{found}: others may write to it, and its code is executed", todo)
    return ok(check, found)


def _size(folder: Path) -> str:
    """Files and bytes under a folder, in words; of a very large one, those of the first seconds."""
    end = time.monotonic() + _COUNT_SECONDS
    num_files = num_bytes = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                num_bytes += os.lstat(os.path.join(place, name)).st_size
            except OSError:  # taken away meanwhile
                continue
            num_files += 1
        if time.monotonic() > end:
            return f"more than {num_bytes / 2**20:,.1f} MiB in {num_files:,} files"
    return f"{num_bytes / 2**20:,.1f} MiB in {num_files:,} files"


def disk() -> Iterator[Finding]:
    """Room on the disks of the caches and of temporary files."""
    folders = [*(folder for folder, _ in cache_folders().values()), Path(tempfile.gettempdir())]
    seen: dict[int, Path] = {}
    for folder in folders:
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        seen.setdefault(existing.stat().st_dev, existing)
    for folder in seen.values():
        about = os.statvfs(folder)
        free = about.f_bavail * about.f_frsize
        found = f"{free / 2**30:,.1f} GiB free at {folder}"
        todo = "make room there, or name other folders by MUON_COMPILE_CACHE_DIR, TORCHINDUCTOR_CACHE_DIR and TMPDIR"
        if free < _LEAST_FREE or (about.f_files and not about.f_favail):
            yield problem("disk space", f"{found}, {about.f_favail:,} files more" if about.f_files else found, todo)
        elif free < _ENOUGH_FREE:
            yield note("disk space", found, todo)
        else:
            yield ok("disk space", found)


# -- environment ----------------------------------------------------------------------------------------------------


def environment() -> Iterator[Finding]:
    """Variables of this library and of Inductor that are set, and whether anything reads them."""
    yield from _variables("MUON_COMPILE_", lambda: VARIABLES, "this library", problem)
    yield from _variables("TORCHINDUCTOR_", inductor_variables, "this torch", note)


def _variables(
    prefix: str, read: Callable[[], tuple[str, ...]], reader: str, unknown: Callable[[str, str, str], Finding]
) -> Iterator[Finding]:
    found = {name: value for name, value in sorted(os.environ.items()) if name.startswith(prefix)}
    if not found:
        yield ok("environment", f"no {prefix}* is set")
        return
    known = read()
    for name, value in found.items():
        if name not in known:
            close = difflib.get_close_matches(
                name.removeprefix(prefix), [each.removeprefix(prefix) for each in known], n=1
            )
            todo = f"did you mean {prefix}{close[0]}?" if close else f"unset {name}"
            yield unknown("environment", f"{name}={value}: {reader} does not read it", todo)
        elif wrong := _wrong_value(name, value):
            yield problem("environment", f"{name}={value}", wrong)
        else:
            yield ok("environment", f"{name}={value}")


def _wrong_value(name: str, value: str) -> str:
    """What a value ought to be; empty where it is that."""
    if name in _VALUES and value not in _VALUES[name]:
        return f"expected {' or '.join(_VALUES[name])}; any other value is as if it were not set"
    if name == "MUON_COMPILE_HARDWARE" and value:
        from muon_compile.run.calibrate import local_hardware

        try:
            local_hardware()
        except ValueError as error:
            return str(error)
    return ""


def inductor_variables() -> tuple[str, ...]:
    """The ``TORCHINDUCTOR_`` variables that this torch names in its files."""
    import torch

    root = Path(torch.__file__).parent
    names: set[str] = set()
    for folder in _READERS:
        for path in (root / folder).rglob("*.py"):
            names |= set(re.findall(r"TORCHINDUCTOR_[A-Z0-9_]+", path.read_text(encoding="utf-8", errors="replace")))
    return tuple(sorted(names))
