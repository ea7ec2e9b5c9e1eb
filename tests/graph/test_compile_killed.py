"""A process that is ended while it compiles leaves caches that the next one compiles with, to the right step."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

# Two cold compiles, on a machine that may be busy.
pytestmark = [pytest.mark.inductor, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]
# Both are float32 throughout and differ in the order of sums, which two iterations enlarge by at most 3.4445 ** 2.
TOLERANCE = 1e-5

STEPS = """
import sys
import torch
import muon_compile as mc

def main(backend, file):
    torch.set_num_threads(1)
    shapes = ((8, 12), (8, 12), (5, 7), (3, 4, 6))
    draw = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(s, generator=draw)) for s in shapes]
    config = mc.MuonConfig(ns_dtype="float32", ns_steps=2)
    optimizer = mc.Muon(params, lr=0.1, weight_decay=0.1, config=config, backend=backend)
    for _ in range(3):
        for param in params:
            param.grad = torch.randn(param.shape, generator=draw)
        print("steps", flush=True)
        optimizer.step()
    torch.save([p.detach() for p in params], file)

if __name__ == "__main__":  # Inductor's workers import this file
    main(*sys.argv[1:])
"""


def start(backend: str, folder: Path) -> subprocess.Popen[str]:
    script = folder / "steps.py"
    script.write_text(STEPS)
    environment: Mapping[str, str] = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", ""))),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "MUON_COMPILE_CACHE_DIR": str(folder / "kernels"),
    }
    command = [sys.executable, str(script), backend, str(folder / f"{backend}.pt")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    return subprocess.Popen(command, env=environment, start_new_session=True, **pipes)  # type: ignore[call-overload,no-any-return]


def files_of(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def wait_for(process: subprocess.Popen[str], folder: Path, moment: str) -> None:
    """Until the moment has come, in the first step."""
    assert process.stdout is not None and process.stdout.readline() == "steps\n"
    end = time.monotonic() + 60
    while time.monotonic() < end and process.poll() is None:
        found = files_of(folder / "inductor")
        if moment == "first file" and found:
            return
        if moment == "C++ compiler" and any(path.suffix == ".cpp" for path in found):
            return
        time.sleep(0.005)
    pytest.fail(f"it was done, or never began: {process.poll()}")


@pytest.mark.parametrize(
    ("sent", "moment"),
    [(signal.SIGTERM, "first file"), (signal.SIGKILL, "C++ compiler")],
    ids=lambda value: getattr(value, "name", value),
)
def test_a_compile_that_was_ended_spoils_nothing(sent: signal.Signals, moment: str, tmp_path: Path) -> None:
    process = start("inductor", tmp_path)
    try:
        wait_for(process, tmp_path, moment)
        os.killpg(process.pid, sent)  # the C++ compiler as well: nothing completes its files
        assert process.wait(30) == -sent
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    assert not (tmp_path / "inductor.pt").exists(), "it was not in its first compile"
    for backend in ("inductor", "aot_eager"):
        again = start(backend, tmp_path)
        try:
            assert again.wait(120) == 0
        finally:
            if again.poll() is None:
                os.killpg(again.pid, signal.SIGKILL)
            again.communicate()
    actual, reference = (torch.load(tmp_path / f"{name}.pt") for name in ("inductor", "aot_eager"))
    draw = torch.Generator().manual_seed(0)
    for a, b in zip(actual, reference, strict=True):
        change = b - torch.randn(b.shape, generator=draw)
        assert float((a - b).norm()) <= TOLERANCE * float(change.norm())
