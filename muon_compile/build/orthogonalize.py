"""Newton-Schulz orthogonalization of a stack of matrices."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from muon_compile.build.coefficients import schedule
from muon_compile.build.opaque import matrix_amax, matrix_norm, opaque_newton_schulz, opaque_normalize
from muon_compile.config import MuonConfig, Triple
from muon_compile.plan.forms import Form, parse_form

# Hears the matrices' norms.
Norms: TypeAlias = Callable[[Tensor], None]

# Below this a Frobenius norm of float32 entries has lost its digits to underflow (squares under 1e-38).
_TINY = 1e-30


def shape_scale(config: MuonConfig, rows: int, cols: int) -> float:
    """Factor on lr for a ``rows x cols`` matrix (``semantics``: scale(m, n))."""
    if isinstance(config.scale, float):
        return config.scale
    if config.scale == "original":
        return math.sqrt(max(1.0, rows / cols))
    if config.scale in ("match_rms_adamw", "rms_norm"):
        return config.rms * math.sqrt(max(rows, cols))
    if config.scale == "spectral_norm":
        return math.sqrt(rows / cols)
    return 1.0


def normalize(x: Tensor, config: MuonConfig, dtype: torch.dtype, norms: Norms | None = None) -> Tensor:
    """Divide each matrix by its Frobenius norm, accumulated in float32 or better, and cast.

    Args:
        x: ``[B, m, n]``, any floating dtype.
        config: Its ``eps`` and ``eps_mode``.
        dtype: dtype of the result.
        norms: Hears the norms, ``[B, 1, 1]``.

    Returns:
        ``[B, m, n]`` of ``dtype``, each matrix of norm at most 1; an all-zero matrix stays zero.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    if config.eps == "relative":
        largest = matrix_amax(x).to(wide)
        x = x.to(wide) / torch.where(largest > 0, largest, 1.0)
    # Round once, here: both passes below then read the narrow tensor, and the norm is of what the products see. float16
    # has too little range for that.
    x = x if dtype == torch.float16 else x.to(dtype)
    norm = matrix_norm(x)
    if norms is not None:
        norms(norm)
    if config.eps == "relative":
        norm = norm.clamp(min=_TINY)
    else:
        assert isinstance(config.eps, float)
        norm = norm.clamp(min=config.eps) if config.eps_mode == "clamp" else norm + config.eps
        if config.eps == 0.0:
            norm = torch.where(norm > 0, norm, 1.0)
    result: Tensor = (x / norm).to(dtype)
    return result


def newton_schulz(x: Tensor, config: MuonConfig, form: Form, kernel: str) -> Tensor:
    """Iterate ``R = X X^T; X <- a X + (b R + c R R) X`` over the schedule, in one of its forms (``plan.forms``).

    Args:
        x: ``[B, m, n]`` with m <= n, normalized, in the products' dtype.
        config: Its ``coefficients`` and ``ns_steps``.
        form: Segments and the precision of their small matrices. A product's dtype of float32 or more is precise
            enough: there every precision but ``"none"`` means that dtype.
        kernel: ``"graph"`` or ``"symmetric"``.

    Returns:
        ``[B, m, n]`` of the same dtype.
    """
    triples = schedule(config)
    assert form.steps == len(triples) and kernel in ("graph", "symmetric")
    start = 0
    for steps in form.segments:
        part = triples[start : start + steps]
        start += steps
        if form.gram == "none" or (form.gram == "half" and steps == 1):
            # a stays out of the small matrix, which would round it.
            for a, b, c in part:
                gram = gram_product(x, x.dtype, kernel)
                x = torch.baddbmm(x, symmetric_product(gram, gram, kernel, add=gram, beta=b, alpha=c), x, beta=a)
        elif form.gram == "split" and x.dtype.itemsize < 4:
            x = apply_gram(_split_segment(x, part, kernel), x)
        else:
            dtype = x.dtype if form.gram == "half" else wide_dtype(x)
            x = apply_gram(iterate_gram(gram_product(x, dtype, kernel), part, kernel), x)
    return x


def wide_dtype(x: Tensor) -> torch.dtype:
    """float32, or x's dtype where that is wider."""
    return torch.promote_types(x.dtype, torch.float32)


def gram_product(x: Tensor, out_dtype: torch.dtype, kernel: str) -> Tensor:
    """``X X^T`` of ``[B, m, n]``: ``[B, m, m]`` of ``out_dtype``, its sums in float32 or better."""
    if out_dtype != x.dtype:
        x = _rounded(x.to(out_dtype), x.dtype)
    if kernel == "symmetric":
        from muon_compile.build.symmetric import symmetric_gram

        return symmetric_gram(x)
    return torch.bmm(x, x.mT)


def symmetric_product(
    a: Tensor, b: Tensor, kernel: str, *, add: Tensor | None = None, beta: float = 1.0, alpha: float = 1.0
) -> Tensor:
    """``beta * add + alpha * a b`` of ``[B, m, m]`` whose product is symmetric (they are polynomials in one matrix)."""
    if kernel == "symmetric":
        from muon_compile.build import symmetric

        return symmetric.symmetric_product(a, b, add, beta if add is not None else 0.0, alpha)
    if add is None:
        return torch.bmm(a, b) if alpha == 1.0 else torch.bmm(a, b) * alpha
    return torch.baddbmm(add, a, b, beta=beta, alpha=alpha)


