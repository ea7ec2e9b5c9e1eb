"""The device name ``npu`` on a machine without one: fake tensors can be there, real ones cannot."""

from __future__ import annotations

import sys

import torch
from torch.utils import backend_registration


class _Device(backend_registration._DummyBackendModule):
    def is_initialized(self) -> bool:
        return False

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1


def name_fake_device() -> None:
    """Make ``npu`` the name of torch's spare device, for the whole process; a second call does nothing.

    Raises:
        RuntimeError: torch_npu is imported, which has the real one; or the spare device has another name.
    """
    if "torch_npu" in sys.modules:
        raise RuntimeError("expected no torch_npu in this process, it is imported; take its NPU instead of a fake one.")
    name = torch._C._get_privateuse1_backend_name()
    if name == "npu":
        return
    if name != "privateuseone":
        raise RuntimeError(f"expected torch's spare device to be free, it is {name!r}; use a process of its own.")
    backend_registration._setup_privateuseone_for_python_backend("npu", backend_module=_Device())
