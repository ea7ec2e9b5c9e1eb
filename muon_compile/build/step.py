"""The step of a plan, phase by phase, over stacked tensors; and its pure form over lists of tensors.

Within a wave every part goes through a phase before any part goes on to the next: gradients and momentum, then
Newton-Schulz, then the update. A backend then fuses a phase's pointwise work across parts; and what one part sends is
on its way while another's products run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from muon_compile.build.adamw import adamw_update
from muon_compile.build.guard import Guard, look_at_gradients
from muon_compile.build.lion import lion_update
from muon_compile.build.looks import Looks, Watch, watcher
from muon_compile.build.momentum import direction, exact_direction
from muon_compile.build.orthogonalize import Norms, orthogonalize, shape_scale
from muon_compile.build.phases import Phases, run_side_by_side
from muon_compile.build.probe_ops import row_squares, squared_error
from muon_compile.build.probes import Tally
from muon_compile.build.rounding import MASTER, STEPS, advance, counted
from muon_compile.build.sharded import agree_on_presence, exchange_part, exchanged_scale
from muon_compile.build.vanishing import Vanishing
from muon_compile.config import AdamWConfig, MuonConfig
from muon_compile.plan.exchange import Place
from muon_compile.plan.marks import Phase
from muon_compile.plan.plan import Batch, Bucket, Plan, Stretch, Wave
from muon_compile.spec import Algorithm

Hyper = Sequence[Mapping[str, Tensor]]
BucketState = Mapping[str, Tensor]
_FIRST_MOMENT: Mapping[Algorithm, str] = {"muon": "momentum_buffer", "adamw": "exp_avg", "lion": "exp_avg"}


class Boundary(Protocol):
    """Where stacked tensors meet lists of parameters. One implementation is pure, one per backend writes in place.

    ``B`` is the number of parameters of the part at hand, ``shape`` the shape of each, as in ``part.bucket``.
    """

    in_place: bool
    """Whether intermediate results may be overwritten: nothing but the step itself will see them."""
    probing: bool
    """Whether the figures of ``build.probes`` are wanted. Else the step has nothing of them."""

    def working_on(self, phase: Phase, parts: Sequence[int], batch: int | None = None) -> None:
        """What comes next is about (``plan.marks.Mark``); only those who look at the graph want to know."""

    def report(self, agreed: Tensor) -> None:
        """Keep the 0-d bool that says whether the ranks agreed on which gradients are there."""

    def grad_squares(self, part: Stretch) -> Tensor:
        """Sum of the squares of the part's gradients, 0-d."""

    def taken(self, finite: Tensor) -> None:
        """Count the step as skipped where the 0-d bool is False."""

    def vanished(self, counts: Mapping[int, Tensor]) -> None:
        """Count matrices that ``eps`` stands in for the norm of, 0-d by index of the bucket."""

    def next_wave(self, done: Sequence[Stretch], coming: Sequence[Stretch]) -> None:
        """The parts ``done`` are through; nothing of those ``coming`` may begin before that."""

    def pack(self, part: Stretch) -> Tensor:
        """The part's gradients as ``[B, *shape]``."""

    def load(self, part: Stretch) -> BucketState:
        """The part's stacked state."""

    def store(self, part: Stretch, name: str, value: Tensor) -> None:
        """Keep a new state tensor, rounded to the state's dtype."""

    def momentum(
        self, part: Stretch, mu: Tensor, mask: Tensor | None, scale: Tensor | None, dtype: torch.dtype | None
    ) -> tuple[Tensor, Tensor | None] | None:
        """New momentum, of gradients times the 0-d ``scale`` (None: 1), kept and its direction ``[B, *shape]``
        returned, rounded to ``dtype`` (None: float32 or wider), where the boundary has one operator for all of that;
        else None, and nothing is done. With the direction comes what it knows of the momentum's squares, ``[B]``."""

    def apply(self, part: Stretch, update: Tensor, decay: Tensor, step_size: Tensor | None) -> Tensor | None:
        """``P <- P * decay + update * step_size`` for every parameter of the part (``step_size`` None: 1). Where it is
        probing: sums of squares of P before and of ``update``, ``[2, B]``."""

    def weights(self, part: Stretch) -> Tensor:
        """The part's parameters as ``[B, *shape]``."""

    def write(self, part: Stretch, new: Tensor) -> None:
        """Make the part's parameters ``new``, ``[B, *shape]`` of their dtype."""

    def observe(self, sums: Mapping[int, Tensor]) -> None:
        """Keep the probes' sums by bucket index, ``[len(COLUMNS)]`` each."""


