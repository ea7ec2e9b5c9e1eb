"""Keep a CPU step's large temporaries between steps instead of handing them back to the system each time."""

from __future__ import annotations

import ctypes
import functools
import logging
import platform

_LOG = logging.getLogger("muon_compile")

# glibc's malloc.h. By default a block from 128 KiB on (adaptive up to 32 MiB) is mapped when allocated and unmapped
# when freed, so every step pays a page fault, and the kernel's zeroing, for every 4 KiB of every temporary.
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
_NEVER_TRIM = 2**31 - 1


@functools.lru_cache(maxsize=1)
def keep_temporaries() -> bool:
    """Tell glibc's allocator to keep freed memory in the process; says so once in the log.

    The setting is the process's, not the step's: everything allocated from then on is served from the heap, and
    resident memory stays near its peak.

    Returns:
        Whether it was done; False where the C library is not glibc.
    """
    if platform.system() != "Linux" or platform.libc_ver()[0] != "glibc":
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    done = bool(mallopt(_M_MMAP_MAX, 0)) and bool(mallopt(_M_TRIM_THRESHOLD, _NEVER_TRIM))
    if done:
        _LOG.info("glibc malloc keeps freed memory in this process from now on (CompileConfig(keep_memory=False): not)")
    return done
