"""The user's cache directory: compiled kernels and calibrations."""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import stat
import tempfile
from pathlib import Path

_LOG = logging.getLogger("muon_compile")


def cache_dir() -> Path:
    """A directory that only this user can write to, made if need be.

    ``MUON_COMPILE_CACHE_DIR``, else ``muon_compile`` under ``XDG_CACHE_HOME`` or ``~/.cache``. It holds executable
    code, so one that others may write to is not used.

    Raises:
        OSError: It cannot be made or written to, is another user's, or others may write to it.
    """
    folder = _named_dir()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o022:
        raise PermissionError(
            f"{folder}: expected a directory that only you can write to, since it holds compiled code; got owner "
            f"{found.st_uid}, mode {stat.S_IMODE(found.st_mode):o}. Set MUON_COMPILE_CACHE_DIR to another one."
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(f"{folder}: expected a directory that can be written to. Set MUON_COMPILE_CACHE_DIR.")
    return folder


def _named_dir() -> Path:
    given, cache = os.environ.get("MUON_COMPILE_CACHE_DIR"), os.environ.get("XDG_CACHE_HOME")
    if given:
        return Path(given)
    if cache:
        return Path(cache) / "muon_compile"
    try:
        return Path.home() / ".cache" / "muon_compile"
    except RuntimeError as error:  # no HOME, and no entry in the password file
        raise FileNotFoundError(f"no home directory ({error}); set MUON_COMPILE_CACHE_DIR") from error


def cache_or_temporary_dir() -> Path:
    """``cache_dir()``, or where that cannot be used a new private directory for this process alone."""
    try:
        return cache_dir()
    except OSError as error:
        _LOG.warning("no cache between runs: %s", error)
        folder = Path(tempfile.mkdtemp(prefix="muon_compile-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        return folder
