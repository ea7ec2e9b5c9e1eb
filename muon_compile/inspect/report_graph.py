"""A graph's nodes as small columns: equal texts are kept once, so that 5,000 nodes stay a small page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# Columns whose texts repeat.
_REPEATED = ("op", "target", "shape", "dtype", "phase")


def graph_data(nodes: Sequence[Mapping[str, Any]], bucket_names: Sequence[str]) -> dict[str, Any]:
    """Columns of a graph's nodes, in order.

    Args:
        nodes: Each with ``name``, ``op``, ``target``, ``inputs`` (names of nodes), ``shape``, ``dtype``, ``phase``,
            ``wave``, ``parts`` and ``buckets`` (names, or indices into the plan's); all but the name may be missing.
        bucket_names: The plan's, in order.

    Raises:
        ValueError: A node has no name, a name twice, or names an input or a bucket that is not there.
    """
    indices: dict[str, int] = {}
    for number, node in enumerate(nodes):
        name = node.get("name")
        if not isinstance(name, str) or name in indices:
            raise ValueError(f"graphs: expected a name of its own for every node, got {name!r} for node {number}.")
        indices[name] = number
    texts: dict[str, int] = {}
    columns: dict[str, Any] = {column: [] for column in ("name", "wave", "parts", "buckets", "inputs", *_REPEATED)}
    homes = {name: index for index, name in enumerate(bucket_names)}
    for node in nodes:
        name = node["name"]
        columns["name"].append(name)
        columns["wave"].append(node.get("wave"))
        columns["parts"].append([int(part) for part in node.get("parts") or ()])
        columns["buckets"].append([_bucket(name, given, homes) for given in node.get("buckets") or ()])
        columns["inputs"].append([_input(name, given, indices) for given in node.get("inputs") or ()])
        for column in _REPEATED:
            text = _shape(node.get("shape")) if column == "shape" else str(node.get(column) or "")
            columns[column].append(texts.setdefault(text, len(texts)))
    return columns | {"texts": list(texts)}


def _bucket(name: str, given: object, homes: Mapping[str, int]) -> int:
    found = homes.get(given) if isinstance(given, str) else given
    if not isinstance(found, int) or not 0 <= found < len(homes):
        raise ValueError(f"graphs: node {name!r}: expected buckets of the plan, {list(homes)}, got {given!r}.")
    return found


def _input(name: str, given: object, indices: Mapping[str, int]) -> int:
    if not isinstance(given, str) or given not in indices:
        raise ValueError(f"graphs: node {name!r}: expected names of nodes as inputs, got {given!r}.")
    return indices[given]


def _shape(given: object) -> str:
    """``"[2, 3]"``; empty for what is no tensor."""
    return str(list(given)) if isinstance(given, Sequence) and not isinstance(given, str) else str(given or "")
