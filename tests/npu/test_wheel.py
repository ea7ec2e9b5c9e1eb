"""TorchAir's Python is fetched once, checked always, and what goes wrong is said in words."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from muon_compile.npu import stand_in, wheel
from muon_compile.npu.wheel import FetchError, torchair_sources

INSIDE = "torch_npu/dynamo/torchair/"
FILES = {
    f"{INSIDE}__init__.py": "here = True\n",
    f"{INSIDE}core/_backend.py": "from . import _torchair\n",
    f"{INSIDE}core/_torchair.so": "no text",
    "torch_npu/__init__.py": "raise ImportError\n",
}
KEPT = ["torchair/__init__.py", "torchair/core/_backend.py"]


class Index:
    """Stands for pip: puts a wheel of these files where it is told to, and counts how often."""

    def __init__(self, files: Mapping[str, str]) -> None:
        self.files = files
        self.asked: list[str] = []

    def __call__(self, version: str, to: Path) -> Path:
        self.asked.append(version)
        path = to / f"torch_npu-{version}-any.whl"
        with zipfile.ZipFile(path, "w") as archive:
            for name, content in self.files.items():
                archive.writestr(name, content)
        return path


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Index:
    """An index whose wheel is the known one of version 1.0."""
    found = Index(FILES)
    for name in KEPT:
        path = tmp_path / "known" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(FILES[INSIDE + name.removeprefix("torchair/")], encoding="utf-8")
    monkeypatch.setattr(wheel, "VERSIONS", {"1.0": wheel._digest(wheel._kept(tmp_path / "known"))})
    monkeypatch.setattr(wheel, "_download", found)
    return found


def files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_it_is_fetched_once_and_kept_for_its_user_alone(index: Index, tmp_path: Path) -> None:
    cache, said = tmp_path / "cache", []
    folder = torchair_sources("1.0", cache, said.append)
    assert files(folder) == KEPT
    assert folder.stat().st_mode & 0o777 == cache.stat().st_mode & 0o777 == 0o700
    assert torchair_sources("1.0", cache, said.append) == folder
    assert index.asked == ["1.0"]
    assert len(said) == 1 and "torch_npu 1.0" in said[0]
    assert list(cache.iterdir()) == [folder]  # nothing is left over


def test_without_a_folder_it_is_kept_where_the_kernels_are(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MUON_COMPILE_CACHE_DIR", str(tmp_path / "named"))
    assert torchair_sources("1.0") == tmp_path / "named" / "torchair-1.0"


@pytest.mark.parametrize("change", ["changed", "truncated", "added", "removed"])
def test_a_cache_that_was_changed_is_refused(index: Index, tmp_path: Path, change: str) -> None:
    folder = torchair_sources("1.0", tmp_path / "cache")
    path = folder / KEPT[1]
    if change == "removed":
        path.unlink()
    elif change == "added":
        path.with_name("more.py").write_text("pass\n", encoding="utf-8")
    else:
        path.write_text("" if change == "truncated" else "from . import others  \n", encoding="utf-8")
    with pytest.raises(FetchError, match="Delete the folder"):
        torchair_sources("1.0", tmp_path / "cache")
    assert index.asked == ["1.0"]


def test_what_python_compiles_is_not_a_change(index: Index, tmp_path: Path) -> None:
    folder = torchair_sources("1.0", tmp_path / "cache")
    (folder / "torchair" / "__pycache__").mkdir()
    (folder / "torchair" / "__pycache__" / "__init__.cpython-311.pyc").write_bytes(b"code")
    assert torchair_sources("1.0", tmp_path / "cache") == folder


def test_another_wheel_is_refused_and_not_kept(index: Index, tmp_path: Path) -> None:
    index.files = FILES | {f"{INSIDE}core/_backend.py": "import evil\n"}
    with pytest.raises(FetchError, match="another TorchAir"):
        torchair_sources("1.0", tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_wheel_cannot_write_elsewhere(index: Index, tmp_path: Path) -> None:
    index.files = FILES | {f"{INSIDE}../../../../escaped.py": "pass\n"}
    with pytest.raises(FetchError, match="outside"):
        torchair_sources("1.0", tmp_path / "cache")
    assert not list(tmp_path.rglob("escaped.py"))


def test_a_wheel_that_broke_off_is_refused(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(version: str, to: Path) -> Path:
        path = index(version, to)
        path.write_bytes(path.read_bytes()[:-30])
        return path

    monkeypatch.setattr(wheel, "_download", half)
    with pytest.raises(FetchError, match="cannot be unpacked"):
        torchair_sources("1.0", tmp_path / "cache")


def test_several_at_once(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All have downloaded before one of them keeps it."""
    together = threading.Barrier(3)

    def slow(version: str, to: Path) -> Path:
        path = index(version, to)
        together.wait(timeout=20)
        return path

    monkeypatch.setattr(wheel, "_download", slow)
    got: list[Path] = []
    threads = [
        threading.Thread(target=lambda: got.append(torchair_sources("1.0", tmp_path / "cache"))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert got == [tmp_path / "cache" / "torchair-1.0"] * 3
    assert files(got[0]) == KEPT
    assert list((tmp_path / "cache").iterdir()) == [got[0]]


def test_a_folder_that_others_may_write_to_is_refused(index: Index, tmp_path: Path) -> None:
    tmp_path.joinpath("open").mkdir(mode=0o700)
    os.chmod(tmp_path / "open", 0o777)
    with pytest.raises(FetchError, match="only you can write to"):
        torchair_sources("1.0", tmp_path / "open")
    tmp_path.joinpath("file").touch()
    with pytest.raises(FetchError, match="no folder to keep"):
        torchair_sources("1.0", tmp_path / "file")
    assert index.asked == []


def test_an_unknown_version() -> None:
    with pytest.raises(ValueError, match=r"version: expected one of 2\.10\.0, .*, got '1\.11'"):
        torchair_sources("1.11")


@pytest.mark.parametrize(
    ("said", "todo"),
    [
        ("/usr/bin/python3: No module named pip", "-m ensurepip"),
        (
            "WARNING: Retrying after connection broken by 'NewConnectionError: [Errno -3] Temporary failure in name "
            "resolution'\nERROR: No matching distribution found for torch_npu==2.13.0",
            "copy the folder torchair-2.13.0",
        ),
        ("ERROR: No matching distribution found for torch_npu==2.13.0", "PIP_INDEX_URL"),
        ("ERROR: something else", "pip says: ERROR: something else"),
    ],
)
def test_what_to_do_when_pip_fails(said: str, todo: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def fail(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 1, stdout="", stderr=said)

    monkeypatch.setattr(subprocess, "run", fail)
    with pytest.raises(FetchError, match="could not download torch_npu 2.13.0") as raised:
        torchair_sources("2.13.0", tmp_path / "cache")
    assert todo in str(raised.value)
    assert commands[0][:5] == [sys.executable, "-m", "pip", "download", "torch_npu==2.13.0"]
    assert "--no-deps" in commands[0]
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.npu
@pytest.mark.timeout(300)
def test_the_real_one(tmp_path: Path) -> None:
    try:
        folder = torchair_sources("2.13.0", tmp_path / "cache")
    except FetchError as error:
        (pytest.fail if "CI" in os.environ else pytest.skip)(str(error))
    assert (folder / "torchair" / "core" / "_backend.py").is_file()
    assert not list(folder.rglob("*.so"))
    assert "torch_npu" not in sys.modules


# -- Where the stand-in may be put ----------------------------------------------------------------------------------


@pytest.mark.parametrize("loaded", ["torch_npu", "torchair"])
def test_the_stand_in_comes_first(loaded: str, index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = torchair_sources("1.0", tmp_path / "cache")
    monkeypatch.setitem(sys.modules, loaded, ModuleType(loaded))
    before = list(sys.path)
    with pytest.raises(RuntimeError, match=f"expected {loaded} not to be loaded"):
        stand_in.install(folder)
    assert stand_in.installed() is None
    assert sys.path == before


def test_the_stand_in_says_what_is_missing(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="holds the package torchair"):
        stand_in.install(tmp_path)
    folder = torchair_sources("1.0", tmp_path / "cache")

    def none(package: str) -> str:
        raise stand_in.importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(stand_in.importlib.metadata, "version", none)
    with pytest.raises(RuntimeError, match="pip install protobuf packaging"):
        stand_in.install(folder)
    assert stand_in.installed() is None


def test_the_stand_in_gives_way_to_the_real_one(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = torchair_sources("1.0", tmp_path / "cache")
    (tmp_path / "site" / "torch_npu").mkdir(parents=True)
    (tmp_path / "site" / "torch_npu" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path / "site")
    with pytest.raises(RuntimeError, match="torch_npu is installed here"):
        stand_in.install(folder)
    assert stand_in.installed() is None


def test_what_an_older_torchair_asks_for_is_defined(tmp_path: Path) -> None:
    """One of its files registers ``sum`` for an overload that is there, and for one that is not."""
    converters = tmp_path / "torchair" / "_ge_concrete_graph" / "ge_converter"
    converters.mkdir(parents=True)
    lines = [f"@register_fx_node_ge_converter(torch.ops.aten.sum.{name})" for name in ("default", "of_a_test")]
    (converters / "sum.py").write_text("\n".join(lines), encoding="utf-8")
    assert not hasattr(torch.ops.aten.sum, "of_a_test")
    assert stand_in._define_placeholders(tmp_path) == ("aten.sum.of_a_test",)
    assert hasattr(torch.ops.aten.sum, "of_a_test")
    assert torch.equal(torch.ops.aten.sum(torch.ones(3)), torch.tensor(3.0))
    assert stand_in._define_placeholders(tmp_path) == ()


def test_the_stand_in_is_found_by_its_mark(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, stand_in.MODULE, ModuleType("not ours"))
    assert stand_in.installed() is None
    monkeypatch.delitem(sys.modules, stand_in.MODULE)
    record = stand_in.install(torchair_sources("1.0", tmp_path / "cache"))
    try:
        assert stand_in.installed() is record
        assert sys.path[0] == str(record.folder)
        with pytest.raises(RuntimeError, match="one TorchAir in a process"):
            stand_in.install(tmp_path)
        module = sys.modules[stand_in.MODULE]
        for name in ("export", "AclmdlSetDump", "InitDeviceStdoutChannel"):
            with pytest.raises(RuntimeError, match=f"{name} needs an NPU"):
                getattr(module, name)("x", "y")
    finally:
        del sys.modules[stand_in.MODULE]
