"""Hyperparameters and options outside their range are refused, by name, and nothing changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import Parameter
from torch.optim import SGD, Adam, AdamW, Muon

import muon_compile as mc
from tests.unit.untouched import refused

NAN, INF = float("nan"), float("inf")
BAD: dict[str, tuple[Any, ...]] = {
    "lr": (NAN, INF, -INF, -0.5, "0.1", None, torch.ones(2)),
    "weight_decay": (NAN, INF, -INF, -0.5),
    "momentum": (NAN, INF, -INF, -0.5),
    "beta1": (NAN, INF, -INF, -0.5, 1.0),
    "beta2": (NAN, INF, -INF, -0.5, 1.5),
}
Pair = tuple[Muon, AdamW]


def pair() -> Pair:
    torch.manual_seed(0)
    return (
        Muon([("w", Parameter(torch.randn(4, 6)))], lr=0.1),
        AdamW([("b", Parameter(torch.randn(4)))], lr=0.1),
    )


def step_both(optimizers: Pair) -> None:
    for optimizer in optimizers:
        for param in optimizer.param_groups[0]["params"]:
            param.grad = torch.ones_like(param)
    for optimizer in optimizers:
        optimizer.step()


def get_number(optimizers: Pair, name: str) -> Any:
    if name.startswith("beta"):
        return optimizers[1].param_groups[0]["betas"][int(name[-1]) - 1]
    return optimizers[0].param_groups[0][name]


def set_number(optimizers: Pair, name: str, value: object) -> str:
    """Put a number where users do; returns how a message names it."""
    if name.startswith("beta"):
        betas = list(optimizers[1].param_groups[0]["betas"])
        betas[int(name[-1]) - 1] = value
        optimizers[1].param_groups[0]["betas"] = tuple(betas)
        return f"Group 1: {name}: expected"
    optimizers[0].param_groups[0][name] = value
    return f"Group 0: {name}: expected"


def as_tensor(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)


def plain(value: Any) -> Any:
    return value


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("kind", [plain, as_tensor])
def test_a_bad_number_when_wrapping(name: str, kind: Callable[[Any], Any]) -> None:
    optimizers = pair()
    step_both(optimizers)
    for value in BAD[name]:
        if kind is as_tensor and not isinstance(value, float):
            continue
        message = set_number(optimizers, name, kind(value))
        with refused(ValueError, message, by=optimizers):
            mc.compile_step(*optimizers, backend="aot_eager")


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("kind", [plain, as_tensor])
def test_a_bad_number_at_a_later_step(name: str, kind: Callable[[Any], Any]) -> None:
    optimizers = pair()
    step = mc.compile_step(*optimizers, backend="aot_eager")
    step_both(optimizers)
    good = get_number(optimizers, name)
    for value in BAD[name]:
        if kind is as_tensor and not isinstance(value, float):
            continue
        message = set_number(optimizers, name, kind(value))
        with refused(ValueError, message, by=optimizers):
            optimizers[0].step()
    set_number(optimizers, name, good)
    step_both(optimizers)
    assert step.stats.steps == 2 and step.stats.compiles == 1


@pytest.mark.parametrize("name", ["lr", "weight_decay", "momentum"])
@pytest.mark.parametrize("kind", [plain, as_tensor])
def test_a_bad_number_for_own_muon(name: str, kind: Callable[[Any], Any]) -> None:
    w = Parameter(torch.randn(4, 6))
    optimizer = mc.Muon([w], backend="aot_eager")
    other = Parameter(torch.randn(4, 6))
    for value in (NAN, INF, -0.5):
        with refused(ValueError, "Group 0", name, "expected a finite number >= 0", tensors=[w]):
            mc.Muon([w], **{name: kind(value)})
        with refused(ValueError, "Group 1", name, "expected a finite number >= 0", by=[optimizer], tensors=[other]):
            optimizer.add_param_group({"params": [other], name: kind(value)})


@pytest.mark.parametrize("betas", [(NAN, 0.9), (0.9, 1.0), (0.9, -0.1), (0.9, 0.99, 0.999), 0.9])
def test_bad_betas_for_own_muon(betas: Any) -> None:
    b = Parameter(torch.randn(4))
    with refused(ValueError, "beta", tensors=[b]):
        mc.Muon([{"params": [b], "algorithm": "adamw"}], betas=betas)


# -- options ------------------------------------------------------------------------------------------------------

MUON_FIELDS: list[tuple[dict[str, Any], str, str]] = [
    ({"preset": "jordan"}, "preset", "'moonlight'"),
    ({"momentum_form": "mean"}, "momentum_form", "'ema'"),
    ({"momentum_dtype": "int8"}, "momentum_dtype", "'bfloat16'"),
    ({"momentum_dtype": torch.float32}, "momentum_dtype", "'float32'"),
    ({"nesterov": "yes"}, "nesterov", "True"),
    ({"ns_steps": 0}, "ns_steps", "1 to 99"),
    ({"ns_steps": 100}, "ns_steps", "1 to 99"),
    ({"ns_steps": 2.5}, "ns_steps", "1 to 99"),
    ({"coefficients": "jordon"}, "coefficients", "'polar_express'"),
    ({"coefficients": (3.4, -4.7)}, "coefficients", "(a, b, c)"),
    ({"coefficients": (3.4, NAN, 2.0)}, "coefficients", "(a, b, c)"),
    ({"coefficients": ((3.4, -4.7, 2.0),) * 4}, "coefficients", "5 triples"),
    ({"coefficients": "you", "ns_steps": 3}, "coefficients", "ns_steps"),
    ({"preset": "dion", "ns_steps": 6}, "coefficients", "ns_steps"),
    ({"ns_dtype": "float8"}, "ns_dtype", "'bfloat16'"),
    ({"eps": NAN}, "eps", ">= 0"),
    ({"eps": -1e-7}, "eps", ">= 0"),
    ({"eps": "rel"}, "eps", "'relative'"),
    ({"eps_mode": "max"}, "eps_mode", "'clamp'"),
    ({"scale": "adamw"}, "scale", "'match_rms_adamw'"),
    ({"split_sizes": (4, 0)}, "split_sizes", "positive ints"),
    ({"split_sizes": ()}, "split_sizes", "positive ints"),
    ({"num_heads": 0}, "num_heads", "positive int"),
    ({"num_heads": 2, "split_sizes": (2, 2)}, "split_sizes or num_heads", "both"),
    ({"flatten": "yes"}, "flatten", "True"),
]


@pytest.mark.parametrize(("fields", "name", "expected"), MUON_FIELDS, ids=lambda v: str(v) if type(v) is dict else "")
def test_an_unknown_muon_option(fields: dict[str, Any], name: str, expected: str) -> None:
    with refused(ValueError, name, expected):
        mc.MuonConfig(**fields)


def test_other_unknown_options() -> None:
    with refused(TypeError, "nestrov"):
        mc.MuonConfig(nestrov=True)  # type: ignore[call-arg]
    with refused(ValueError, "AdamWConfig.eps", ">= 0", "nan"):
        mc.AdamWConfig(eps=NAN)
    with refused(ValueError, "CompileConfig.max_temp_bytes", "-1"):
        mc.CompileConfig(max_temp_bytes=-1)
    with refused(ValueError, "CompileConfig.inductor_route", "'standalone'", "'outer'"):
        mc.CompileConfig(inductor_route="outer")  # type: ignore[arg-type]
    with refused(ValueError, "CompileConfig.inductor_options", "3"):
        mc.CompileConfig(inductor_options=3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"backend": "inducto"}, ("backend", "aot_eager", "inducto")),
        ({"strategy": "gram_scater"}, ("strategy", "local", "gram_scater")),
        ({"ns": "gramm"}, ("ns", "standard", "gramm")),
        ({"groups": {"shard": "3"}}, ("groups", "none", "shard")),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_an_unknown_argument(arguments: dict[str, Any], words: tuple[str, ...]) -> None:
    optimizers = pair()
    step_both(optimizers)
    with refused(ValueError, *words, by=optimizers):
        mc.compile_step(*optimizers, **({"backend": "aot_eager"} | arguments))


def test_an_argument_of_the_wrong_kind_is_named() -> None:
    optimizers = pair()
    with refused(TypeError, "config", "CompileConfig", "MuonConfig", by=optimizers):
        mc.compile_step(*optimizers, backend="aot_eager", config=mc.MuonConfig())  # type: ignore[arg-type]
    with refused(TypeError, "names", "pairs", by=optimizers):
        mc.compile_step(*optimizers, backend="aot_eager", names=["w", "b"])  # type: ignore[list-item]


def test_an_unknown_inductor_option() -> None:
    optimizers = pair()
    config = mc.CompileConfig(inductor_options={"max_autotoon": True})
    mc.compile_step(*optimizers, config=config)
    step_both_grads(optimizers)
    with refused(mc.CompileError, "inductor_options", "max_autotoon", by=optimizers):
        optimizers[0].step()


def step_both_grads(optimizers: Pair) -> None:
    for optimizer in optimizers:
        for param in optimizer.param_groups[0]["params"]:
            param.grad = torch.ones_like(param)


STOCK_GROUPS: list[tuple[str, Any]] = [
    ("ns_coefficients", (3.4, -4.7)),
    ("ns_steps", 0),
    ("eps", NAN),
    ("adjust_lr_fn", "spectral"),
]


@pytest.mark.parametrize(("name", "value"), STOCK_GROUPS)
def test_a_stock_muon_option_out_of_range(name: str, value: object) -> None:
    optimizers = pair()
    optimizers[0].param_groups[0][name] = value
    what = "coefficients" if name == "ns_coefficients" else name
    with refused(ValueError, what, "expected", "got", by=optimizers):
        mc.compile_step(*optimizers, backend="aot_eager")


def test_differentiable_adamw() -> None:
    optimizer = AdamW([Parameter(torch.randn(4))], differentiable=True)
    with refused(NotImplementedError, "differentiable=True", "expected differentiable=False", by=[optimizer]):
        mc.compile_step(optimizer, backend="aot_eager")


# -- optimizers ---------------------------------------------------------------------------------------------------


class Renamed(Muon):
    """Adds nothing to the step."""


class Clipped(Muon):
    """Has a step of its own, which a compiled one would leave out."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.mark.parametrize("make", [SGD, Adam, Clipped])
