"""The user's cache directory: compiled kernels and calibrations."""

from __future__ import annotations

import logging
import os
import stat
import tempfile
from pathlib import Path

_LOG = logging.getLogger("muon_compile")


def cache_dir() -> Path:
    """A directory that only this user can read or write, made if need be.

    ``MUON_COMPILE_CACHE_DIR``, else ``muon_compile`` under ``XDG_CACHE_HOME`` or ``~/.cache``. It holds executable
    code, so one that others may write to is not used.

    Raises:
        OSError: It cannot be made, is another user's, or is open to others.
    """
    given = os.environ.get("MUON_COMPILE_CACHE_DIR")
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = Path(given) if given else home / "muon_compile"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o022:
        raise PermissionError(
            f"{folder}: expected a directory that only you can write to, since it holds compiled code; got owner "
            f"{found.st_uid}, mode {stat.S_IMODE(found.st_mode):o}. Set MUON_COMPILE_CACHE_DIR to another one."
        )
    return folder


def cache_or_temporary_dir() -> Path:
    """``cache_dir()``, or where that cannot be used a new private directory for this process alone."""
    try:
        return cache_dir()
    except OSError as error:
        _LOG.warning("no cache between runs: %s", error)
        return Path(tempfile.mkdtemp(prefix="muon_compile-"))
