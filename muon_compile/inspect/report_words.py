"""What a report says about a bucket in words: where it lies, what is done with it, by whom, and why."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from muon_compile.plan.exchange import GRAMS, OWNED, Exchange
from muon_compile.plan.plan import Bucket, Part, Plan, find_choice
from muon_compile.spec import MeshSpec

# Keys of buckets that have no strategy, beside the strategies' names.
ADAMW, LION, NO_EXCHANGE = "adamw", "lion", "none"
EVERY_RANK = "every rank"
# Ranks whose sizes are written out.
_SHOWN_RANKS = 8

STRATEGY_WORDS: dict[str, str] = {
    "local": "Every rank holds whole matrices; replicas share them out, and send each other the results.",
    "all_gather": "Every rank gathers every matrix whole, orthogonalizes all of them, and keeps its own rows.",
    "all_to_all": "Each matrix has one owner: rows travel to it, it orthogonalizes, and each rank gets its rows back.",
    "gather_broadcast": "Every rank gathers every matrix whole; its owner orthogonalizes it and sends it to all.",
    "gather_scatter": "Every rank gathers every matrix whole; its owner orthogonalizes it and sends the rows back.",
    "gram_all_reduce": "Grams of the rows are summed over ranks, and every rank iterates on all of the sums.",
    "gram_scatter": "Grams of the rows are summed at their owner, which iterates on them and sends the result to all.",
    "hierarchical_all_to_all": "An all-to-all in two steps, within nodes and between them: a rank has few peers.",
}
KEY_WORDS: dict[str, str] = {
    **STRATEGY_WORDS,
    NO_EXCHANGE: "Matrices lie whole where they are orthogonalized, so nothing is sent.",
    ADAMW: "AdamW works element by element, so nothing has to be made whole.",
    LION: "Lion works element by element, so nothing has to be made whole.",
}


def shape_words(shape: Sequence[int]) -> str:
    """``"768 × 3072"``; ``"scalar"`` without dims."""
    return " × ".join(map(str, shape)) or "scalar"


def mesh_words(mesh: MeshSpec) -> str:
    """``"2 replicate × 8 shard"``, with the mesh's name where it has one."""
    axes = " × ".join(f"{size} {axis}" for axis, size in mesh.axes) or "one rank"
    return f"{axes} of {mesh.name}" if mesh.name else axes


def strategy_key(bucket: Bucket, exchanges: Sequence[Exchange]) -> str:
    """What the bucket goes by in the report: its strategy, or one of the keys of buckets without."""
    if bucket.view is None:
        return LION if bucket.algorithm == "lion" else ADAMW
    return next((exchange.strategy for exchange in exchanges), NO_EXCHANGE)


def why(bucket: Bucket, key: str) -> str:
    """Why this strategy, in a sentence without a full stop."""
    layout = bucket.layout
    if bucket.choice is not None:
        return bucket.choice.reason
    if key in (ADAMW, LION):
        return KEY_WORDS[key].removesuffix(".")
    if key == "local":
        return "whole matrices with copies on several ranks: the replicas share the work"
    if layout is None:
        return "this rank alone has these parameters"
    if layout.axis is not None:
        return "the cut runs between matrices, so every rank holds whole ones of its own"
    return "every rank holds all of it and does all of it" if layout.mesh.num_ranks > 1 else "there is one rank"


def placement(bucket: Bucket) -> str:
    """Where a bucket's parameters lie."""
    layout = bucket.layout
    if layout is None:
        return "whole, on this rank alone"
    copies = layout.mesh.size(layout.replica_axis) if layout.replica_axis is not None else 1
    if layout.axis is None:
        return f"whole, on each of {layout.mesh.num_ranks} ranks" if layout.mesh.num_ranks > 1 else "whole, on one rank"
    cut = f"dim {layout.dim} cut over {len(layout.sizes)} ranks of axis {layout.axis}: {_sizes(layout.sizes)}"
    return f"{cut}; copies on {copies} ranks of axis {layout.replica_axis}" if copies > 1 else cut