def apply_gram(q: Tensor, x: Tensor) -> Tensor:
    """``Q X``, where Q ``[B, m, m]`` may be wider than X ``[B, m, n]``; ``[B, m, n]`` of X's dtype.

    Q spans a factor of several hundred: rounded to X's dtype it would lose the directions that it enlarges least. So a
    wider Q is applied as two halves, the low one first: only its small product is rounded twice.
    """
    if q.dtype == x.dtype:
        return torch.bmm(q, x)
    high = _rounded(q, torch.bfloat16)
    low = (q - high).to(x.dtype)
    return torch.baddbmm(torch.bmm(low, x), high.to(x.dtype), x)


def _rounded(a: Tensor, dtype: torch.dtype) -> Tensor:
    """A float32 tensor with the bits of mantissa that ``dtype``, bfloat16 or float16, has; still float32.

    By its bits, since Inductor drops a cast to a narrower dtype and back: the low half of a split would become zero,
    and a Gram matrix not be that of the X that Q is applied to.
    """
    dropped = 16 if dtype == torch.bfloat16 else 13
    return ((a.view(torch.int32) + (1 << dropped - 1)) & -(1 << dropped)).view(torch.float32)


def identity_like(r: Tensor) -> Tensor:
    """``I`` of the trailing two dims of ``[B, m, m]``. No ``eye``: TorchAir does not lower it."""
    index = torch.arange(r.shape[-1], dtype=torch.int32, device=r.device)
    return (index[:, None] == index[None, :]).to(r.dtype)


def iterate_gram(r: Tensor, triples: Sequence[Triple], kernel: str) -> Tensor:
    """Q of a segment that starts from the Gram matrices ``[B, m, m]``, every small matrix in their dtype."""
    identity, q = identity_like(r), None
    for index, (a, b, c) in enumerate(triples):
        z = symmetric_product(r, r, kernel, add=r, beta=b, alpha=c)
        q = z + a * identity if q is None else symmetric_product(q, z, kernel, add=q, beta=a)
        if index < len(triples) - 1:
            p = symmetric_product(r, z, kernel, add=r, beta=a)
            r = symmetric_product(z, p, kernel, add=p, beta=a)
    assert q is not None
    return q


def _split_segment(x: Tensor, triples: Sequence[Triple], kernel: str) -> Tensor:
    """Q of a segment in float32, every small matrix kept as a high and a low bfloat16 half.

    Here the halves are float32 tensors with bfloat16 values, since a plain ``bmm`` of bfloat16 tensors would round its
    float32 sums.
    """
    halves = tuple[Tensor, Tensor]

    def split(a: Tensor) -> halves:
        high = _rounded(a, torch.bfloat16)
        return high, (a - high).to(torch.bfloat16).to(a.dtype)

    def product(a: halves, b: halves, add: halves, beta: float, alpha: float = 1.0) -> halves:
        total = symmetric_product(a[0], b[1], kernel, add=add[0] + add[1], beta=beta, alpha=alpha)
        total = symmetric_product(a[1], b[0], kernel, add=total, alpha=alpha)
        return split(symmetric_product(a[0], b[0], kernel, add=total, alpha=alpha))

    r = split(gram_product(x, wide_dtype(x), kernel))
    q: halves | None = None
    for index, (a, b, c) in enumerate(triples):
        z = product(r, r, r, b, c)
        q = split(z[0] + z[1] + a * identity_like(z[0])) if q is None else product(q, z, q, a)
        if index < len(triples) - 1:
            p = product(r, z, r, a)
            r = product(z, p, p, a)
    assert q is not None
    return q[0] + q[1]


def orthogonalize(
    update: Tensor,
    config: MuonConfig,
    *,
    exact: bool = False,
    form: str = "standard",
    kernel: str = "graph",
    in_place: bool = False,
    norms: Norms | None = None,
) -> Tensor:
    """Orthogonalize each matrix of a stack.

    Args:
        update: ``[B, m, n]``, any floating dtype.
        config: The group's mathematics; its ``ns_dtype`` is a dtype, not ``"auto"``.
        exact: Take ``torch.optim.Muon``'s own operators and roundings.
        form: Name of the iteration's form (``plan.forms``).
        kernel: What runs it (``plan.Batch``).
        in_place: The native kernel may overwrite ``update``.
        norms: Hears the norms that the matrices are divided by, ``eps`` aside: ``[B, 1, 1]``; not with ``exact``.

    Returns:
        ``[B, m, n]`` of the products' dtype.
    """
    assert config.ns_dtype != "auto"
    parsed = parse_form(form, config.ns_steps)
    assert not exact or (parsed.gram == "none" and kernel == "graph")
    if kernel == "native":
        from muon_compile.build.native_ops import native_orthogonalize

        if norms is not None:
            norms(matrix_norm(update))
        return native_orthogonalize(update, config, parsed, in_place=in_place)
    dtype: torch.dtype = getattr(torch, config.ns_dtype)
    tall = update.shape[-2] > update.shape[-1]
    x = update.mT if tall else update
    if exact:
        assert isinstance(config.eps, float)
        x = opaque_newton_schulz(opaque_normalize(x.to(dtype), config.eps), schedule(config))
    else:
        x = newton_schulz(normalize(x, config, dtype, norms), config, parsed, kernel)
    return x.mT if tall else x
