"""Live parameters to plain specs; the only file that looks at what kind of tensor a parameter is."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from muon_compile.config import AdamWConfig, MuonConfig
from muon_compile.spec import Algorithm, MatrixSpec


def dtype_name(dtype: torch.dtype) -> str:
    """``"float32"`` for ``torch.float32``, and so on."""
    return str(dtype).removeprefix("torch.")


def check_tensor(name: str, tensor: object, algorithm: str) -> None:
    """Refuse a parameter that the step cannot update in place.

    Raises:
        TypeError: It is no tensor.
        ValueError: It is complex, integer, sparse, non-contiguous or overlaps itself.
        NotImplementedError: It is a DTensor or another tensor subclass with a layout of its own.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"Parameter {name!r}: expected a torch.Tensor, got {type(tensor).__name__}.")
    if torch.nn.parameter.is_lazy(tensor):
        raise ValueError(
            f"Parameter {name!r}: expected a parameter with a shape, got a lazy one; run the model once before."
        )
    placements = getattr(tensor, "placements", None)
    if placements is not None:
        raise NotImplementedError(
            f"Parameter {name!r}: expected a plain tensor, got a {type(tensor).__name__} with placements {placements}; "
            "sharded parameters are not in this version."
        )
    if tensor.layout != torch.strided:
        raise ValueError(f"Parameter {name!r}: expected a dense tensor, got layout {tensor.layout}.")
    if not tensor.is_floating_point():
        hint = "Leave it to another optimizer."
        raise ValueError(f"Parameter {name!r}: expected a real floating dtype, got {tensor.dtype}. {hint}")
    if algorithm == "muon" and tensor.dim() < 2:
        raise ValueError(
            f"Parameter {name!r}: Muon takes matrices (2-D) or stacks of them, got shape {tuple(tensor.shape)}. "
            "Give it to AdamW, as muon_compile.route(model) does."
        )
    if not tensor.is_contiguous():
        raise ValueError(
            f"Parameter {name!r}: expected contiguous memory, got shape {tuple(tensor.shape)} with strides "
            f"{tensor.stride()}; replace it by param.data = param.data.contiguous() before wrapping."
        )


def check_overlap(named: Iterable[tuple[str, Tensor]]) -> None:
    """Refuse parameters that share memory; views of one flat buffer that do not overlap are fine.

    Raises:
        ValueError: Two parameters overlap; names both.
    """
    spans: dict[str, list[tuple[int, int, str]]] = {}
    for name, tensor in named:
        if tensor.device.type == "meta" or tensor.numel() == 0:
            continue
        start = tensor.data_ptr()
        span = (start, start + tensor.numel() * tensor.element_size(), name)
        spans.setdefault(str(tensor.device), []).append(span)
    for found in spans.values():
        found.sort()
        for (_, end, first), (start, _, second) in itertools.pairwise(found):
            if start < end:
                raise ValueError(
                    f"Parameters {first!r} and {second!r} overlap in memory; expected distinct memory. "
                    "Give tied weights once."
                )


def inspect_params(
    named: Iterable[tuple[str, Tensor]] | Mapping[str, Tensor],
    *,
    config: MuonConfig | AdamWConfig | None = None,
    algorithm: Algorithm | None = None,
    group: int = 0,
) -> list[MatrixSpec]:
    """Read parameters into specs.

    Args:
        named: Pairs of name and parameter, such as ``model.named_parameters()``. A gradient that is there gives the
            gradient's dtype; otherwise it is the parameter's.
        config: The mathematics, for every one of them; None leaves it to ``make_plan``.
        algorithm: ``"muon"`` or ``"adamw"`` for every one of them; None takes Muon for two and more dims and AdamW
            for the rest (``route`` is finer: it knows embeddings and heads).
        group: Hyperparameter group of every one of them.

    Raises:
        TypeError, ValueError, NotImplementedError: A parameter that the step cannot take; names it.
    """
    pairs = list(named.items() if isinstance(named, Mapping) else named)
    specs = []
    for name, tensor in pairs:
        if isinstance(config, MuonConfig):
            which: Algorithm = "muon"
        elif isinstance(config, AdamWConfig):
            which = "adamw"
        else:
            which = algorithm or ("muon" if isinstance(tensor, Tensor) and tensor.dim() >= 2 else "adamw")
        check_tensor(name, tensor, which)
        grad = tensor.grad
        specs.append(
            MatrixSpec(
                name=name,
                shape=tuple(tensor.shape),
                dtype=dtype_name(tensor.dtype),
                grad_dtype=dtype_name(tensor.dtype if grad is None else grad.dtype),
                device=str(tensor.device),
                algorithm=which,
                group=group,
                config=config,
            )
        )
    check_overlap(pairs)
    return specs