def _sizes(sizes: Sequence[int]) -> str:
    if len(set(sizes)) == 1:
        return f"{sizes[0]} each"
    return ", ".join(map(str, sizes)) if len(sizes) <= _SHOWN_RANKS else f"{min(sizes)} to {max(sizes)} each"


def forms(plan: Plan, bucket: Bucket, exchanges: Sequence[Exchange]) -> list[dict[str, str]]:
    """Form and kernel of the bucket's matrices, each with its reason."""
    if bucket.view is None:
        return []
    made = []
    if exchanges:
        own = [find_choice(plan.choices, bucket, rows) for rows in dict.fromkeys(bucket.view.blocks)]
        reasons = {(choice.form, choice.kernel): choice.reason for choice in own}
        for exchange in {(e.form, e.kernel): e for e in exchanges}.values():
            reason = reasons.get((exchange.form, exchange.kernel), "blocks of one matrix go through one form")
            if exchange.strategy in GRAMS:
                reason = f"{exchange.strategy} iterates on sums of Grams, so this is its only form"
            rows, cols = whole_size(exchange)
            of = ", ".join(shape_words((block, cols)) for block in dict.fromkeys(exchange.blocks or (rows,)))
            made.append({"form": exchange.form, "kernel": exchange.kernel, "reason": reason, "of": of})
        return made
    for rows in dict.fromkeys(bucket.view.blocks):
        choice = find_choice(plan.choices, bucket, rows)
        of = shape_words((rows, bucket.view.cols))
        made.append({"form": choice.form, "kernel": choice.kernel, "reason": choice.reason, "of": of})
    return made


def whole_size(exchange: Exchange) -> tuple[int, int]:
    """Rows and columns of a whole unit as it lies in memory."""
    return (exchange.cols, exchange.rows) if exchange.transposed else (exchange.rows, exchange.cols)


def part_name(part: Part, bucket: Bucket) -> str:
    """``"muon3"``, or the stretch of it: ``"muon3[0:8]"``; of a stack also ``"muon3[0][4:8]"``."""
    name = bucket.name if (part.start, part.stop) == (0, bucket.size) else f"{bucket.name}[{part.start}:{part.stop}]"
    return name if part.stack is None else f"{bucket.name}[{part.start}][{part.stack[0]}:{part.stack[1]}]"


def solvers(part: Part, bucket: Bucket) -> list[str]:
    """By which rank each parameter of a part is orthogonalized; ``EVERY_RANK`` where that is no single one's work."""
    exchange, layout = part.exchange, bucket.layout
    count = part.stop - part.start
    if exchange is None or layout is None:
        alone = layout is None or layout.mesh.num_ranks == 1
        return ["this rank" if alone else EVERY_RANK] * count
    stops, labels = _runs(exchange)
    if not labels:
        return [EVERY_RANK] * count
    made, at = [], 0
    for param in range(count):
        # Of a stack that is cut between its matrices each rank counts its own units, and all shares are alike.
        first, last = (exchange.num_units * edge // count for edge in (param, param + 1))
        while at < len(stops) - 1 and stops[at] <= first:
            at += 1
        end = at
        while end < len(stops) - 1 and stops[end] < last:
            end += 1
        found = labels[at : end + 1]
        made.append(found[0] if len(found) == 1 else f"{found[0]} to {found[-1]}")
    return made


def _runs(exchange: Exchange) -> tuple[list[int], list[str]]:
    """Where each consecutive run of units that someone owns stops, and who that is; empty where nobody owns any."""
    owned = exchange.strategy in OWNED
    if not owned and not exchange.replica_counts:
        return [], []
    counts, labels = [], []
    for replica, units in enumerate(exchange.replica_counts or (exchange.num_units,)):
        prefix = [f"{exchange.replica_axis} {replica}"] if exchange.replica_counts else []
        rows = exchange.owned(replica) if owned else (units,)
        for rank, number in enumerate(rows):
            if number:
                counts.append(number)
                labels.append(", ".join([*prefix, f"{exchange.shard_axis} {rank}"] if owned else prefix))
    return list(itertools.accumulate(counts)), labels