def run_step(
    plan: Plan,
    boundary: Boundary,
    hyper: Hyper,
    presence: Sequence[Tensor] | None = None,
    places: Mapping[int, Place] | None = None,
) -> None:
    """Run every wave of the plan against a boundary.

    Args:
        plan: The plan, as this rank runs it (``plan.localize``).
        boundary: Gives gradients and state, takes new state and updates.
        hyper: One mapping of 0-d tensors per hyperparameter group.
        presence: ``[B]`` bool per bucket, False where a parameter has no gradient; None: all are there. A plan with
            exchanges always takes it: ranks agree on it first, and where they do not nothing changes anywhere.
        places: Where this rank stands, for every part with an exchange.
    """
    if plan.exchanges:
        assert presence is not None and places is not None
        agreeing = {bucket for _, buckets in plan.agreements() for bucket in buckets}
        boundary.working_on("agree", [i for i, part in enumerate(plan.parts) if part.bucket in agreeing])
        presence, agreed = agree_on_presence(plan, presence, places)
        boundary.report(agreed)
    guard: Guard | None = None
    if plan.guarded:
        boundary.working_on("agree", range(len(plan.parts)))
        guard, presence = look_at_gradients(plan, boundary.grad_squares, presence, places or {})
        if guard.finite is not None:
            boundary.taken(guard.finite)
    looks = Looks(Tally(plan) if boundary.probing else None, Vanishing(plan) if plan.watched_norms() else None)
    given = _Given(hyper, presence, places or {}, guard, {})
    for index, wave in enumerate(plan.waves):
        if index:
            boundary.working_on("update", plan.waves[index - 1].parts)
            done = [plan.stretch(i) for i in plan.waves[index - 1].parts]
            boundary.next_wave(done, [plan.stretch(i) for i in wave.parts])
        _run_wave(plan, wave, boundary, given, looks)
    if looks.tally is not None:
        boundary.working_on("update", range(len(plan.parts)))
        boundary.observe(looks.tally.table())
    if looks.vanishing is not None:
        boundary.working_on("update", range(len(plan.parts)))
        boundary.vanished(looks.vanishing.table())


class _Given(NamedTuple):
    """What ``run_step`` was given for all waves."""

    hyper: Hyper
    presence: Sequence[Tensor] | None
    places: Mapping[int, Place]
    guard: Guard | None
    # Random roundings with this one, by the first parameter of a part; filled as they are needed.
    roundings: dict[int, Tensor]


def _run_wave(plan: Plan, wave: Wave, boundary: Boundary, given: _Given, looks: Looks) -> None:
    hyper, presence, places = given.hyper, given.presence, given.places
    tally = looks.tally
    views: dict[int, Tensor] = {}
    updates: dict[int, Tensor] = {}
    boundary.working_on("momentum", wave.parts)
    parts = {index: plan.stretch(index) for index in wave.parts}
    masks = {i: None if presence is None else p.of_rows(presence[p.part.bucket]) for i, p in parts.items()}
    for index, part in parts.items():
        boundary.working_on("momentum", (index,))
        if part.bucket.algorithm == "muon":
            views[index], squares = _muon_direction(plan, part, boundary, given, masks[index])
        else:
            updates[index], squares = _elementwise(part, boundary, given, masks[index]), None
        if tally is not None:
            if squares is None:
                squares = row_squares(boundary.load(part)[_FIRST_MOMENT[part.bucket.algorithm]])
            tally.momentum(index, squares)
    shared = [index for index, part in parts.items() if part.part.exchange is not None]
    watch = None if tally is None else watcher(plan, masks, tally)
    phases = [
        _exchange(plan, index, views[index], places[index], boundary, watch, looks.norms(plan, index, masks[index]))
        for index in shared
    ]
    heard = {index: looks.norms(plan, index, masks[index]) for index, p in parts.items() if p.bucket.view is not None}
    results, orthogonal = run_side_by_side(
        phases, lambda: _orthogonalize_wave(plan, wave, views, boundary, watch, heard)
    )
    exchanged = dict(zip(shared, results, strict=True))
    for index, part in parts.items():
        boundary.working_on("update", (index,))
        bucket, mask = part.bucket, masks[index]
        shrink = _column(hyper, bucket, "lr") * _column(hyper, bucket, "weight_decay")
        decay = 1 - shrink
        step_size: Tensor | None = None
        update = updates.get(index)
        if bucket.algorithm == "muon":
            if index in exchanged:
                update, step_size = exchanged[index], _column(hyper, bucket, "lr") * -exchanged_scale(part)
            else:
                update, step_size = _muon_update(bucket, orthogonal.get(index, []), hyper)
        assert update is not None
        if mask is not None:
            decay = torch.where(mask, decay, 1.0)
            step_size = torch.where(mask, 1.0 if step_size is None else step_size, 0.0).to(decay.dtype)
        if bucket.rounding == "nearest":
            both = boundary.apply(part, update, decay, step_size)
        else:
            both = _advance(part, boundary, given.roundings, (update, decay, step_size), mask)
        if tally is not None:
            assert both is not None
            tally.update(index, both, shrink, step_size, mask)


