"""The plan: buckets, Newton-Schulz batches and waves, and the collectives it promises."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import cattrs

from muon_compile.config import Config, MuonConfig
from muon_compile.plan.convert import make_converter
from muon_compile.plan.exchange import Exchange, StrategyChoice
from muon_compile.plan.forms import parse_form
from muon_compile.spec import (
    FLOAT_BYTES,
    Algorithm,
    CollectiveSpec,
    MatrixSpec,
    MatrixView,
    MeshSpec,
    Rounding,
    ShardLayout,
)

PLAN_VERSION = 3
_CONVERTER = make_converter()


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Parameters that share shape, dtypes, device and config; their state lives in one stacked tensor.

    Args:
        name: Unique name within the plan.
        algorithm: ``"muon"``, ``"adamw"`` or ``"lion"``.
        params: Indices into ``Plan.specs``; row i of the stacked state belongs to ``params[i]``.
        groups: Hyperparameter group of each of them.
        shape: Shape of one parameter; the stacked state is ``[B, *shape]``.
        dtype: dtype of the parameters.
        grad_dtype: dtype of the gradients.
        state_dtype: dtype of the momentum or of AdamW's moments.
        device: Device of all of them.
        config: The mathematics.
        view: How one parameter reads as matrices (Muon), else None.
        layout: How each of them lies on a mesh; None: this rank alone has them. In a rank's own plan (``localize``)
            shape and view are the shard's.
        strategy: How matrices that lie on several ranks are made whole; None where none does.
        choice: Why this strategy.
        rounding: How new parameters become their dtype: ``"nearest"``; ``"stochastic"``; or beside a ``"master"``, a
            float32 copy in the state.
        first: In a rank's own plan, where its shard begins along the dim that is cut.
    """

    name: str
    algorithm: Algorithm
    params: tuple[int, ...]
    groups: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    grad_dtype: str
    state_dtype: str
    device: str
    config: Config
    view: MatrixView | None
    layout: ShardLayout | None = None
    strategy: str | None = None
    choice: StrategyChoice | None = None
    rounding: Rounding = "nearest"
    first: int = 0

    @property
    def size(self) -> int:
        """Number of parameters, B."""
        return len(self.params)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What of a bucket goes through the step in one wave: all of it, or where that needs too much memory a stretch.

    Args:
        bucket: Index into ``Plan.buckets``.
        start: First parameter, counted within the bucket.
        stop: The one after the last.
        stack: Of a single parameter ``[E, m, n]``, the first of its matrices and the one after the last; None: all.
        exchange: How its matrices are made whole and shared out; None where that takes no communication.
    """

    bucket: int
    start: int
    stop: int
    stack: tuple[int, int] | None = None
    exchange: Exchange | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """A part resolved against its bucket: how to cut a parameter list, and stacked tensors, down to it.

    Args:
        part: The part.
        whole: Its bucket.
        bucket: The part as a bucket of its own, by the name of the whole.
    """

    part: Part
    whole: Bucket
    bucket: Bucket

    def of_params(self, tensors: Sequence[Any]) -> list[Any]:
        """The part's parameters, or gradients, out of one tensor for every parameter of the plan."""
        chosen = [tensors[i] for i in self.bucket.params]
        return chosen if self.part.stack is None else [t[slice(*self.part.stack)] for t in chosen]

    def of_rows(self, rows: Any) -> Any:
        """The part of a tensor ``[B]``, one value for every parameter of the bucket."""
        everything = (self.part.start, self.part.stop) == (0, self.whole.size)
        return rows if everything else rows[self.part.start : self.part.stop]

    def of_state(self, stacked: Any) -> Any:
        """The part of a tensor ``[B, *shape]`` or ``[B]``."""
        mine = self.of_rows(stacked)
        return mine if self.part.stack is None or mine.ndim == 1 else mine[:, slice(*self.part.stack)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Rows ``start`` to ``start + rows`` of every matrix of a part, one run of a batch.

    Args:
        part: Index into ``Plan.parts``.
        start: First row within the bucket's matrix view.
        rows: Rows per matrix.
        num_matrices: Matrices that the piece contributes.
    """

    part: int
    start: int
    rows: int
    num_matrices: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Matrices ``[B, rows, cols]`` that run through Newton-Schulz together.

    Args:
        name: Unique name within the plan.
        rows: m of each matrix.
        cols: n of each matrix.
        device: Device of all of them.
        config: The mathematics; only its normalization and iteration fields matter here.
        pieces: Where the matrices come from, in order.
        form: Name of the iteration's form (``plan.forms``).
        kernel: What runs it: ``"graph"``, nodes of the graph; ``"symmetric"``, the same with an operator for
            products known to be symmetric; ``"native"``, this library's CPU kernel, one call for the whole batch.
        reason: Why this form and kernel.
    """

    name: str
    rows: int
    cols: int
    device: str
    config: MuonConfig
    pieces: tuple[Piece, ...]
    form: str
    kernel: str
    reason: str

    @property
    def num_matrices(self) -> int:
        """B."""
        return sum(piece.num_matrices for piece in self.pieces)

    @property
    def flops(self) -> int:
        """Floating point operations of the iteration in its form."""
        form = parse_form(self.form, self.config.ns_steps)
        narrow = FLOAT_BYTES[self.config.ns_dtype] < FLOAT_BYTES["float32"]
        return self.num_matrices * form.flops(self.rows, self.cols, symmetric=self.kernel != "graph", narrow=narrow)


@dataclass(frozen=True, slots=True, kw_only=True)
class FormChoice:
    """Form and kernel of all matrices of one shape, device and iteration.

    Args:
        rows: m.
        cols: n.
        device: Their device.
        config: The mathematics; only its normalization and iteration fields matter here.
        form: Name of the iteration's form.
        kernel: What runs it.
        reason: Why.
    """

    rows: int
    cols: int
    device: str
    config: MuonConfig
    form: str
    kernel: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Wave:
    """Parts and batches whose temporaries are alive together; waves run one after the other.

    Args:
        parts: Indices into ``Plan.parts``.
        batches: Indices into ``Plan.batches``.
        temp_bytes: Memory that the wave's temporaries take at once, in bytes.
    """

    parts: tuple[int, ...]
    batches: tuple[int, ...]
    temp_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NormSum:
    """One sum over ranks that a guarded step needs before it begins.

    Args:
        mesh: The mesh.
        axis: Its axis that is summed over.
        sharded: Whether the axis cuts the buckets, so that squares add up; else their copies only agree.
        buckets: Indices into ``Plan.buckets``.
    """

    mesh: MeshSpec
    axis: str
    sharded: bool
    buckets: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that decides the graph, as plain data: equal plans build equal graphs.

    Args:
        specs: The parameters, in order.
        buckets: Stacked storage.
        parts: The buckets, cut where they would need too much memory at once.
        choices: Form and kernel for every kind of matrix.
        batches: Newton-Schulz work without communication; on a mesh, that of rank 0.
        waves: Order of execution.
        collectives: What the graph will issue, in order; empty on one rank.
        mesh: The mesh it was made for.
        strategy: The strategy of every bucket that names none of its own.
        exact: Stock operator order and roundings.
        native: The passes over gradients, momentum and parameters on the CPU are this library's kernels.
        clip_grad_norm: What all gradients' norm is clipped to; None: it is not.
        skip_nonfinite: A NaN or an infinity in any gradient leaves everything as it was, on all ranks.
        version: Format of the plan.
    """

    specs: tuple[MatrixSpec, ...]
    buckets: tuple[Bucket, ...]
    parts: tuple[Part, ...]
    choices: tuple[FormChoice, ...]
    batches: tuple[Batch, ...]
    waves: tuple[Wave, ...]
    collectives: tuple[CollectiveSpec, ...] = ()
    mesh: MeshSpec = MeshSpec()
    strategy: str = "local"
    exact: bool = False
    native: bool = False
    clip_grad_norm: float | None = None
    skip_nonfinite: bool = False
    version: int = PLAN_VERSION

    @property
    def num_groups(self) -> int:
        """Hyperparameter groups."""
        return 1 + max([-1, *[spec.group for spec in self.specs]])

    @property
    def temp_bytes(self) -> int:
        """Most memory that temporaries take at once, in bytes, beside the CPU kernel's own scratch."""
        return max((wave.temp_bytes for wave in self.waves), default=0)

    def agreements(self) -> list[tuple[tuple[tuple[str, int, bool], ...], tuple[int, ...]]]:
        """What ranks must agree on before a step: axes (name, size, whether it shards), and the buckets exchanged."""
        found: dict[tuple[MeshSpec, tuple[tuple[str, int, bool], ...]], list[int]] = {}
        for part in self.parts:
            layout = self.buckets[part.bucket].layout
            if part.exchange is None or layout is None:
                continue
            # Replicas that repeat the work exchange nothing, but must take the same step all the same.
            pairs = ((part.exchange.shard_axis, True), (layout.replica_axis, False))
            axes = tuple((axis, layout.mesh.size(axis), sharded) for axis, sharded in pairs if axis is not None)
            buckets = found.setdefault((layout.mesh, axes), [])
            if part.bucket not in buckets:
                buckets.append(part.bucket)
        # Copies stay alike: what is not exchanged joins in, on meshes that agree on something anyway. Whole matrices of
        # a rank's own (experts) may lack a gradient there alone, so only their copies have to agree.
        for index, bucket in enumerate(self.buckets):
            keys = [key for key in found if bucket.layout is not None and key[0] == bucket.layout.mesh]
            if not keys or any(index in buckets for buckets in found.values()):
                continue
            assert bucket.layout is not None
            replica, key = bucket.layout.replica_axis, max(keys, key=lambda key: len(key[1]))
            if bucket.view is not None and bucket.layout.axis is not None:
                if replica is None:
                    continue
                key = (key[0], ((replica, key[0].size(replica), False),))
            found.setdefault(key, []).append(index)
        return [(axes, tuple(buckets)) for (_, axes), buckets in found.items()]

    @property
    def exchanges(self) -> bool:
        """Whether matrices are exchanged among ranks, which then agree on gradients first."""
        return any(part.exchange is not None for part in self.parts)

    @property
    def guarded(self) -> bool:
        """Whether a step looks at all gradients before it begins."""
        return self.clip_grad_norm is not None or self.skip_nonfinite

    def watched_norms(self) -> tuple[int, ...]:
        """Buckets whose matrices' norms a step compares with ``eps``: where it clips, and ``eps`` is a number."""
        watching = self.clip_grad_norm is not None
        configs = [bucket.config for bucket in self.buckets]
        return tuple(
            index
            for index, config in enumerate(configs)
            if watching and isinstance(config, MuonConfig) and isinstance(config.eps, float) and config.eps > 0.0
        )

    def norm_sums(self) -> list[NormSum]:
        """What ranks add up before a guarded step, in order: over every axis that cuts gradients, their squares; over
        every axis, where one that is not finite skips the step, also how many ranks have one."""
        found: dict[tuple[MeshSpec, str, bool], list[int]] = {}
        for index, bucket in enumerate(self.buckets if self.guarded else ()):
            layout = bucket.layout
            if layout is None:
                continue
            axes = [(layout.axis, True)] + ([(layout.replica_axis, False)] if self.skip_nonfinite else [])
            for axis, sharded in axes:
                if axis is not None:
                    found.setdefault((layout.mesh, axis, sharded), []).append(index)
        return [
            NormSum(mesh=mesh, axis=axis, sharded=sharded, buckets=tuple(buckets))
            for (mesh, axis, sharded), buckets in found.items()
        ]

    def stretch(self, index: int) -> Stretch:
        """Part ``index`` with its bucket."""
        return resolve_part(self.buckets, self.parts[index])

    @property
    def digest(self) -> str:
        """Hex digest of the plan, its reasons apart; ranks that will work together have equal ones."""
        data = _CONVERTER.unstructure(self)
        for item in (*data["batches"], *data["choices"]):
            del item["reason"]
        for bucket in data["buckets"]:
            del bucket["choice"]
        text = json.dumps(data, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def to_json(self) -> str:
        """The plan as JSON text, readable by ``Plan.from_json``."""
        return json.dumps(_CONVERTER.unstructure(self), indent=1)

    @staticmethod
    def from_json(text: str) -> Plan:
        """Read a plan back.

        Raises:
            ValueError: The text is no plan, or one of another version.
        """
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"Plan.from_json: expected JSON from Plan.to_json, got unreadable text: {error}."
            ) from error
        version = data.get("version") if isinstance(data, dict) else None
        if version != PLAN_VERSION:
            raise ValueError(
                f"Plan.from_json: expected a plan of version {PLAN_VERSION}, got {version!r}; make the plan again."
            )
        try:
            return _CONVERTER.structure(data, Plan)
        except (cattrs.BaseValidationError, KeyError, TypeError) as error:
            lines = "; ".join(cattrs.transform_error(error))
            raise ValueError(f"Plan.from_json: expected a plan from Plan.to_json, got: {lines}.") from error

    def describe(self) -> str:
        """The plan as a table for people."""
        from muon_compile.plan.describe import describe_plan

        return describe_plan(self)


def resolve_part(buckets: Sequence[Bucket], part: Part) -> Stretch:
    """A part with its bucket, and as a bucket of its own."""
    whole = buckets[part.bucket]
    bucket = replace(whole, params=whole.params[part.start : part.stop], groups=whole.groups[part.start : part.stop])
    if part.stack is not None:
        assert whole.view is not None and bucket.size == 1
        count = part.stack[1] - part.stack[0]
        view = replace(whole.view, stacks=whole.view.stacks // whole.shape[0] * count)
        bucket = replace(bucket, shape=(count, *whole.shape[1:]), view=view)
    return Stretch(part=part, whole=whole, bucket=bucket)


def find_choice(choices: Sequence[FormChoice], bucket: Bucket, rows: int) -> FormChoice:
    """The choice for the blocks of ``rows`` rows of a bucket's matrices."""
    assert bucket.view is not None and isinstance(bucket.config, MuonConfig)
    wanted, cols, device = iteration_key(bucket.config), bucket.view.cols, bucket.device
    alike = (c for c in choices if c.rows == rows and c.cols == cols and c.device == device)
    return next(c for c in alike if iteration_key(c.config) == wanted)


def iteration_key(config: MuonConfig) -> tuple[object, ...]:
    """Matrices of one shape, device and key may run through Newton-Schulz together."""
    return (config.ns_dtype, config.ns_steps, config.coefficients, config.eps, config.eps_mode)


def numel_bytes(numel: int, dtype: str) -> int:
    """Bytes of ``numel`` elements of ``dtype``."""
    return numel * FLOAT_BYTES[dtype]
