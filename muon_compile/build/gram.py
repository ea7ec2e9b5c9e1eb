"""Strategies that never make a unit whole: ranks add up ``X_i^T X_i``, iterate on that, and apply ``Q`` to their rows.

They pay where units are much taller than wide: what travels is ``cols x cols`` per unit, whatever the rows.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from muon_compile.build import collectives
from muon_compile.build.coefficients import schedule
from muon_compile.build.orthogonalize import Norms, apply_gram, gram_product, identity_like, iterate_gram, wide_dtype
from muon_compile.build.phases import Phases, Solve, Tell
from muon_compile.config import MuonConfig
from muon_compile.plan.exchange import Exchange, Place

# Below this a norm taken from the Gram's trace counts as this: squares of float32 entries 1e-4 of it still have all
# their digits (the smallest normal number is 1.2e-38), and the largest Q stays finite.
_SMALLEST_NORM = 1e-15


def gram_polynomial(r: Tensor, config: MuonConfig, kernel: str = "graph", norms: Norms | None = None) -> Tensor:
    """``Q`` of the whole schedule, as one segment (``plan.forms``), with the normalization in it.

    Args:
        r: ``X^T X`` of each matrix before its normalization, ``[k, n, n]``, float32 or wider.
        config: Its ``coefficients``, ``ns_steps``, ``eps`` and ``eps_mode``; ``eps`` is a number. A norm under 1e-15
            counts as 1e-15, also where ``eps`` is smaller; one whose square leaves r's range has no meaning here.
        kernel: ``"graph"`` or ``"symmetric"``.
        norms: Hears the norms, ``[k, 1, 1]``.

    Returns:
        ``[k, n, n]`` of r's dtype, finite for an all-zero ``r``; ``X Q`` is the orthogonalized X.
    """
    assert isinstance(config.eps, float)
    norm = (r * identity_like(r)).sum(dim=(-2, -1), keepdim=True).sqrt()
    if norms is not None:
        norms(norm)
    norm = norm.clamp(min=config.eps) if config.eps_mode == "clamp" else norm + config.eps
    norm = norm.clamp(min=_SMALLEST_NORM)
    return iterate_gram(r / norm / norm, schedule(config), kernel) / norm


def gram_all_reduce(x: Tensor, exchange: Exchange, place: Place, gram: Solve, tell: Tell) -> Phases:
    """Every rank has every unit's Gram sum and iterates on all of them.

    Args:
        x: Shards ``[num_units, sizes[shard_rank], cols]`` of one replica's units.
        exchange: Sizes; its kernel.
        place: This rank.
        gram: Gram sums ``[k, cols, cols]``, float32 or wider, any k, to Q of the same shape and dtype: ``O = X Q``.
        tell: Hears when products begin and when they are over.

    Returns:
        Shards of the orthogonalized units, of ``x``'s shape and dtype.
    """
    sums = collectives.all_reduce(_local_gram(x, exchange, tell), place.shard_group)
    yield
    return _apply(x, gram(collectives.wait(sums)), tell)


def gram_scatter(x: Tensor, exchange: Exchange, place: Place, gram: Solve, tell: Tell) -> Phases:
    """Each owner has its units' Gram sums, iterates on them and gives every rank their Q; both travel as triangles.

    Args, Returns: As of ``gram_all_reduce``; ``exchange`` gives the owners too.
    """
    owned = exchange.owned(0)
    mine, longest = owned[place.shard_rank], max(owned)
    sent = pack_triangles(_local_gram(x, exchange, tell))
    if min(owned) < longest:
        # Every rank gets as many as the one that owns the most.
        sent = torch.cat([collectives.padded(run, 0, longest) for run in sent.split(owned)])
    sums = collectives.reduce_scatter(sent, len(owned), place.shard_group)
    yield
    came = collectives.wait(sums)[:mine]
    runs = collectives.gather_runs(
        pack_triangles(gram(unpack_triangles(came, exchange.cols))), owned, place.shard_group
    )
    yield
    return _apply(x, unpack_triangles(collectives.joined(runs, owned), exchange.cols), tell)


def pack_triangles(a: Tensor) -> Tensor:
    """The lower triangles of matrices that are symmetric up to rounding, ``[k, n, n]`` to ``[k, n (n + 1) / 2]``.

    The mean with the transpose is packed: mirroring one triangle of a product loses up to 100 times of its accuracy.

    Source: rectangular full packed format (Gustavson et al., LAPACK Working Note 199). The last columns' triangle,
    transposed, fits above that of the first columns, so whole blocks are enough and nothing is gathered by index.
    """
    half = (a.shape[-1] + 1) // 2
    rest = a.shape[-1] - half
    a = (a + a.mT) * 0.5
    # Both as [rest + 1, half]: for an even n one row lower, for an odd n one column to the right.
    first = pad(a[:, :half, :half], (0, 0, rest + 1 - half, 0))
    last = pad(a[:, half:, half:], (half - rest, 0, 0, 1))
    both = torch.where(_below(first, rest + 1 - half), first, last)
    return torch.cat([both.flatten(1), a[:, half:, :half].flatten(1)], dim=1)


def unpack_triangles(packed: Tensor, n: int) -> Tensor:
    """Symmetric matrices ``[k, n, n]`` of what ``pack_triangles`` made of them."""
    half = (n + 1) // 2
    rest = n - half
    both = packed[:, : (rest + 1) * half].unflatten(1, (rest + 1, half))
    square = packed[:, (rest + 1) * half :].unflatten(1, (rest, half))
    first, last = both[:, rest + 1 - half :], both[:, :rest, half - rest :]
    first = torch.where(_below(first, 0), first, first.mT)
    last = torch.where(_below(last, 1), last.mT, last)
    return torch.cat([torch.cat([first, square.mT], dim=2), torch.cat([square, last], dim=2)], dim=1)


def _below(a: Tensor, offset: int) -> Tensor:
    """Where ``row >= column + offset`` in matrices of a's shape."""
    rows, columns = (torch.arange(size, dtype=torch.int32, device=a.device) for size in a.shape[-2:])
    return rows[:, None] >= columns[None, :] + offset


def _local_gram(x: Tensor, exchange: Exchange, tell: Tell) -> Tensor:
    tell("orthogonalize")
    # In float32, where products of narrower entries are exact.
    result = gram_product(x.mT, wide_dtype(x), "symmetric" if exchange.kernel == "symmetric" else "graph")
    tell("send")
    return result


def _apply(x: Tensor, q: Tensor, tell: Tell) -> Tensor:
    tell("orthogonalize")
    result = apply_gram(q.mT, x.mT).mT
    tell("return")
    return result