def _advance(
    part: Stretch,
    boundary: Boundary,
    roundings: dict[int, Tensor],
    change: tuple[Tensor, Tensor, Tensor | None],
    mask: Tensor | None,
) -> Tensor | None:
    """``Boundary.apply`` for parameters that are not just rounded to the nearest."""
    if part.bucket.rounding == "master":
        kept = boundary.load(part)[MASTER]
    else:
        # Counted once for a parameter that goes through in several parts, and read by nothing but that: a state that
        # is about to be overwritten has one reader.
        key = part.bucket.params[0]
        if key not in roundings:
            roundings[key] = counted(boundary.load(part)[STEPS], mask)
            boundary.store(part, STEPS, roundings[key])
        kept = roundings[key]
    base, new, master = advance(part, boundary.weights(part), kept, *change)
    both: Tensor | None = None
    if boundary.probing:
        both = torch.stack([row_squares(base), row_squares(change[0].to(base.dtype))])
    if master is not None:
        boundary.store(part, MASTER, master)
    boundary.write(part, new)
    return both


def _exchange(
    plan: Plan,
    index: int,
    update: Tensor,
    place: Place,
    boundary: Boundary,
    watch: Watch | None,
    norms: Callable[[Tensor, slice], None] | None,
) -> Phases:
    """``exchange_part``, that says what it is about whenever it goes on: other parts have been at work meanwhile."""
    now: list[Phase] = ["send"]

    def tell(phase: Phase) -> None:
        now[0] = phase
        boundary.working_on(phase, (index,))

    note = None if watch is None else functools.partial(watch, index)
    steps = exchange_part(plan.stretch(index), update, place, exact=plan.exact, tell=tell, watch=note, norms=norms)
    while True:
        tell(now[0])
        try:
            next(steps)
        except StopIteration as end:
            result: Tensor = end.value
            return result
        yield


