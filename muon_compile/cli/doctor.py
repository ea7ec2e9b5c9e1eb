"""The command doctor: look at everything that a compiled step needs here, and say what to do."""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from muon_compile.cli import doctor_devices, doctor_host, doctor_tools
from muon_compile.cli.findings import Finding, count, note, print_findings, problem, to_json


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Something to look at.

    Args:
        name: What it is about.
        run: Looks at it.
        needs_torch: It cannot be looked at where torch cannot be imported.
    """

    name: str
    run: Callable[[], Iterator[Finding]]
    needs_torch: bool = True


CHECKS = (
    Check(name="Python", run=doctor_tools.python, needs_torch=False),
    Check(name="torch", run=doctor_tools.torch_version, needs_torch=False),
    Check(name="C++ compiler", run=doctor_tools.compiler, needs_torch=False),
    Check(name="Python headers", run=doctor_tools.python_headers, needs_torch=False),
    Check(name="OpenMP runtime", run=doctor_tools.openmp),
    Check(name="CPU", run=doctor_devices.processor),
    Check(name="CPU kernels", run=doctor_tools.kernels),
    Check(name="GPUs", run=doctor_devices.gpus),
    Check(name="NPUs", run=doctor_devices.npus),
    Check(name="Triton", run=doctor_devices.triton),
    Check(name="backends", run=doctor_devices.backends),
    Check(name="process groups", run=doctor_devices.process_groups),
    Check(name="threads", run=doctor_host.threads),
    Check(name="allocator", run=doctor_host.allocator, needs_torch=False),
    Check(name="caches", run=doctor_host.caches),
    Check(name="disk space", run=doctor_host.disk),
    Check(name="environment", run=doctor_host.environment),
)


def doctor(args: argparse.Namespace) -> int:
    """``doctor``. Of ranks under torchrun, the first on each machine prints."""
    findings = examine()
    if os.environ.get("LOCAL_RANK", "0") == "0":
        if args.json:
            print(to_json(findings))
        else:
            print_findings(findings)
    return 1 if count(findings, "problem") else 0


def examine() -> list[Finding]:
    """Look at everything; a check that fails itself is a problem, and the others go on."""
    torch_is_here = _torch_is_here()
    findings: list[Finding] = []
    left_out = []
    for check in CHECKS:
        if check.needs_torch and not torch_is_here:
            left_out.append(check.name)
            continue
        try:
            findings.extend(check.run())
        except Exception as error:
            todo = "please report this, with the command's output"
            findings.append(problem(check.name, f"the check itself failed: {type(error).__name__}: {error}", todo))
    if left_out:
        findings.append(note("left out", f"not looked at, for lack of torch: {', '.join(left_out)}"))
    return findings


def _torch_is_here() -> bool:
    try:
        importlib.import_module("torch")
    except Exception:  # whatever a broken installation raises; the check of torch says it
        return False
    return True
