"""The plan: buckets, Newton-Schulz batches and waves, and the collectives it promises."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import cattrs

from muon_compile.config import AdamWConfig, MuonConfig
from muon_compile.plan.forms import parse_form
from muon_compile.spec import FLOAT_BYTES, Algorithm, CollectiveSpec, MatrixSpec, MatrixView, MeshSpec

PLAN_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Parameters that share shape, dtypes, device and config; their state lives in one stacked tensor.

    Args:
        name: Unique name within the plan.
        algorithm: ``"muon"`` or ``"adamw"``.
        params: Indices into ``Plan.specs``; row i of the stacked state belongs to ``params[i]``.
        groups: Hyperparameter group of each of them.
        shape: Shape of one parameter; the stacked state is ``[B, *shape]``.
        dtype: dtype of the parameters.
        grad_dtype: dtype of the gradients.
        state_dtype: dtype of the momentum or of AdamW's moments.
        device: Device of all of them.
        config: The mathematics.
        view: How one parameter reads as matrices (Muon), else None.
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
    config: MuonConfig | AdamWConfig
    view: MatrixView | None

    @property
    def size(self) -> int:
        """Number of parameters, B."""
        return len(self.params)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Rows ``start`` to ``start + rows`` of every matrix of a bucket, one run of a batch.

    Args:
        bucket: Index into ``Plan.buckets``.
        start: First row within the bucket's matrix view.
        rows: Rows per matrix.
        num_matrices: Matrices that the piece contributes, B * stacks.
    """

    bucket: int
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
        return self.num_matrices * form.flops(self.rows, self.cols, symmetric=self.kernel != "graph")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wave:
    """Buckets and batches whose temporaries are alive together; waves run one after the other."""

    buckets: tuple[int, ...]
    batches: tuple[int, ...]
    temp_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that decides the graph, as plain data: equal plans build equal graphs.

    Args:
        specs: The parameters, in order.
        buckets: Stacked storage.
        batches: Newton-Schulz work.
        waves: Order of execution.
        collectives: What the graph will issue, in order; empty on one rank.
        mesh: The mesh it was made for.
        strategy: The strategy of every bucket; ``local`` on one rank.
        exact: Stock operator order and roundings.
        version: Format of the plan.
    """

    specs: tuple[MatrixSpec, ...]
    buckets: tuple[Bucket, ...]
    batches: tuple[Batch, ...]
    waves: tuple[Wave, ...]
    collectives: tuple[CollectiveSpec, ...] = ()
    mesh: MeshSpec = MeshSpec()
    strategy: str = "local"
    exact: bool = False
    version: int = PLAN_VERSION

    @property
    def num_groups(self) -> int:
        """Hyperparameter groups."""
        return 1 + max([-1, *[spec.group for spec in self.specs]])

    @property
    def digest(self) -> str:
        """Hex digest of the whole plan; ranks that will work together have equal ones."""
        text = json.dumps(_CONVERTER.unstructure(self), sort_keys=True)
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


def numel_bytes(numel: int, dtype: str) -> int:
    """Bytes of ``numel`` elements of ``dtype``."""
    return numel * FLOAT_BYTES[dtype]


def _make_converter() -> cattrs.Converter:
    converter = cattrs.Converter(forbid_extra_keys=True)

    kinds: dict[str, type[MuonConfig] | type[AdamWConfig]] = {"muon": MuonConfig, "adamw": AdamWConfig}

    # The configs check themselves, so their names, numbers and tuples pass through as they are.
    def unstructure(config: MuonConfig | AdamWConfig | None) -> dict[str, Any] | None:
        if config is None:
            return None
        algorithm = "muon" if isinstance(config, MuonConfig) else "adamw"
        return {"algorithm": algorithm} | {name: getattr(config, name) for name in config.__dataclass_fields__}

    def structure(data: dict[str, Any] | None, _: object) -> MuonConfig | AdamWConfig | None:
        if data is None:
            return None
        values = {name: _tuples(value) for name, value in data.items()}
        return kinds[values.pop("algorithm")](**values)

    for kind in (MuonConfig, AdamWConfig, MuonConfig | AdamWConfig, MuonConfig | AdamWConfig | None):
        converter.register_unstructure_hook(kind, unstructure)
        converter.register_structure_hook(kind, structure)
    return converter


def _tuples(value: Any) -> Any:
    return tuple(_tuples(v) for v in value) if isinstance(value, (list, tuple)) else value


_CONVERTER = _make_converter()