def _muon_direction(
    plan: Plan, part: Stretch, boundary: Boundary, given: _Given, mask: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The directions as matrices; and the new momentum's sums of squares, where they came along."""
    bucket = part.bucket
    config, view = bucket.config, bucket.view
    assert isinstance(config, MuonConfig) and view is not None
    mu = _column(given.hyper, bucket, "momentum")
    # Rounded before the store, so that a backend reads momentum and gradient once for both.
    rounded = config.eps != "relative" and config.ns_dtype != "float16"
    dtype: torch.dtype | None = getattr(torch, config.ns_dtype) if rounded else None
    scale = None if given.guard is None else given.guard.scale
    made = None if plan.exact else boundary.momentum(part, mu, mask, scale, dtype)
    if made is None:
        grad, old = _gradients(part, boundary, given.guard), boundary.load(part)["momentum_buffer"]
        form = exact_direction if plan.exact else direction
        new, update = form(grad, old, _columns(mu, grad), config, None if mask is None else _columns(mask, grad))
        update = update if dtype is None else update.to(dtype)
        boundary.store(part, "momentum_buffer", new)
        made = update, None
    return made[0].reshape(bucket.size * view.stacks, view.rows, view.cols), made[1]


def _gradients(part: Stretch, boundary: Boundary, guard: Guard | None) -> Tensor:
    grad = boundary.pack(part)
    return grad if guard is None else guard.of(grad)


def _elementwise(part: Stretch, boundary: Boundary, given: _Given, mask: Tensor | None) -> Tensor:
    """AdamW or Lion."""
    config = part.bucket.config
    grad, state = _gradients(part, boundary, given.guard), boundary.load(part)
    values = {name: _column(given.hyper, part.bucket, name) for name in ("lr", "beta1", "beta2")}
    if isinstance(config, AdamWConfig):
        new, update = adamw_update(grad, state, values, config, mask)
    else:
        new, update = lion_update(grad, state, values, mask)
    for name, value in new.items():
        boundary.store(part, name, value)
    return update


def _orthogonalize_wave(
    plan: Plan,
    wave: Wave,
    views: Mapping[int, Tensor],
    boundary: Boundary,
    watch: Watch | None,
    heard: Mapping[int, Callable[[Tensor, slice], None] | None],
) -> dict[int, list[Tensor]]:
    """Newton-Schulz over every batch of the wave; per part the blocks of the result, in row order."""
    inputs = []
    for index in wave.batches:
        batch = plan.batches[index]
        boundary.working_on("orthogonalize", _parts_of(batch), index)
        pieces = [views[p.part].narrow(1, p.start, p.rows) for p in batch.pieces]
        inputs.append(pieces[0] if len(pieces) == 1 else torch.cat(pieces))
    outputs: dict[tuple[int, int], Tensor] = {}
    for index, x in zip(wave.batches, inputs, strict=True):
        batch = plan.batches[index]
        boundary.working_on("orthogonalize", _parts_of(batch), index)
        form, kernel, in_place = batch.form, batch.kernel, boundary.in_place
        counts = [p.num_matrices for p in batch.pieces]
        result = orthogonalize(
            x,
            batch.config,
            exact=plan.exact,
            form=form,
            kernel=kernel,
            in_place=in_place,
            norms=_hears_norms(batch, heard),
        )
        results = [result] if len(counts) == 1 else list(result.split(counts))
        for piece, part in zip(batch.pieces, results, strict=True):
            outputs[piece.part, piece.start] = part
            if watch is not None:
                watch(piece.part, squared_error(part, native=kernel == "native"), slice(None))
    blocks: dict[int, list[Tensor]] = {}
    for part_index, start in sorted(outputs):
        blocks.setdefault(part_index, []).append(outputs[part_index, start])
    return blocks


def _hears_norms(batch: Batch, heard: Mapping[int, Callable[[Tensor, slice], None] | None]) -> Norms | None:
    """Divides a batch's norms among the parts that it is of; None where none of them wants to hear."""
    listening = [heard[piece.part] for piece in batch.pieces]
    if not any(listening):
        return None

    def divide(norms: Tensor) -> None:
        counts = [piece.num_matrices for piece in batch.pieces]
        for hear, own in zip(listening, [norms] if len(counts) == 1 else norms.split(counts), strict=True):
            if hear is not None:
                hear(own, slice(None))

    return divide


def _parts_of(batch: Batch) -> list[int]:
    return sorted({piece.part for piece in batch.pieces})


def _muon_update(bucket: Bucket, blocks: Sequence[Tensor], hyper: Hyper) -> tuple[Tensor, Tensor]:
    """The bucket's update ``[B, *shape]`` and its step size ``-lr * scale``."""
    config, view = bucket.config, bucket.view
    assert isinstance(config, MuonConfig) and view is not None
    lr = _column(hyper, bucket, "lr")
    if not blocks:
        # No elements: nothing was orthogonalized, and there is nothing to move.
        dtype: torch.dtype = getattr(torch, config.ns_dtype)
        return torch.zeros((bucket.size, *bucket.shape), dtype=dtype, device=bucket.device), -lr
    scales = [shape_scale(config, rows, view.cols) for rows in view.blocks]
    if len(set(scales)) == 1:
        whole = blocks[0] if len(blocks) == 1 else torch.cat(list(blocks), dim=1)
        return whole.reshape(bucket.size, *bucket.shape), lr * -scales[0]
    scaled = [block.float() * scale for block, scale in zip(blocks, scales, strict=True)]
    return torch.cat(scaled, dim=1).reshape(bucket.size, *bucket.shape), -lr


def _column(hyper: Hyper, bucket: Bucket, name: str) -> Tensor:
    """A hyperparameter for a bucket: 0-d where one group owns the bucket, else ``[B]``."""
    runs: list[tuple[int, int]] = []
    for group in bucket.groups:
        if runs and runs[-1][0] == group:
            runs[-1] = (group, runs[-1][1] + 1)
        else:
            runs.append((group, 1))
    if len(runs) == 1:
        return hyper[runs[0][0]][name]
    return torch.cat([hyper[group][name].reshape(1).expand(count) for group, count in runs])


def _columns(value: Tensor, like: Tensor) -> Tensor:
    """Shape ``[B]`` so that it broadcasts over ``[B, ...]``; 0-d stays."""
    return value if value.dim() == 0 or like.dim() <= 1 else value.view(-1, *(1,) * (like.dim() - 1))
