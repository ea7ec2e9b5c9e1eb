"""Sort a model's parameters into Muon's and AdamW's, and say why."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor, nn

from muon_compile.spec import Algorithm

# What people call the layer that makes logits; matched against a module's own name.
_HEADS = ("lm_head", "head", "output_head", "unembed", "unembedding", "classifier", "score", "logits", "output_proj")
# A word of a parameter's own name or its module's, between dots, underscores and digits.
_EMBEDDING_WORDS = re.compile(
    r"(^|[._\d])(emb|embed|embeds|embedding|embeddings|wte|wpe|pos|cls_token|mask_token)($|[._\d])", re.IGNORECASE
)
_FLAT_CONVS = (nn.Conv1d, nn.ConvTranspose1d)


@dataclass(frozen=True, slots=True, kw_only=True)
class Routed:
    """Where one parameter goes."""

    name: str
    tensor: Tensor
    algorithm: Algorithm | None
    reason: str
    flatten: bool = False


def route(
    model: nn.Module, *, muon: Sequence[str] = (), adamw: Sequence[str] = (), verbose: bool = True
) -> list[dict[str, Any]]:
    """Sort parameters into groups for ``muon_compile.Muon``.

    Hidden matrices, stacks of expert matrices and convolutions go to Muon; embeddings, the output head, norms, biases
    and scalars to AdamW. A tied weight is taken once. Frozen parameters are left out.

    Args:
        model: The model.
        muon: Name patterns (as in a shell, ``*.proj.weight``) that go to Muon whatever the rules say.
        adamw: Name patterns that go to AdamW, likewise.
        verbose: Print what went where, and why.

    Returns:
        ``[{"params": [(name, parameter), ...], "algorithm": "muon"}, {..., "algorithm": "adamw"}]``, and a third group
        with ``flatten=True`` where the model has 1-D convolutions, whose weights are 3-D like expert stacks.

    Raises:
        ValueError: Nothing is left for Muon, or a pattern matches no parameter.
    """
    muon = (muon,) if isinstance(muon, str) else muon
    adamw = (adamw,) if isinstance(adamw, str) else adamw
    routed = list(_decide(model, muon, adamw))
    for pattern in (*muon, *adamw):
        if not any(fnmatchcase(item.name, pattern) for item in routed):
            raise ValueError(f"route: pattern {pattern!r} matches no parameter; expected shell-style names.")
    if verbose:
        _print(routed)

    def group(algorithm: Algorithm, flatten: bool = False) -> dict[str, Any]:
        chosen = [(r.name, r.tensor) for r in routed if r.algorithm == algorithm and r.flatten == flatten]
        return {"params": chosen, "algorithm": algorithm} | ({"flatten": True} if flatten else {})

    groups = [group("muon"), group("adamw"), group("muon", flatten=True)]
    if not groups[0]["params"] and not groups[2]["params"]:
        raise ValueError(
            "route: nothing in the model is for Muon: it has no trainable hidden matrix. Use torch.optim.AdamW, or "
            "name matrices by muon=['pattern', ...]."
        )
    return [g for g in groups if g["params"]]


def _decide(model: nn.Module, muon: Sequence[str], adamw: Sequence[str]) -> Iterator[Routed]:
    embedded = {id(m.weight) for m in model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))}
    heads = _head_weights(model)
    first_names: dict[int, str] = {}
    aliases: dict[int, list[str]] = {}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(tensor), []).append(name)

    def named_by(patterns: Sequence[str], tensor: Tensor) -> bool:
        return any(fnmatchcase(alias, pattern) for alias in aliases[id(tensor)] for pattern in patterns)

    for module_name, module in model.named_modules():
        for own_name, tensor in module.named_parameters(recurse=False):
            name = f"{module_name}.{own_name}" if module_name else own_name
            if id(tensor) in first_names:
                yield Routed(name=name, tensor=tensor, algorithm=None, reason=f"tied to {first_names[id(tensor)]}")
                continue
            first_names[id(tensor)] = name
            flatten = isinstance(module, _FLAT_CONVS) and tensor.ndim == 3
            algorithm, reason = _rule(name, tensor, module, embedded, heads)
            if not tensor.requires_grad:
                yield Routed(name=name, tensor=tensor, algorithm=None, reason="frozen (requires_grad=False), left out")
                continue
            if named_by(muon, tensor):
                algorithm, reason = "muon", "named by muon="
            elif named_by(adamw, tensor):
                algorithm, reason = "adamw", "named by adamw="
            yield Routed(
                name=name,
                tensor=tensor,
                algorithm=algorithm,
                reason=reason,
                flatten=flatten and algorithm == "muon",
            )


def _rule(name: str, tensor: Tensor, module: nn.Module, embedded: set[int], heads: set[int]) -> tuple[Algorithm, str]:
    if tensor.ndim < 2:
        kind = "scalar" if tensor.ndim == 0 else "bias" if name.endswith("bias") else "vector"
        kind = "norm" if "norm" in type(module).__name__.lower() else kind
        return "adamw", kind
    if "norm" in type(module).__name__.lower():
        return "adamw", "norm"
    if id(tensor) in embedded or _EMBEDDING_WORDS.search(".".join(name.split(".")[-2:])):
        return "adamw", "embedding (tied head)" if id(tensor) in heads else "embedding"
    if id(tensor) in heads:
        return "adamw", "output head"
    if "conv" in type(module).__name__.lower() and tensor.ndim >= 3:
        return "muon", "convolution, as one matrix"
    if min(tensor.shape[-2:]) == 1:
        return "adamw", "a single row or column"
    if tensor.ndim == 2:
        return "muon", "hidden matrix"
    return "muon", "stack of matrices"


def _head_weights(model: nn.Module) -> set[int]:
    """Weights of the output head: by the module's name, else the last linear layer, if it is not the only one."""
    linears = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.Linear)]
    named = [m for name, m in linears if name.rpartition(".")[2].lower() in _HEADS]
    last = [m for _, m in linears[-1:]] if len(linears) > 1 else []
    return {id(m.weight) for m in named or last}


def _print(routed: Iterable[Routed]) -> None:
    """One row per kind of parameter: layer numbers are folded into ``*``."""
    rows: dict[tuple[str, str, str, str], int] = {}
    for item in routed:
        goes: str = item.algorithm or "-"
        shape = "x".join(map(str, item.tensor.shape)) or "scalar"
        key = (goes, re.sub(r"\d+", "*", item.name), shape, item.reason)
        rows[key] = rows.get(key, 0) + 1
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("goes to", "parameters", "shape", "count", "why"):
        table.add_column(heading, justify="right" if heading == "count" else "left", overflow="fold")
    for (goes, name, shape, reason), count in sorted(rows.items(), key=lambda r: (r[0][0] == "-", r[0][0] == "adamw")):
        table.add_row(goes, escape(name), shape, str(count), escape(reason))
    Console(width=120, highlight=False).print(table)