def test_an_optimizer_that_no_adapter_knows(make: Callable[..., Any]) -> None:
    optimizer = make([Parameter(torch.randn(4, 4))], lr=0.1)
    words = (make.__name__, "torch.optim.Muon", "torch.optim.AdamW", "muon_compile.optim.Muon", "register_adapter")
    with refused(TypeError, *words, by=[optimizer]):
        mc.compile_step(optimizer, backend="aot_eager")
    muon = pair()[0]
    with refused(TypeError, *words, by=[muon, optimizer]):
        mc.compile_step(muon, optimizer, backend="aot_eager")


def test_something_that_is_no_optimizer() -> None:
    with refused(TypeError, "torch optimizers", "list"):
        mc.compile_step([Parameter(torch.randn(4, 4))], backend="aot_eager")  # type: ignore[arg-type]


def test_a_subclass_without_a_step_of_its_own_is_known() -> None:
    ours, theirs = Parameter(torch.ones(8, 12)), Parameter(torch.ones(8, 12))
    optimizer, stock = Renamed([ours], lr=0.5), Muon([theirs], lr=0.5)
    mc.compile_step(optimizer, backend="aot_eager", config=mc.CompileConfig(exact=True))
    for _ in range(2):
        ours.grad, theirs.grad = torch.randn(8, 12), torch.zeros(8, 12)
        theirs.grad.copy_(ours.grad)
        optimizer.step()
        stock.step()
    assert torch.equal(ours, theirs)
