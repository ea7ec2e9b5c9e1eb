"""What changed between two plans, in words and by the parameters' names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace

from muon_compile.config import MuonConfig
from muon_compile.plan.exchange import Exchange
from muon_compile.plan.plan import Bucket, FormChoice, Plan, iteration_key
from muon_compile.plan.sharding import rank_flops
from muon_compile.spec import MeshSpec

# Names shown of the parameters that share a change, and ranks whose counts are written out.
_SHOWN_NAMES, _SHOWN_RANKS = 2, 8


def diff_plans(a: Plan, b: Plan) -> list[str]:
    """What changed from plan ``a`` to plan ``b``: one line for each change and all parameters that share it.

    Empty where both do the same; what else a choice's reason may name, such as predicted times, is no change.
    """
    if a == b:
        return []
    lines = [*_settings(a, b), *_params(a, b), *_totals(a, b)]
    return lines or _elsewhere(a, b)


def _changed(what: str, old: object, new: object) -> list[str]:
    return [f"{what}: {old} -> {new}"] if old != new else []


def _settings(a: Plan, b: Plan) -> Iterator[str]:
    yield from _changed("mesh", _axes(a.mesh), _axes(b.mesh))
    yield from _changed("strategy asked for", a.strategy, b.strategy)
    yield from _changed("exact", a.exact, b.exact)
    yield from _changed("native passes", a.native, b.native)


def _axes(mesh: MeshSpec) -> str:
    axes = " x ".join(f"{size} {axis}" for axis, size in mesh.axes) or "one rank"
    return f"{axes} of {mesh.name!r}" if mesh.name else axes


# -- by parameter ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Side:
    """A bucket with all that the plan decides about it."""

    bucket: Bucket
    choices: tuple[FormChoice, ...]
    exchanges: tuple[Exchange, ...]


# What is compared of a parameter, by its name: the value that decides, and its words.
_Aspect = tuple[Callable[[_Side], object], Callable[[_Side], str]]


def _params(a: Plan, b: Plan) -> Iterator[str]:
    """Parameters added and removed; then, aspect by aspect, those in both that changed alike."""
    old, new = _home_of(a), _home_of(b)
    for what, names in (("added", [n for n in new if n not in old]), ("removed", [n for n in old if n not in new])):
        if names:
            yield f"{what}: {_named(names)}"
    kept = [name for name in old if name in new]
    if kept != [name for name in new if name in old]:
        yield f"order: {_named(kept)} come in another order"
    # Parameters of the same two buckets and groups share every change.
    pairs: dict[tuple[tuple[int, int], tuple[int, int]], list[str]] = {}
    for name in kept:
        pairs.setdefault((old[name], new[name]), []).append(name)
    olds, news = _sides(a), _sides(b)
    found: dict[tuple[str, str], list[str]] = {}
    for ((i, group), (j, other)), names in pairs.items():
        changes = _changes(olds[i], news[j])
        for change in [*changes, ("group", f"{group} -> {other}")] if group != other else changes:
            found.setdefault(change, []).extend(names)
    order = [*_ASPECTS, "mathematics", "group"]
    for (what, words), names in sorted(found.items(), key=lambda item: order.index(item[0][0])):
        yield f"{what} of {_named(names)}: {words}"


def _changes(old: _Side, new: _Side) -> Iterator[tuple[str, str]]:
    """Each aspect that changed, with its words."""
    for what, (value, words) in _ASPECTS.items():
        if value(old) != value(new):
            left, right = words(old), words(new)
            yield what, f"{left}, cut otherwise" if left == right else f"{left} -> {right}"
    config, other = old.bucket.config, new.bucket.config
    if type(config) is type(other):
        for field in fields(config):
            before, after = getattr(config, field.name), getattr(other, field.name)
            if before != after:
                yield "mathematics", f"{field.name} {before} -> {after}"


def _home_of(plan: Plan) -> dict[str, tuple[int, int]]:
    """Bucket and hyperparameter group of every parameter, in the plan's order."""
    indices = {param: index for index, bucket in enumerate(plan.buckets) for param in bucket.params}
    return {spec.name: (indices[i], spec.group) for i, spec in enumerate(plan.specs)}


def _sides(plan: Plan) -> list[_Side]:
    known = {(c.rows, c.cols, c.device, iteration_key(c.config)): c for c in plan.choices}
    exchanges: list[list[Exchange]] = [[] for _ in plan.buckets]
    for part in plan.parts:
        if part.exchange is not None:
            exchanges[part.bucket].append(part.exchange)
    sides = []
    for bucket, found in zip(plan.buckets, exchanges, strict=True):
        choices: list[FormChoice] = []
        if bucket.view is not None and isinstance(bucket.config, MuonConfig):
            key = iteration_key(bucket.config)
            choices = [known[rows, bucket.view.cols, bucket.device, key] for rows in dict.fromkeys(bucket.view.blocks)]
        sides.append(_Side(bucket=bucket, choices=tuple(choices), exchanges=tuple(found)))
    return sides


def _named(names: Sequence[str]) -> str:
    if len(names) == 1:
        return repr(names[0])
    shown = ", ".join(map(repr, names[:_SHOWN_NAMES]))
    more = f", ... {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
    return f"{len(names)} parameters ({shown}{more})"


