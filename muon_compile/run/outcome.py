"""What a step left for the host to look at: whether its ranks agreed, and whether it was skipped."""

from __future__ import annotations

import torch

from muon_compile.distributed import local_tensor
from muon_compile.run.binding import Binding


def check_agreement(binding: Binding) -> None:
    """Raise where the last step's ranks disagreed on which gradients are there; that step changed nothing.

    Raises:
        RuntimeError: They did.
    """
    if binding.agreement is None or bool(binding.agreement):
        return
    binding.agreement.fill_(True)
    raise RuntimeError(
        "Ranks disagree on which parameters have a gradient; expected the same on all ranks that share one. "
        "The step changed nothing anywhere. Run the same modules on every rank, or give the others zeros."
    )


def check_skips(binding: Binding) -> None:
    """Raise where the last step was skipped.

    Raises:
        RuntimeError: It was; names parameters whose gradient is not finite, where they still have it.
    """
    if binding.skipped is None:
        return
    count = int(binding.skipped)
    if count == binding.skips_told:
        return
    binding.skips_told = count
    found = []
    for spec, param in zip(binding.reading.specs, binding.reading.params, strict=True):
        if param.grad is not None and not bool(torch.isfinite(local_tensor(param.grad)).all()):
            found.append(spec.name)
    named = f" Here it is that of {found[:5]}{' and others' if len(found) > 5 else ''}." if found else ""
    raise RuntimeError(
        f"A gradient is not finite; expected finite ones.{named} The step changed nothing on any rank. "
        "CompileConfig(nonfinite='skip') goes on with the next step by itself."
    )
