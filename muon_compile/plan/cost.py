"""Predicted time of one Newton-Schulz batch, from a machine's figures.

A batch is ``B`` matrices ``m x n``; ``r = min(m, n)``, ``c = max(m, n)``, ``s`` steps to a segment. Three costs, in
seconds: products (FLOP over FLOP/s), memory (bytes over bytes/s) and the host (operators times seconds). An operator,
or in the native kernel a matrix, is first fetched and then computed with, so they add up::

    seconds = host + gemm + memory
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from muon_compile.plan.forms import Form
from muon_compile.plan.hardware import Hardware
from muon_compile.spec import FLOAT_BYTES

Regime = Literal["host", "memory", "GEMM"]

# Norm and division of every batch; on the graph also: casts of X and the identity in every Gram segment, and cutting a
# small matrix in two halves.
_NORMALIZE_OPS, _SEGMENT_OPS, _SPLIT_OPS = 2, 3, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One batch: ``num_matrices`` matrices ``rows x cols``, products in ``dtype``."""

    num_matrices: int
    rows: int
    cols: int
    dtype: str

    @property
    def sides(self) -> tuple[int, int]:
        """The shorter and the longer side."""
        return min(self.rows, self.cols), max(self.rows, self.cols)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Predicted seconds of one batch.

    Args:
        gemm_seconds: Products.
        memory_seconds: Traffic to and from memory.
        host_seconds: Operators called by the host.
    """

    gemm_seconds: float
    memory_seconds: float
    host_seconds: float

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.host_seconds + self.gemm_seconds + self.memory_seconds

    @property
    def regime(self) -> Regime:
        """What bounds it: the largest of the three."""
        costs: tuple[tuple[Regime, float], ...] = (
            ("GEMM", self.gemm_seconds),
            ("memory", self.memory_seconds),
            ("host", self.host_seconds),
        )
        return max(costs, key=lambda item: item[1])[0]


def predict(work: Work, form: Form, kernel: str, hardware: Hardware) -> Cost:
    """Predict a batch's time in a form on a kernel.

    Args:
        work: The batch.
        form: The iteration's form.
        kernel: ``"graph"``, ``"symmetric"`` or ``"native"``.
        hardware: The machine's figures.
    """
    return Cost(
        gemm_seconds=_gemm_seconds(work, form, kernel, hardware),
        memory_seconds=_traffic_bytes(work, form, kernel, hardware) / hardware.bytes_per_second,
        host_seconds=_operators(work, form, kernel) * hardware.op_seconds,
    )


class _Products(NamedTuple):
    """What a form's products are on a kernel.

    Args:
        dtype: dtype of X's own products: the applications, and the Grams where the small matrices have it too.
        small_dtype: dtype of the Grams and the small products.
        inner: Products for one small product: high times high, low and the reverse where a matrix is two halves.
        apply: Products for one application: two where Q is wider than X, and applied as two halves.
    """

    dtype: str
    small_dtype: str
    inner: int
    apply: int


def _products(work: Work, form: Form, kernel: str) -> _Products:
    # float32 is precise enough for every form: there a Gram's matrices are of X's dtype.
    if form.gram in ("none", "half") or FLOAT_BYTES[work.dtype] >= FLOAT_BYTES["float32"]:
        return _Products(work.dtype, work.dtype, 1, 1)
    inner = 3 if form.gram == "split" else 1
    # A bmm rounds its sums to its operands' dtype, so the graph multiplies halves as float32; a native one need not.
    return _Products(work.dtype, work.dtype if kernel == "native" else "float32", inner, 2)


def _gemm_seconds(work: Work, form: Form, kernel: str, hardware: Hardware) -> float:
    """``B`` times the FLOP of every kind of product over its rate at side ``r``, the shortest of its three.

    ::

        Grams X X^T      one for every segment       2 r^2 c   (half where one triangle is enough: not by bmm)
        small products   sum of 4 s - 3              2 r^3     (half likewise; three for one when split)
        applications     one for every segment       2 r^2 c   (two for one where Q is wider than X)
    """
    r, c = work.sides
    kinds = _products(work, form, kernel)
    small, large = form.products()
    half = 1 if kernel == "graph" else 2
    symmetric = (len(form.segments) * 2 * r * r * c + small * kinds.inner * 2 * r**3) / half
    applies = large * kinds.apply * 2 * r * r * c
    small_rate = hardware.rate(kernel, kinds.small_dtype, r)
    # The symmetric operator has no part in the applications.
    rate = hardware.rate("native" if kernel == "native" else "graph", kinds.dtype, r)
    return work.num_matrices * (symmetric / small_rate + applies / rate)


def _traffic_bytes(work: Work, form: Form, kernel: str, hardware: Hardware) -> float:
    """Bytes read and written beyond the cache.

    On the graph every operator goes over the whole batch. Passes over X: the normalization reads it twice and writes
    it; a Gram reads it, and writes and reads a wider copy where there is one; an application reads X and its addend
    and writes (twice, where Q is wider). A small product reads three small matrices and writes one. The native kernel
    takes matrix after matrix: X is read and written once, or, as far as one matrix outgrows the cache, read once and
    then read and written for every segment; the small matrices stay in cache.

    What fits into the cache costs nothing: traffic counts by the fraction ``1 - cache / working set``.
    """
    r, c = work.sides
    kinds = _products(work, form, kernel)
    segments, (small, _) = len(form.segments), form.products()
    large_bytes, small_bytes = r * c * FLOAT_BYTES[kinds.dtype], r * r * FLOAT_BYTES[kinds.small_dtype]
    num = work.num_matrices
    if kernel == "native":
        whole = 2 * large_bytes * beyond_cache(2 * num * large_bytes, hardware)
        again = (2 * segments - 1) * large_bytes * beyond_cache(2 * large_bytes + 4 * small_bytes, hardware)
        return num * (whole + again)
    copied = 2 * r * c * FLOAT_BYTES[kinds.small_dtype] if kinds.small_dtype != kinds.dtype else 0
    traffic = 3 * large_bytes + segments * (large_bytes + copied + 3 * kinds.apply * large_bytes)
    traffic += small * kinds.inner * 4 * small_bytes
    return num * traffic * beyond_cache(2 * num * (large_bytes + small_bytes), hardware)


def beyond_cache(working_bytes: int, hardware: Hardware) -> float:
    """The fraction of a working set that does not fit into the cache."""
    return max(0.0, 1.0 - hardware.cache_bytes / max(working_bytes, 1))


def _operators(work: Work, form: Form, kernel: str) -> int:
    """Operators that the host calls: one for each product and what lies between them; the native kernel is one."""
    if kernel == "native":
        return 1
    kinds = _products(work, form, kernel)
    small, large = form.products()
    each = kinds.inner + (_SPLIT_OPS if kinds.inner > 1 else 0)
    between = 0 if form.gram == "none" else _SEGMENT_OPS * len(form.segments)
    return _NORMALIZE_OPS + len(form.segments) + small * each + large * kinds.apply + between
