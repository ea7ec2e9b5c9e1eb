"""TorchAir's Python for tests: fetched once, or a reason to skip; under CI a failure."""

from __future__ import annotations

import functools
import os

import pytest

from muon_compile.npu.wheel import FetchError, torchair_sources

VERSIONS = ("2.13.0", "2.12.0")


@functools.cache
def _fetched(version: str) -> tuple[str, str]:
    try:
        return str(torchair_sources(version)), ""
    except FetchError as error:
        return "", f"the torch_npu {version} wheel cannot be had, so nothing is lowered with it: {error}"


def sources(version: str) -> str:
    """The folder that holds ``torchair``."""
    folder, reason = _fetched(version)
    if reason and os.environ.get("CI"):
        pytest.fail(reason)
    if reason:
        pytest.skip(reason)
    return folder
