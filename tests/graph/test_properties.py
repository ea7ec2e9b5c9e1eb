"""Steps of any small model, with any gradients and hyperparameters, held against the formulas in float64."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import muon_compile as mc
from tests.reference import JORDAN, RULES, adamw_step, gaussian, muon_step

# Two iterations multiply an error by at most 3.4445 ** 2 < 12, that of a float32 or float64 product being a few 1e-7 or
# 1e-16; the hyperparameters of both are float32 numbers.
DIRECTION = {torch.float32: 1e-5, torch.bfloat16: 1e-5, torch.float64: 1e-5}
# A clipped bfloat16 gradient may be rounded once more, which the iterations enlarge likewise.
CLIPPED_BFLOAT16 = 12 * 2.0**-8
CONFIG = {
    torch.float32: mc.MuonConfig(ns_dtype="float32", ns_steps=2, momentum_dtype="float32"),
    torch.bfloat16: mc.MuonConfig(ns_dtype="float32", ns_steps=2, momentum_dtype="float32"),
    torch.float64: mc.MuonConfig(ns_dtype="float64", ns_steps=2),
}
TWO = replace(RULES["torch"], triples=JORDAN[:2])
ADAMW_EPS = 1e-3
CLIP_EPS = 1e-6  # torch.nn.utils.clip_grad_norm_'s


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What a step is given."""

    lr: float
    weight_decay: float
    momentum: float
    scale: float
    missing: tuple[bool, ...]
    zero_rows: tuple[bool, ...]
    spoilt: int | None
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model and its steps."""

    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    clip: float | None
    skip: bool
    steps: tuple[Step, ...]


sizes = st.integers(1, 7)
matrices = st.one_of(
    st.tuples(st.just(1), sizes),
    st.tuples(sizes, st.just(1)),
    st.tuples(sizes, sizes),
    st.tuples(st.just(0), sizes),
    st.tuples(st.integers(1, 3), sizes, sizes),
)
vectors = st.tuples(sizes)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    shapes = tuple(draw(st.lists(matrices, min_size=1, max_size=3)) + draw(st.lists(vectors, max_size=1)))
    skip = draw(st.booleans())
    flags = st.tuples(*[st.booleans()] * len(shapes))
    step = st.builds(
        Step,
        lr=st.sampled_from((0.0, 1e-3, 0.5)),
        weight_decay=st.sampled_from((0.0, 0.1)),
        momentum=st.sampled_from((0.0, 0.5, 0.95)),
        scale=st.sampled_from((1e-2, 1.0, 100.0)),
        missing=st.one_of(st.just((False,) * len(shapes)), flags),
        zero_rows=flags,
        spoilt=st.one_of(st.none(), st.integers(0, len(shapes) - 1)) if skip else st.none(),
        value=st.sampled_from((math.nan, math.inf, -math.inf)),
    )
    return Case(
        shapes=shapes,
        dtype=draw(st.sampled_from(list(CONFIG))),
        clip=draw(st.sampled_from((None, 1e-2, 5.0))),
        skip=skip,
        steps=tuple(draw(st.lists(step, min_size=1, max_size=3))),
    )


def optimizer_of(params: list[nn.Parameter], case: Case) -> mc.Muon:
    groups: list[dict[str, Any]] = [{"params": [p for p in params if p.dim() > 1]}]
    if any(p.dim() == 1 for p in params):
        groups.append({"params": [p for p in params if p.dim() == 1], "algorithm": "adamw"})
    adamw = {"adamw_config": mc.AdamWConfig(eps=ADAMW_EPS)}
    return mc.Muon(groups, lr=0.1, config=CONFIG[case.dtype], backend="aot_eager", **adamw)


def give(params: list[nn.Parameter], step: Step, number: int) -> None:
    for index, param in enumerate(params):
        grad = gaussian(*param.shape, seed=100 * (number + 1) + index) * step.scale
        if step.zero_rows[index]:
            grad[..., :: 2 if param.shape[-1] > 1 else 1] = 0.0
        if step.spoilt == index and grad.numel():
            grad.view(-1)[-1] = step.value
        param.grad = None if step.missing[index] else grad.to(param.dtype)


def held(params: list[nn.Parameter], optimizer: mc.Muon) -> Any:
    return copy.deepcopy([(p.detach(), dict(optimizer.state[p])) for p in params])


def clipping(grads: list[Tensor], clip: float | None) -> float:
    if clip is None:
        return 1.0
    return min(1.0, clip / (math.sqrt(sum(float((g.double() ** 2).sum()) for g in grads)) + CLIP_EPS))


def expected(value: Tensor, state: dict[str, Tensor], grad: Tensor, step: Step) -> tuple[Tensor, list[Tensor]]:
    """New value and state of one parameter, in float64."""
    hyper = {"lr": step.lr, "weight_decay": step.weight_decay, "momentum": step.momentum}
    if value.dim() == 1:
        betas = {"beta1": 0.9, "beta2": 0.999}
        number = int(state["step"]) + 1
        moments = (state["exp_avg"], state["exp_avg_sq"])
        new, (first, second) = adamw_step(value, grad, moments, number, hyper | betas, ADAMW_EPS)
        return new, [first, second]
    if value.numel() == 0:
        return value.double(), [grad]
    stacks = (t.reshape(-1, *value.shape[-2:]) for t in (value, grad, state["momentum_buffer"]))
    made = [muon_step(v, g, m, TWO, hyper) for v, g, m in zip(*stacks, strict=True)]
    new, momentum = (torch.stack(each).reshape(value.shape) for each in zip(*made, strict=True))
    return new, [momentum]


def check(case: Case) -> None:
    params = [nn.Parameter(gaussian(*s, seed=i).to(case.dtype)) for i, s in enumerate(case.shapes)]
    optimizer = optimizer_of(params, case)
    config = mc.CompileConfig(clip_grad_norm=case.clip, nonfinite="skip" if case.skip else "allow")
    compiled = mc.compile_step(optimizer, backend="aot_eager", config=config, ns="standard")
    rounding = float(torch.finfo(case.dtype).eps)
    direction = DIRECTION[case.dtype]
    if case.clip is not None and case.dtype == torch.bfloat16:
        direction = CLIPPED_BFLOAT16
    skips = 0
    for number, step in enumerate(case.steps):
        for group in optimizer.param_groups:
            group["lr"], group["weight_decay"] = step.lr, step.weight_decay
            if "momentum" in group:
                group["momentum"] = step.momentum
        give(params, step, number)
        before = held(params, optimizer)
        optimizer.step()
        after = held(params, optimizer)
        grads = [p.grad for p in params if p.grad is not None]
        skipped = case.skip and not all(bool(g.isfinite().all()) for g in grads)
        skips += skipped
        factor = clipping(grads, case.clip)
        for param, (old, state), (new, now) in zip(params, before, after, strict=True):
            if param.grad is None or skipped:
                torch.testing.assert_close((new, now), (old, state), rtol=0, atol=0)
                continue
            wanted, moments = expected(old, state, param.grad.double() * factor, step)
            change = wanted - old.double()
            # What is written is rounded to the parameter's dtype, before and after the decay.
            allowed = direction * float(change.norm()) + rounding * float(old.double().norm() + new.double().norm())
            assert float((new.double() - old.double() - change).norm()) <= allowed
            found = [value for key, value in now.items() if key != "step"]
            for moment, want in zip(found, moments, strict=True):
                bound = max(rounding if case.clip else float(torch.finfo(moment.dtype).eps), 1e-6) * 4
                assert float((moment.double() - want).norm()) <= bound * float(want.norm()) + 1e-12
    assert compiled.skipped == skips
    assert compiled.stats.recompiles == 0


@pytest.mark.timeout(300)
@settings(
    max_examples=30,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],  # shrinking compiles hundreds of steps
    suppress_health_check=list(HealthCheck),
)
@given(cases())
def test_a_step_is_what_the_formulas_say(case: Case) -> None:
    check(case)
