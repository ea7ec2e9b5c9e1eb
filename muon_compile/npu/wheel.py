"""TorchAir's Python, out of a torch_npu wheel. torch_npu itself is neither installed nor imported.

(Installed where there is no CANN, it makes plain ``import torch`` fail.)
"""

from __future__ import annotations

import hashlib
import os
import stat
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path, PurePosixPath

from muon_compile.kernels.cache import cache_dir

# Known versions of torch_npu, and the SHA-256 that ``_digest`` gives for TorchAir's files in them, which is the same
# for every Python and machine. There are three TorchAirs in five versions.
_OLDEST = "044c8cc66bc136fa0c5197edfc09f55946d1ee586c64abe6648260508c125577"
_MIDDLE = "32ab8cc42b860c087e895057f84fe78458726837f26de670099551b5a509b53b"
_NEWEST = "12bdb9c5735aea3b914d4155e8bd5167f6292cbdef069fa1763e8ec65eca9ae9"
VERSIONS: Mapping[str, str] = {
    "2.10.0": _OLDEST,
    "2.11.0": _MIDDLE,
    "2.12.0": _MIDDLE,
    "2.13.0": _NEWEST,
    "2.14.0": _NEWEST,
}

_INSIDE = "torch_npu/dynamo/torchair/"
_MB_OF_WHEEL = 44
# One wheel for every machine: nothing that is kept of it depends on where it runs.
_WHEEL = ("--no-deps", "--only-binary=:all:", "--python-version=3.11", "--platform=manylinux_2_28_x86_64")
# In what pip says where it reaches no index.
_OFFLINE = frozenset({"name resolution", "Name or service not known", "new connection", "Network is unreachable"})
_OFFLINE |= {"Connection refused", "ConnectTimeoutError", "ReadTimeoutError", "ProxyError", "SSLError"}


class FetchError(RuntimeError):
    """TorchAir's Python could not be had; says what to do."""


def torchair_sources(
    version: str = "2.13.0", cache: Path | None = None, progress: Callable[[str], None] | None = None
) -> Path:
    """A folder that holds the package ``torchair`` of that torch_npu, fetched by pip once and then kept.

    Args:
        version: Version of torch_npu, one of ``VERSIONS``.
        cache: Folder to keep it in; None: under ``kernels.cache.cache_dir()``.
        progress: Called with a line before what takes long.

    Raises:
        ValueError: The version is not one of ``VERSIONS``.
        FetchError: There is no cache folder that only this user can write to, no network, no pip or no such wheel, or
            what is there is not what is known of that version.
    """
    if version not in VERSIONS:
        raise ValueError(f"version: expected one of {', '.join(VERSIONS)}, got {version!r}.")
    folder = _private(cache) / f"torchair-{version}"
    if not folder.exists():
        _fetch(version, folder, progress or (lambda line: None))
    found = _digest(_kept(folder))
    if found != VERSIONS[version]:
        raise FetchError(
            f"{folder}: expected the files of TorchAir in torch_npu {version} (digest {VERSIONS[version][:12]}), got "
            f"others (digest {found[:12]}): they were changed, or are incomplete. Delete the folder, and they are "
            "fetched anew."
        )
    return folder


def _private(cache: Path | None) -> Path:
    """The cache folder, which nobody else may write to: what is in it is run."""
    try:
        if cache is None:
            return cache_dir()
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = cache.stat()
    except OSError as error:
        raise FetchError(f"no folder to keep TorchAir in: {error}") from error
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o022:
        raise FetchError(
            f"cache: expected a folder that only you can write to, since what is in it is run; got {cache} of owner "
            f"{found.st_uid}, mode {stat.S_IMODE(found.st_mode):o}. Name another one."
        )
    return cache


def _fetch(version: str, folder: Path, progress: Callable[[str], None]) -> None:
    """Put the files into ``folder``, all at once: another process may do the same at the same time."""
    if not os.access(folder.parent, os.W_OK | os.X_OK):
        raise FetchError(
            f"{folder.parent}: expected a folder that can be written to, to keep TorchAir in; name another."
        )
    with tempfile.TemporaryDirectory(prefix=".torchair-", dir=folder.parent) as scratch:
        progress(f"fetching TorchAir from the wheel of torch_npu {version} ({_MB_OF_WHEEL} MB), kept in {folder}")
        wheel = _download(version, Path(scratch))
        whole = Path(scratch) / folder.name
        whole.mkdir(mode=0o700)
        try:
            with zipfile.ZipFile(wheel) as archive:
                _unpack(archive, whole / "torchair")
        except (zipfile.BadZipFile, OSError) as error:
            raise FetchError(f"the wheel {wheel.name} cannot be unpacked ({error}); try again.") from error
        found = _digest(_kept(whole))
        if found != VERSIONS[version]:
            raise FetchError(
                f"the wheel {wheel.name} holds another TorchAir (digest {found[:12]}) than is known of torch_npu "
                f"{version} (digest {VERSIONS[version][:12]}). Nothing was kept; see where pip takes packages from."
            )
        try:
            os.rename(whole, folder)
        except OSError as error:
            if not folder.is_dir():
                raise FetchError(f"cannot keep TorchAir in {folder}: {error}") from error


def _download(version: str, to: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", f"torch_npu=={version}", *_WHEEL, "--dest", str(to)]
    command += ["--quiet", "--no-input", "--disable-pip-version-check", "--progress-bar=off"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    wheels = list(to.glob("torch_npu-*.whl"))
    if done.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    said = (done.stderr + done.stdout).strip()
    raise FetchError(
        f"pip could not download torch_npu {version}: {_what_to_do(said, version)}\npip says: {said[-1000:]}"
    )


def _what_to_do(said: str, version: str) -> str:
    if "No module named pip" in said:
        return f"{sys.executable} has no pip. Run '{sys.executable} -m ensurepip', or take a Python that has it."
    if any(sign in said for sign in _OFFLINE):
        return (
            "its index cannot be reached. Try again with a network, or copy the folder torchair-"
            f"{version} from the cache of a machine that has it."
        )
    if "No matching distribution" in said or "Could not find a version" in said:
        return "its index has no such wheel. Name one that has (PIP_INDEX_URL), such as PyPI."
    return "see below."


def _unpack(archive: zipfile.ZipFile, to: Path) -> None:
    for name in archive.namelist():
        if not name.startswith(_INSIDE) or name.endswith(("/", ".so")):
            continue
        path = PurePosixPath(name[len(_INSIDE) :])
        if path.is_absolute() or ".." in path.parts:
            raise FetchError(f"the wheel names a file outside of its folders: {name!r}. Nothing was kept of it.")
        (to / path).parent.mkdir(parents=True, exist_ok=True)
        (to / path).write_bytes(archive.read(name))


def _kept(folder: Path) -> list[tuple[str, Path]]:
    """Files under ``folder`` by their relative names; what Python keeps beside them apart."""
    found = []
    for where, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name != "__pycache__"]
        paths = [Path(where) / name for name in names]
        found += [(path.relative_to(folder).as_posix(), path) for path in paths]
    return sorted(found)


def _digest(files: Iterable[tuple[str, Path]]) -> str:
    whole = hashlib.sha256()
    for name, path in files:
        content = path.read_bytes()
        whole.update(f"{name}\0{len(content)}\0".encode())
        whole.update(content)
    return whole.hexdigest()
