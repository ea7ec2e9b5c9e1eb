"""The command doctor: each check on a machine where all is right, and on one where it is not."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from muon_compile.cli import doctor, doctor_devices, doctor_host, doctor_tools
from muon_compile.cli.findings import Finding, note, ok, print_findings, problem
from muon_compile.kernels import cpu
from muon_compile.lower.backends import BACKENDS
from muon_compile.run.progress import VARIABLE
from tests.unit.commands import output

ROOT = Path(__file__).parents[2]


def states(findings: Iterator[Finding]) -> list[tuple[str, str]]:
    """Check and state of each; every problem says what to do."""
    found = list(findings)
    assert all(finding.found for finding in found)
    assert all(finding.todo for finding in found if finding.state == "problem")
    return [(finding.check, finding.state) for finding in found]


def only(findings: Iterator[Finding], state: str) -> Finding:
    """The one finding."""
    (finding,) = findings
    assert finding.state == state and (finding.todo or state != "problem")
    return finding


@pytest.fixture(autouse=True)
def no_wishes(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable that a check looks at is set, but those of a test."""
    for name in list(os.environ):
        if name.startswith(("MUON_COMPILE_", "TORCHINDUCTOR_", "MALLOC_", "ASCEND_")):
            monkeypatch.delenv(name)
    for name in ("CXX", "LD_PRELOAD", "OMP_NUM_THREADS", "LOCAL_WORLD_SIZE", "LOCAL_RANK", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    for name in doctor_devices._LIMITS:
        monkeypatch.delenv(name, raising=False)


# -- the command ----------------------------------------------------------------------------------------------------


def test_doctor_looks_at_everything_on_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    code = doctor.doctor(argparse.Namespace(json=True))
    data = json.loads(capsys.readouterr().out)
    assert code == (0 if data["ok"] else 1)
    checks = {finding["check"] for finding in data["findings"]}
    assert {"torch", "C++ compiler", "CPU kernels", "GPUs", "NPUs", "gloo", "nccl", "hccl", *BACKENDS} <= checks
    assert {"threads", "allocator", "cache, muon_compile", "cache, Inductor", "disk space", "environment"} <= checks
    assert not [finding for finding in data["findings"] if "the check itself failed" in finding["found"]]
    assert data["ok"] is not any(finding["state"] == "problem" for finding in data["findings"])


def one(check: doctor.Check, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "CHECKS", (check,))


@pytest.mark.parametrize(("made", "code"), [(ok("a", "b"), 0), (note("a", "b", "c"), 0), (problem("a", "b", "c"), 1)])
def test_only_problems_exit_with_1(
    made: Finding, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one(doctor.Check(name="a", run=lambda: iter([made])), monkeypatch)
    out = output(capsys, "doctor", code=code)
    assert out.startswith(f"{made.state}  a  b\n") and ("-> c\n" in out) is bool(made.todo)
    data = json.loads(output(capsys, "doctor", "--json", code=code))
    assert data == {"ok": code == 0, "findings": [{"check": "a", "state": made.state, "found": "b", "todo": made.todo}]}
    # Of ranks, one prints; all exit alike.
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert output(capsys, "doctor", code=code) == ""


def test_findings_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    print_findings([problem("a", "[red]" + "x" * 200, "[y]"), problem("b", "c", "d"), note("e", "f")])
    out = capsys.readouterr().out
    assert "[red]x" in out and "-> [y]\n" in out and out.endswith("\n2 problems, 1 note\n")
    assert max(map(len, out.splitlines())) <= 120 and all(line == line.rstrip() for line in out.splitlines())


def test_a_check_that_fails_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> Iterator[Finding]:
        yield ok("a", "b")
        raise RuntimeError("odd")

    after = doctor.Check(name="after", run=lambda: iter([ok("after", "c")]))
    monkeypatch.setattr(doctor, "CHECKS", (doctor.Check(name="odd", run=fails), after))
    assert states(iter(doctor.examine())) == [("a", "ok"), ("odd", "problem"), ("after", "ok")]


def test_doctor_works_where_torch_does_not(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise OSError('libtorch.so: no such file')", encoding="utf-8")
    environ = dict(os.environ) | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "CXX": "no-such-compiler"}
    command = [sys.executable, "-m", "muon_compile", "doctor", "--json"]
    run = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=100, cwd=tmp_path)
    assert run.returncode == 1 and run.stderr == ""
    found = {finding["check"]: finding for finding in json.loads(run.stdout)["findings"]}
    assert "OSError: libtorch.so: no such file" in found["torch"]["found"]
    assert found["torch"]["todo"] == "pip install 'torch>=2.10,<2.15'"
    assert found["left out"]["state"] == "note" and "CPU kernels" in found["left out"]["found"]
    assert found["C++ compiler"]["state"] == "problem" and found["allocator"]["state"] == "ok"


# -- tools ----------------------------------------------------------------------------------------------------------


def test_the_known_range_of_torch_is_that_of_the_package() -> None:
    assert f'"{doctor_tools._RANGE}"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("version", "state"),
    [("2.9.1", "problem"), ("2.10.0", "ok"), ("2.14.1+cpu", "ok"), ("2.15.0a0+git", "problem"), ("odd", "problem")],
)
def test_torch_is_held_against_its_range(version: str, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    assert version in only(doctor_tools.torch_version(), state).found


def test_other_systems_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert only(doctor_tools.python(), "ok").found.startswith(f"{sys.version_info[0]}.{sys.version_info[1]}.")
    monkeypatch.setattr(doctor_tools.platform, "system", lambda: "Darwin")
    only(doctor_tools.python(), "note")


def test_a_compiler_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert states(doctor_tools.compiler()) == [("C++ compiler", "ok"), ("OpenMP", "ok")]
    monkeypatch.setenv("CXX", "no-such-compiler")
    finding = only(doctor_tools.compiler(), "problem")
    assert "'no-such-compiler' was not found (by CXX)" in finding.found and "apt-get install g++" in finding.todo

    def fake(script: str) -> None:
        path = tmp_path / "g++"
        path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        path.chmod(0o755)
        monkeypatch.setenv("CXX", str(path))

    fake("echo 'x: fatal error: no cc1plus' >&2; exit 1")
    assert "compiles no program: x: fatal error: no cc1plus" in only(doctor_tools.compiler(), "problem").found
    fake('case "$*" in *-fopenmp*) echo "error: unsupported -fopenmp" >&2; exit 1;; *) exec g++ "$@";; esac')
    assert states(doctor_tools.compiler()) == [("C++ compiler", "ok"), ("OpenMP", "problem")]


def test_missing_python_headers_are_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert "-dev" in only(doctor_tools.python_headers(), "problem").todo
    (tmp_path / "Python.h").touch()
    only(doctor_tools.python_headers(), "ok")


@pytest.mark.parametrize(
    ("files", "state"),
    [
        (["/lib/libgomp-a34b.so.1"], "ok"),
        (["/lib/libgomp.so.1", "/torch/libgomp-a34b.so.1"], "ok"),
        (["/lib/libgomp.so.1", "/conda/libiomp5.so"], "note"),
        (["/lib/libc.so.6"], "note"),
    ],
)
def test_openmp_runtimes_are_counted(files: list[str], state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_tools, "loaded_libraries", lambda: files)
    only(doctor_tools.openmp(), state)


def test_loaded_libraries_are_files_of_this_process() -> None:
    loaded = doctor_tools.loaded_libraries()
    assert any("libtorch" in path for path in loaded) and all(path.startswith("/") for path in loaded)


@pytest.mark.parametrize(
    ("reason", "state"),
    [
        (None, "ok"),
        ("MUON_COMPILE_NATIVE=0", "note"),
        ("expected Linux on x86-64", "note"),
        ("compiling or loading them failed: x", "problem"),
    ],
)
def test_kernels_that_do_not_compile_are_a_problem(
    reason: str | None, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "why_not", lambda: reason)
    monkeypatch.setattr(cpu, "isa", lambda: "avx512_bf16")
    assert (reason or "with avx512_bf16") in only(doctor_tools.kernels(), state).found


def test_the_kernels_say_so_where_compiling_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the check above goes by is what the kernels say."""

    def fails(*args: Any) -> Path:
        raise subprocess.CalledProcessError(1, "g++", stderr="no room")

    monkeypatch.setattr(cpu, "_compile", fails)
    monkeypatch.setattr(cpu, "cpu_flags", lambda: frozenset(cpu._NEEDED))
    cpu._load.cache_clear()
    try:
        assert "no room" in only(doctor_tools.kernels(), "problem").found
    finally:
        cpu._load.cache_clear()


# -- devices --------------------------------------------------------------------------------------------------------


def test_a_processor_without_bfloat16_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_devices.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(cpu, "cpu_flags", lambda: frozenset({"avx2", "avx512f", "amx_bf16"}))
    assert "avx2, avx512f, amx_bf16; torch uses " in only(doctor_devices.processor(), "ok").found
    monkeypatch.setattr(cpu, "cpu_flags", lambda: frozenset({"avx2"}))
    assert "ns_dtype" in only(doctor_devices.processor(), "note").todo
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert "held back by ONEDNN_MAX_CPU_ISA=AVX2" in only(doctor_devices.processor(), "note").found
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")
    monkeypatch.setattr(doctor_devices.platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(cpu, "cpu_flags", frozenset)
    only(doctor_devices.processor(), "ok")


def with_gpus(monkeypatch: pytest.MonkeyPatch, *capabilities: tuple[int, int]) -> None:
    """Pretend that torch sees these GPUs."""
    made = [
        SimpleNamespace(name="GPU", major=major, minor=minor, total_memory=80 * 2**30) for major, minor in capabilities
    ]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(made))
    monkeypatch.setattr(torch.cuda, "get_device_properties", made.__getitem__)


def test_gpus_are_listed_and_old_ones_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    with_gpus(monkeypatch, (9, 0), (6, 1))
    found = list(doctor_devices.gpus())
    assert [finding.state for finding in found] == ["ok", "problem"]
    assert found[0].found == "cuda:0: GPU, 80 GiB, capability 9.0, CUDA 12.8"


@pytest.mark.parametrize(
    ("nodes", "built", "state"), [(0, None, "ok"), (0, "12.8", "ok"), (1, None, "note"), (1, "12.8", "problem")]
)
def test_a_gpu_that_torch_does_not_see(
    nodes: int, built: str | None, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", built)
    monkeypatch.setattr(doctor_devices, "_nodes", lambda pattern: [Path("/dev/nvidia0")] * nodes)
    only(doctor_devices.gpus(), state)


def test_npus_need_a_stack_that_can_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_devices, "_nodes", lambda pattern: [])
    only(doctor_devices.npus(), "ok")
    monkeypatch.setattr(doctor_devices, "_nodes", lambda pattern: [Path("/dev/davinci0")])
    monkeypatch.setattr(doctor_devices, "_is_here", lambda module: module == "packaging")
    finding = only(doctor_devices.npus(), "problem")
    assert "missing for them: torch-npu, protobuf, CANN" in finding.found
    assert finding.todo.startswith("pip install torch-npu protobuf; install CANN")
    monkeypatch.setattr(doctor_devices, "_is_here", lambda module: True)
    assert only(doctor_devices.npus(), "problem").todo.startswith("install CANN")
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    monkeypatch.setattr(doctor_devices, "_import_failure", lambda modules: "ImportError: libhccl.so")
    assert (
        "importing torch_npu and torchair fails: ImportError: libhccl.so"
        in only(doctor_devices.npus(), "problem").found
    )
    monkeypatch.setattr(doctor_devices, "_import_failure", lambda modules: "")
    only(doctor_devices.npus(), "ok")


def test_importing_is_tried_in_a_process_of_its_own() -> None:
    assert doctor_devices._import_failure("json") == ""
    assert doctor_devices._import_failure("no_such_module") == "ModuleNotFoundError: No module named 'no_such_module'"
    assert doctor_devices._is_here("json.decoder") and not doctor_devices._is_here("no_such_module.within")


def test_triton_is_needed_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_devices, "_is_here", lambda module: False)
    only(doctor_devices.triton(), "ok")
    with_gpus(monkeypatch, (9, 0))
    only(doctor_devices.triton(), "problem")
    monkeypatch.setattr(doctor_devices, "_is_here", lambda module: True)
    monkeypatch.setattr(doctor_devices, "_version", lambda package: "3.6.0")
    assert only(doctor_devices.triton(), "ok").found == "3.6.0"


def test_inductor_wants_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import cpp_builder, exc

    assert states(doctor_devices.backends()) == [("inductor", "ok"), ("aot_eager", "ok"), ("torchair", "ok")]

    def none() -> str:
        raise exc.InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", none)
    inductor, *_ = doctor_devices.backends()
    assert inductor.state == "problem" and "CXX" in inductor.todo


def test_process_groups_of_gloo_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    assert states(doctor_devices.process_groups()) == [("gloo", "ok"), ("nccl", "ok"), ("hccl", "ok")]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface")
    gloo, *_ = doctor_devices.process_groups()
    assert gloo.state == "problem" and "no-such-interface" in gloo.found and "enforce" not in gloo.found
    monkeypatch.setattr(dist, "is_gloo_available", lambda: False)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    monkeypatch.setattr(doctor_devices, "_nodes", lambda pattern: [Path("/dev/davinci0")])
    with_gpus(monkeypatch, (9, 0))
    assert states(doctor_devices.process_groups()) == [("gloo", "problem"), ("nccl", "problem"), ("hccl", "problem")]
    monkeypatch.setattr(dist, "is_available", lambda: False)
    only(doctor_devices.process_groups(), "note")


# -- host -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_threads", "cpus", "ranks", "state", "todo"),
    [
        (8, 8, 1, "ok", ""),
        (4, 8, 1, "ok", ""),
        (8, 4, 1, "problem", "export OMP_NUM_THREADS=4"),
        (1, 8, 1, "note", "export OMP_NUM_THREADS=8"),
        (1, 8, 4, "ok", ""),
        (4, 8, 4, "problem", "export OMP_NUM_THREADS=2"),
        (1, 2, 4, "note", "start at most 2 ranks on this machine"),
    ],
)
def test_threads_fit_the_cpus(
    num_threads: int, cpus: int, ranks: int, state: str, todo: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    monkeypatch.setattr(doctor_host, "usable_cpus", lambda: (cpus, "some CPUs"))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    assert only(doctor_host.threads(), state).todo == todo


def test_usable_cpus_are_the_fewest_that_anything_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(6), raising=False)
    for quota, cpus, words in (
        (None, 6, "8 CPUs, affinity allows 6"),
        (2.5, 3, "8 CPUs, affinity allows 6, cgroup allows 2.5"),
        (0.2, 1, "8 CPUs, affinity allows 6, cgroup allows 0.2"),
        (64.0, 6, "8 CPUs, affinity allows 6, cgroup allows 64"),
    ):
        monkeypatch.setattr(doctor_host, "cgroup_cpus", lambda quota=quota: quota)
        assert doctor_host.usable_cpus() == (cpus, words)


@pytest.mark.parametrize(
    ("groups", "files", "cpus"),
    [
        ("0::/a/b", {}, None),
        ("0::/a/b", {"a/b/cpu.max": "max 100000\n"}, None),
        ("0::/a/b", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "150000 100000\n"}, 1.5),
        ("0::/", {"cpu.max": "50000 100000\n"}, 0.5),
        ("0::/of/the/host", {"cpu.max": "200000 100000\n"}, 2.0),
        ("4:memory:/a\n3:cpu,cpuacct:/a\n0::/", {"cpu,cpuacct/a/cpu.cfs_": ("300000", "100000")}, 3.0),
        ("3:cpu,cpuacct:/host", {"cpu/cpu.cfs_": ("100000", "100000")}, 1.0),
        ("3:cpu:/", {"cpu/cpu.cfs_": ("-1", "100000")}, None),
        ("3:cpuset:/", {"cpu/cpu.cfs_": ("100000", "100000")}, None),
    ],
)
def test_cgroups_bound_the_cpus(groups: str, files: dict[str, Any], cpus: float | None, tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(groups + "\n", encoding="utf-8")
    for name, text in files.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(text, str):
            path.write_text(text, encoding="utf-8")
        else:
            for part, value in zip(("quota_us", "period_us"), text, strict=True):
                (path.parent / f"{path.name}{part}").write_text(value + "\n", encoding="utf-8")
    assert doctor_host.cgroup_cpus(tmp_path) == cpus


def test_no_cgroups_bound_nothing(tmp_path: Path) -> None:
    assert doctor_host.cgroup_cpus(tmp_path) is None


def test_other_allocators_are_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_host.platform, "libc_ver", lambda: ("glibc", "2.36"))
    monkeypatch.setattr(doctor_host, "loaded_libraries", lambda: ["/lib/libc.so.6"])
    monkeypatch.setenv("MALLOC_ARENA_MAX", "2")
    assert only(doctor_host.allocator(), "ok").found == "glibc 2.36, with MALLOC_ARENA_MAX=2"
    monkeypatch.setattr(doctor_host, "loaded_libraries", lambda: ["/lib/libjemalloc.so.2"])
    assert "jemalloc in place" in only(doctor_host.allocator(), "note").found
    monkeypatch.setattr(doctor_host, "loaded_libraries", list)
    monkeypatch.setattr(doctor_host.platform, "libc_ver", lambda: ("", ""))
    assert "other than glibc" in only(doctor_host.allocator(), "note").found
    (tmp_path / "libtcmalloc.so").touch()
    monkeypatch.setenv("LD_PRELOAD", f"{tmp_path}/libtcmalloc.so:{tmp_path}/gone.so")
    found = list(doctor_host.allocator())
    assert [finding.state for finding in found] == ["problem", "note"] and "tcmalloc" in found[1].found
    assert found[0].found.endswith(f"not there: {tmp_path}/gone.so")


def test_caches_are_measured_and_guarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, inductor = tmp_path / "ours", tmp_path / "inductor"
    monkeypatch.setenv("MUON_COMPILE_CACHE_DIR", str(ours))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(inductor))
    assert states(doctor_host.caches()) == [("cache, muon_compile", "ok"), ("cache, Inductor", "ok")]
    assert not ours.exists() and not inductor.exists()
    (inductor / "a").mkdir(parents=True)
    (inductor / "a/code.py").write_bytes(b"x" * 3 * 2**20)
    inductor.chmod(0o755)
    ours.mkdir()
    ours.chmod(0o770)
    found = list(doctor_host.caches())
    assert [finding.state for finding in found] == ["problem", "ok"]
    assert "mode 770: others may write to it" in found[0].found and f"chmod 700 {ours}" in found[0].todo
    assert found[1].found == f"{inductor}, 3.0 MiB in 1 files, mode 755"
    monkeypatch.setattr(doctor_host, "_COUNT_SECONDS", -1.0)
    assert "more than 0.0 MiB in 0 files" in list(doctor_host.caches())[1].found
    uid = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    assert all("another user's" in finding.found for finding in doctor_host.caches())
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert states(doctor_host.caches()) == [("cache, muon_compile", "problem"), ("cache, Inductor", "problem")]


def test_a_cache_below_a_file_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "file").touch(mode=0o755)
    assert doctor_host._cache("cache", tmp_path / "file/cache", "elsewhere").state == "problem"


def test_inductors_cache_may_be_off(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import config

    with config.patch(fx_graph_cache=False):
        *_, finding = doctor_host.caches()
    assert finding.state == "note" and "switched off" in finding.found


@pytest.mark.parametrize(
    ("blocks", "inodes", "state"),
    [(2**40, 10, "ok"), (2**31, 10, "note"), (2**29, 10, "problem"), (2**40, 0, "problem")],
)
def test_full_disks_are_a_problem(blocks: int, inodes: int, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    full = SimpleNamespace(f_bavail=blocks, f_frsize=1, f_files=100, f_favail=inodes)
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    monkeypatch.setattr(doctor_host, "cache_folders", lambda: {"cache": (Path(tempfile.gettempdir()) / "none", "")})
    only(doctor_host.disk(), state)


def test_variables_are_those_that_the_library_reads() -> None:
    files = [path for path in (ROOT / "muon_compile").rglob("*") if path.suffix in (".py", ".cpp", ".h")]
    texts = [path.read_text(encoding="utf-8") for path in files if path.name != "doctor_host.py"]
    named = {name for text in texts for name in re.findall(r"MUON_COMPILE_[A-Z_]*[A-Z]", text)}
    assert named == set(doctor_host.VARIABLES) and VARIABLE in named


@pytest.mark.parametrize(
    ("name", "value", "state", "says"),
    [
        ("MUON_COMPILE_NATIV", "0", "problem", "did you mean MUON_COMPILE_NATIVE?"),
        ("MUON_COMPILE_ZZZ", "0", "problem", "unset MUON_COMPILE_ZZZ"),
        ("MUON_COMPILE_NATIVE", "0", "ok", ""),
        ("MUON_COMPILE_NATIVE", "no", "problem", "expected 0 or 1; any other value"),
        ("MUON_COMPILE_PROGRESS", "yes", "problem", "expected 0 or 1; any other value"),
        ("MUON_COMPILE_HARDWARE", "h100", "ok", ""),
        ("MUON_COMPILE_HARDWARE", "h1000", "problem", "expected a preset"),
        ("TORCHINDUCTOR_MAX_AUTOTUNE", "1", "ok", ""),
        ("TORCHINDUCTOR_CACHEDIR", "x", "note", "did you mean TORCHINDUCTOR_CACHE_DIR?"),
        ("TORCHINDUCTOR_AUTOGRAD_CACHE", "1", "ok", ""),
    ],
)
def test_variables_that_nobody_reads(
    name: str, value: str, state: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    (finding,) = [finding for finding in doctor_host.environment() if name in finding.found]
    assert finding.state == state and says in finding.todo
