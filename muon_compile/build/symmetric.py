"""Products known to be symmetric, as operators: a kernel that computes one triangle where there is one, else ``bmm``.

``muon_compile::symmetric_gram`` and ``muon_compile::symmetric_product`` are each one node of any graph. Which kernel
runs is decided by each call, from its operands: first those of ``register_symmetric_kernel``, in their order, then this
library's Triton kernel (``kernels.triton_symmetric``, NVIDIA GPUs), then ``torch.bmm`` and ``torch.baddbmm``.

A kernel may compute one triangle and mirror it. The Gram iteration bears that well, as long as all of its products do
the same, for then no rounding error has an antisymmetric part.

TorchAir has no converter for these operators: a plan for an NPU never has ``kernel="symmetric"``.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

_LIB = torch.library.Library("muon_compile", "FRAGMENT")
_LIB.define("symmetric_gram(Tensor x) -> Tensor")
_LIB.define("symmetric_product(Tensor a, Tensor b, Tensor? add, float beta, float alpha) -> Tensor")

# Tensor cores take bfloat16 from compute capability 8.0 on: CUDA C++ Programming Guide, Compute Capabilities.
_TRITON_CAPABILITY = (8, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SymmetricKernel:
    """A kernel for symmetric products; see ``register_symmetric_kernel``."""

    name: str
    is_available: Callable[[Tensor], bool]
    gram: Callable[[Tensor], Tensor]
    product: Callable[[Tensor, Tensor, Tensor | None, float, float], Tensor]


_KERNELS: list[SymmetricKernel] = []


def register_symmetric_kernel(
    name: str,
    *,
    is_available: Callable[[Tensor], bool],
    gram: Callable[[Tensor], Tensor],
    product: Callable[[Tensor, Tensor, Tensor | None, float, float], Tensor],
) -> Callable[[], None]:
    """Offer a kernel for symmetric products, ahead of this library's own and behind those offered before.

    It is asked at every call, so that it serves steps compiled before as well; a captured CUDA graph keeps what it
    captured. A kernel must be functional, work on the current stream and read nothing back. With quack, whose kernels
    are for compute capabilities from 9.0 (``quack.gemm_interface``; not run here, it needs such a GPU)::

        register_symmetric_kernel(
            "quack",
            is_available=lambda a: a.is_cuda and a.dtype in (torch.bfloat16, torch.float16) and a.shape[1] > 256,
            gram=lambda x: gemm_symmetric(x, x.mT),
            product=lambda a, b, add, beta, alpha: gemm_symmetric(a, b, C=add, beta=beta, alpha=alpha),
        )

    Args:
        name: Unique name, for messages.
        is_available: Whether it takes a first operand like this one, ``[B, m, k]`` with any strides: ask for its
            device, dtype and shape only.
        gram: ``x -> x x^T``, ``[B, m, k] -> [B, m, m]`` of the same dtype, accumulated in float32.
        product: ``(a, b, add, beta, alpha) -> alpha a b + beta add``; ``add`` may be None, and counts for nothing
            where ``beta`` is 0.

    Returns:
        A function that withdraws the kernel.

    Raises:
        ValueError: The name is taken.
    """
    taken = [_TRITON.name, "bmm", *(kernel.name for kernel in _KERNELS)]
    if name in taken:
        raise ValueError(
            f"register_symmetric_kernel: name: expected one not in {taken}, got {name!r}; withdraw the other first."
        )
    kernel = SymmetricKernel(name=name, is_available=is_available, gram=gram, product=product)
    _KERNELS.append(kernel)

    def withdraw() -> None:
        if kernel in _KERNELS:
            _KERNELS.remove(kernel)

    return withdraw


def symmetric_kernel_name(a: Tensor) -> str:
    """Name of the kernel that a product with ``a``, ``[B, m, k]``, would run; ``"bmm"`` where there is none for it."""
    kernel = _choose(a)
    return "bmm" if kernel is None else kernel.name


def _choose(a: Tensor) -> SymmetricKernel | None:
    for kernel in (*_KERNELS, _TRITON):
        if kernel.is_available(a):
            return kernel
    return None


@functools.lru_cache(maxsize=1)
def _triton() -> ModuleType | None:
    try:
        from muon_compile.kernels import triton_symmetric
    except ImportError as error:
        warnings.warn(
            "Symmetric products run as torch.bmm, in full: their kernel needs triton, which cannot be imported "
            f"({error}). Install the triton that belongs to this torch.",
            stacklevel=2,
        )
        return None
    return triton_symmetric


@functools.lru_cache(maxsize=64)
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def _triton_available(a: Tensor) -> bool:
    # AMD GPUs are "cuda" devices too, with capabilities of another meaning.
    if a.device.type != "cuda" or torch.version.hip is not None or _capability(a.device) < _TRITON_CAPABILITY:
        return False
    module = _triton()
    return module is not None and bool(module.fits(a))


def _triton_gram(x: Tensor) -> Tensor:
    from muon_compile.kernels import triton_symmetric

    return triton_symmetric.gram(x)


def _triton_product(a: Tensor, b: Tensor, add: Tensor | None, beta: float, alpha: float) -> Tensor:
    from muon_compile.kernels import triton_symmetric

    return triton_symmetric.product(a, b, add, beta, alpha)


_TRITON = SymmetricKernel(name="triton", is_available=_triton_available, gram=_triton_gram, product=_triton_product)


def _checked(result: Tensor, a: Tensor, kernel: SymmetricKernel) -> Tensor:
    """Hold a kernel to what the graph was compiled for: shape, dtype, device and layout of ``_empty``."""
    expected = (a.shape[0], a.shape[1], a.shape[1])
    if tuple(result.shape) != expected or result.dtype != a.dtype or result.device != a.device:
        raise ValueError(
            f"Symmetric kernel {kernel.name!r}: expected a result of shape {expected}, {a.dtype}, on {a.device}, got "
            f"{tuple(result.shape)}, {result.dtype}, on {result.device}; correct the kernel or withdraw it."
        )
    return result.contiguous()


def _empty(a: Tensor) -> Tensor:
    return a.new_empty((a.shape[0], a.shape[1], a.shape[1]))


def _gram(x: Tensor) -> Tensor:
    kernel = _choose(x)
    if kernel is not None:
        return _checked(kernel.gram(x), x, kernel)
    # Into a tensor of our own: autocast, which would round float32 operands, leaves such calls alone.
    return torch.bmm(x, x.mT, out=_empty(x))


def _product(a: Tensor, b: Tensor, add: Tensor | None, beta: float, alpha: float) -> Tensor:
    kernel = _choose(a)
    if kernel is not None:
        return _checked(kernel.product(a, b, add, beta, alpha), a, kernel)
    if add is None:
        add, beta = a.new_zeros((1, 1, 1)), 0.0
    return torch.baddbmm(add, a, b, beta=beta, alpha=alpha, out=_empty(a))


def _gram_fake(x: Tensor) -> Tensor:
    return _empty(x)


def _product_fake(a: Tensor, b: Tensor, add: Tensor | None, beta: float, alpha: float) -> Tensor:
    return _empty(a)


_LIB.impl("symmetric_gram", _gram, "CompositeExplicitAutograd")
_LIB.impl("symmetric_product", _product, "CompositeExplicitAutograd")
torch.library.register_fake("muon_compile::symmetric_gram", _gram_fake, lib=_LIB)
torch.library.register_fake("muon_compile::symmetric_product", _product_fake, lib=_LIB)


def symmetric_gram(x: Tensor) -> Tensor:
    """``x x^T`` of each matrix.

    Args:
        x: ``[B, m, k]``, any strides.

    Returns:
        ``[B, m, m]``, contiguous, of the same dtype, accumulated in float32.

    Raises:
        ValueError: ``x`` has not three dimensions.
    """
    if x.dim() != 3:
        raise ValueError(
            f"symmetric_gram: x: expected a batch [B, m, k], got shape {tuple(x.shape)}; unsqueeze(0) one."
        )
    result: Tensor = torch.ops.muon_compile.symmetric_gram(x)
    return result


def symmetric_product(a: Tensor, b: Tensor, add: Tensor | None = None, beta: float = 0.0, alpha: float = 1.0) -> Tensor:
    """``alpha a b + beta add`` of each matrix, which the caller knows to be symmetric.

    That is so where ``b = a^T``, or where ``a`` and ``b`` are symmetric and commute; ``add`` must be symmetric.
    Half of a result that is not is lost, without a word.

    Args:
        a: ``[B, m, k]``, any strides.
        b: ``[B, k, m]``, of the same dtype.
        add: ``[B, m, m]``, of the same dtype, or None; it counts for nothing where ``beta`` is 0.
        beta: Factor of ``add``.
        alpha: Factor of the product.

    Returns:
        ``[B, m, m]``, contiguous, of the same dtype, accumulated in float32.

    Raises:
        ValueError: Shapes or dtypes do not fit.
    """
    fits = a.dim() == b.dim() == 3 and a.shape[0] == b.shape[0] and a.shape[1:] == b.shape[:0:-1]
    if not fits:
        raise ValueError(
            "symmetric_product: a, b: expected shapes [B, m, k] and [B, k, m], got "
            f"{tuple(a.shape)} and {tuple(b.shape)}; pass b = a.mT for a Gram matrix."
        )
    if add is not None and tuple(add.shape) != (a.shape[0], a.shape[1], a.shape[1]):
        raise ValueError(
            f"symmetric_product: add: expected shape {(a.shape[0], a.shape[1], a.shape[1])}, got {tuple(add.shape)}; "
            "expand() it."
        )
    dtypes = [x.dtype for x in (a, b, add) if x is not None]
    if len(set(dtypes)) > 1:
        raise ValueError(f"symmetric_product: expected operands of one dtype, got {dtypes}; cast them.")
    result: Tensor = torch.ops.muon_compile.symmetric_product(a, b, add, beta, alpha)
    return result
