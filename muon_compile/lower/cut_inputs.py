"""Graph inputs of which every wave takes its own stretch, as one input per stretch.

A functional graph cannot write a stretch of an input: it makes a new whole with the stretch in it. Of a bucket that
goes through the step in n waves that is n copies of all of its state, which no bound on temporary memory would hold.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from muon_compile.lower.trace import TracedStep

Cut = Callable[[Sequence[Tensor]], list[Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stretch:
    """Contiguous elements of an input, from its ``start``-th on, as a tensor of their own."""

    start: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    nodes: tuple[Node, ...]

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.shape)


def cut_inputs(traced: TracedStep) -> tuple[TracedStep, Cut]:
    """Give every stretch of a written input that the step looks at by itself an input of its own.

    An input is left whole where the step looks at all of it, or where its stretches overlap or have gaps in memory.

    Args:
        traced: The step, traced in place.

    Returns:
        The step with inputs in the same order, stretches in place of their whole and named ``"whole[start:stop]"`` by
        elements; and what turns the inputs of the old step into views for the new one.
    """
    spec = traced.spec
    graph = copy.deepcopy(traced.graph.graph)
    placeholders = list(graph.find_nodes(op="placeholder"))
    inputs: list[Tensor] = []
    names: list[str] = []
    cuts: list[tuple[_Stretch, ...]] = []
    for index, (node, fake) in enumerate(zip(placeholders, traced.inputs, strict=True)):
        stretches = _stretches(node, fake) if index < spec.num_written else ()
        cuts.append(stretches)
        if not stretches:
            inputs.append(fake)
            names.append(spec.names[index])
            continue
        for number, stretch in enumerate(stretches):
            inputs.append(_fake(traced, fake, stretch))
            names.append(f"{spec.names[index]}[{stretch.start}:{stretch.stop}]")
            with graph.inserting_before(node):
                own = graph.placeholder(f"{node.name}_{number}")
            own.meta["val"] = inputs[-1]
            for view in stretch.nodes:
                view.replace_all_uses_with(own)
        _erase(node)
    if not any(cuts):
        return traced, list

    def counted(first: int, stop: int) -> list[int]:
        return [i for i in range(first, stop) for _ in range(max(1, len(cuts[i])))]

    state = tuple(spec.state[i - spec.num_params] for i in counted(spec.num_params, spec.num_params + len(spec.state)))
    new = replace(spec, names=tuple(names), num_params=len(counted(0, spec.num_params)), state=state)
    places = [[(s.shape, s.stride, s.start) for s in stretches] for stretches in cuts]

    def cut(flat: Sequence[Tensor]) -> list[Tensor]:
        made = []
        for x, stretches in zip(flat, places, strict=True):
            first = x.storage_offset() if stretches else 0
            made += [x.as_strided(shape, stride, first + start) for shape, stride, start in stretches] or [x]
        return made

    module = GraphModule(traced.graph, graph, class_name="MuonStep")
    return replace(traced, graph=module, inputs=tuple(inputs), spec=new), cut


def _stretches(node: Node, fake: Tensor) -> tuple[_Stretch, ...]:
    """What of an input the step looks at, in memory's order; nothing where it is to stay whole."""
    found: dict[tuple[int, tuple[int, ...]], list[Node]] = {}
    for view in _leaves(node):
        value = view.meta["val"]
        if view is node or not value.is_contiguous():
            return ()
        found.setdefault((value.storage_offset() - fake.storage_offset(), tuple(value.shape)), []).append(view)
    stretches = [
        _Stretch(start=start, shape=shape, stride=tuple(nodes[0].meta["val"].stride()), nodes=tuple(nodes))
        for (start, shape), nodes in sorted(found.items())
    ]
    if any(a.stop > b.start for a, b in itertools.pairwise(stretches)):
        return ()
    return tuple(stretches)


def _leaves(node: Node) -> Iterator[Node]:
    """The narrowest slices of slices of an input that something else takes."""
    if node.users and all(user.target is torch.ops.aten.slice.Tensor for user in node.users):
        for user in node.users:
            yield from _leaves(user)
    else:
        yield node


def _fake(traced: TracedStep, whole: Tensor, stretch: _Stretch) -> Tensor:
    with traced.fake_mode:
        return torch.empty_strided(stretch.shape, stretch.stride, dtype=whole.dtype, device=whole.device)


def _erase(node: Node) -> None:
    for user in list(node.users):
        _erase(user)
    node.graph.erase_node(node)
