"""What every test shares."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

# Plans of tests are the same on every machine, and none of them is measured.
os.environ.setdefault("MUON_COMPILE_HARDWARE", "cpu-2core")


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Tiny tensors gain nothing from threads, and wait for each other on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