def _shape(side: _Side) -> str:
    return "x".join(map(str, side.bucket.shape)) or "scalar"


def _dtypes(side: _Side) -> str:
    bucket = side.bucket
    kept = "" if bucket.rounding == "nearest" else f", rounding {bucket.rounding}"
    return f"{bucket.dtype}, gradient {bucket.grad_dtype}, state {bucket.state_dtype}{kept}"


def _placement(side: _Side) -> str:
    layout = side.bucket.layout
    if layout is None:
        return "on each rank its own"
    cut = f"dim {layout.dim} over {len(layout.sizes)} ranks of {layout.axis!r}" if layout.axis else "whole"
    copies = f", {layout.mesh.size(layout.replica_axis)} copies" if layout.replica_axis is not None else ""
    return cut + copies


def _strategy(side: _Side) -> str:
    choice = side.bucket.choice
    name = side.bucket.strategy or "none needed"
    return name if choice is None else f"{name} ({choice.reason})"


def _form(side: _Side) -> tuple[tuple[str, str], ...]:
    """Form and kernel: of exchanged units, else of every kind of matrix."""
    own = [(exchange.form, exchange.kernel) for exchange in side.exchanges]
    return tuple(dict.fromkeys(own or [(choice.form, choice.kernel) for choice in side.choices]))


def _form_words(side: _Side) -> str:
    reasons = {(choice.form, choice.kernel): choice.reason for choice in side.choices}
    return ", ".join(
        f"{form} by {kernel}" + (f" ({reasons[form, kernel]})" if (form, kernel) in reasons else "")
        for form, kernel in _form(side)
    )


def _owned(side: _Side) -> list[list[int]]:
    """Units by rank, all parts together, replica by replica; empty where no rank has its own."""
    tables = [e.owner_counts or tuple((count,) for count in e.replica_counts) for e in side.exchanges]
    return [[sum(column) for column in zip(*same, strict=True)] for same in zip(*tables, strict=True)]


def _owners(side: _Side) -> str:
    rows = _owned(side)
    counts = [count for row in rows for count in row]
    if not counts:
        return "every rank" if side.exchanges else "no exchange"
    if len(counts) <= _SHOWN_RANKS:
        return "; ".join("/".join(map(str, row)) for row in rows) + " units by rank"
    low, high = min(counts), max(counts)
    each = str(low) if low == high else f"{low} to {high}"
    return f"{each} units on each of {len(counts)} ranks"


def _wire(side: _Side) -> str:
    return ", ".join(dict.fromkeys(exchange.comm_dtype for exchange in side.exchanges)) or "nothing"


_ASPECTS: dict[str, _Aspect] = {
    "algorithm": (lambda side: side.bucket.algorithm, lambda side: side.bucket.algorithm),
    "shape": (lambda side: side.bucket.shape, _shape),
    "dtype": (_dtypes, _dtypes),
    "device": (lambda side: side.bucket.device, lambda side: side.bucket.device),
    "placement": (lambda side: side.bucket.layout, _placement),
    "strategy": (lambda side: side.bucket.strategy, _strategy),
    "form": (_form, _form_words),
    "owners": (_owned, _owners),
    "wire": (_wire, _wire),
}


# -- of the whole step ----------------------------------------------------------------------------------------------


def _totals(a: Plan, b: Plan) -> Iterator[str]:
    old, new = _traffic(a), _traffic(b)
    for kind in dict.fromkeys((*old, *new)):
        yield from _changed(f"collectives, {kind}", *(_calls(found.get(kind, (0, 0))) for found in (old, new)))
    yield from _changed("waves", len(a.waves), len(b.waves))
    yield from _changed("temporaries", *(f"{plan.temp_bytes / 2**20:,.1f} MiB" for plan in (a, b)))
    yield from _changed("Newton-Schulz on the busiest rank", *(f"{_flops(plan) / 1e9:,.3f} GFLOP" for plan in (a, b)))


def _traffic(plan: Plan) -> dict[str, tuple[int, int]]:
    """Count and bytes per rank of the collectives, by kind."""
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for spec in plan.collectives:
        counts[spec.kind] += 1
        sizes[spec.kind] += spec.bytes_per_rank
    return {kind: (counts[kind], sizes[kind]) for kind in counts}


def _calls(found: tuple[int, int]) -> str:
    return f"{found[0]} of {found[1]:,} bytes per rank" if found[0] else "none"


def _flops(plan: Plan) -> int:
    return sum(batch.flops for batch in plan.batches) + max(rank_flops(plan))


def _elsewhere(a: Plan, b: Plan) -> list[str]:
    """A difference that no line above is about, such as the cut of parts; reasons apart."""
    left, right = _without_reasons(a), _without_reasons(b)
    names = [field.name for field in fields(Plan) if getattr(left, field.name) != getattr(right, field.name)]
    return [f"elsewhere: {', '.join(names)} are composed otherwise"] if names else []


def _without_reasons(plan: Plan) -> Plan:
    return replace(
        plan,
        buckets=tuple(replace(bucket, choice=None) for bucket in plan.buckets),
        choices=tuple(replace(choice, reason="") for choice in plan.choices),
        batches=tuple(replace(batch, reason="") for batch in plan.batches),
    )
