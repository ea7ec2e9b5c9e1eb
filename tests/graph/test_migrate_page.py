"""Every row of docs/migrate.md, read out of the page: originals wrapped with those arguments, rates, recipes, links."""

from __future__ import annotations

import copy
import importlib
import itertools
import math
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import Parameter

import muon_compile as mc
from muon_compile import adapters
from muon_compile.adapters import find_adapter
from muon_compile.build.orthogonalize import shape_scale
from muon_compile.config import PRESETS, AdamWConfig, MuonConfig
from muon_compile.conversion import NAMES
from muon_compile.conversion.parts import same
from tests.graph.twins import give, parameters, values
from tests.originals import find, formulas
from tests.originals.training import eager_heavyball, load, make, saved, train
from tests.reference import relative_error

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "migrate.md").read_text(encoding="utf-8")
SHAPES = ((24, 64), (64, 24), (32, 32), (64, 96), (96, 64), (128, 64), (24, 96), (48, 128))
FLOAT32 = 1e-5
Made = list[Any]


@pytest.fixture(autouse=True)
def without_compiling() -> Iterator[None]:
    with eager_heavyball():
        yield


def table(head: str) -> list[list[str]]:
    """The cells of the rows under a head."""
    _, _, below = PAGE.partition(f"\n{head}\n")
    rows = itertools.takewhile(lambda line: line.startswith("|"), below.splitlines()[1:])
    found = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert len(found) > 3 and all(len(row) == head.count("|") - 1 for row in found)
    return found


def code(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


# -- arguments --------------------------------------------------------------------------------------------------------


def keller(options: dict[str, Any], x: list[Parameter], y: list[Parameter], adamw: bool) -> Made:
    import muon

    groups = [{"params": x, "use_muon": True}, {"params": y, "use_muon": False}]
    groups[adamw] |= options
    if not adamw:  # with one of the classes for Muon alone as well, which has the same
        assert muon.SingleDeviceMuon(x, **options).param_groups[0].items() >= options.items()
    return [muon.SingleDeviceMuonWithAuxAdam(groups)]


def dion(options: dict[str, Any], x: list[Parameter], y: list[Parameter], adamw: bool) -> Made:
    group = {name: options.pop(name) for name in ("num_heads", "split_sizes") if name in options}
    # What it makes of this flag is no function of its module.
    gram = {"newton_schulz_func": object()} if options.pop("use_gram_newton_schulz", False) else {}
    return [formulas.DionMuon([{"params": x, **group}, {"params": y, "algorithm": "adamw"}], **gram, **options)]


def heavyball(options: dict[str, Any], x: list[Parameter], y: list[Parameter], adamw: bool) -> Made:
    module = pytest.importorskip("heavyball")
    return [module.Muon(x, **options)]


def of_two(muon: Any, adamw_class: Any) -> Callable[..., Made]:
    return lambda options, x, y, adamw: [adamw_class(y, **options) if adamw else muon(x, **options)]


BUILD: dict[str, Callable[..., Made]] = {
    "torch": of_two(torch.optim.Muon, torch.optim.AdamW),
    "keller": keller,
    "moonlight": lambda options, x, y, adamw: [formulas.MoonlightMuon(muon_params=x, adamw_params=y, **options)],
    "dion": dion,
    "hyperparallel": of_two(formulas.HyperParallelMuon, formulas.HyperParallelAdamW),
    "heavyball": heavyball,
}
# Library, whether it is about AdamW's group, their arguments, ours.
ROWS = [
    (code(row[0])[0], "Adam" in row[0], theirs, row[2])
    for row in table("| library | theirs | ours |")
    for theirs in code(row[1]) or [""]
]


def wrapped(library: str, adamw: bool, theirs: str) -> tuple[Any, mc.CompiledStep]:
    options = eval(f"dict({theirs.partition(' in a group')[0]})", {"torch": torch})
    (optimizer,) = BUILD[library](options, parameters((24, 64), (24, 64)), parameters((24,), seed=1), adamw)
    return optimizer, mc.compile_step(optimizer, backend="aot_eager")


@pytest.mark.parametrize(("library", "adamw", "theirs", "ours"), [row for row in ROWS if row[3] != "refused"])
def test_arguments_are_what_the_page_says(library: str, adamw: bool, theirs: str, ours: str) -> None:
    optimizer, step = wrapped(library, adamw, theirs)
    configs = {bucket.algorithm: bucket.config for bucket in step.plan.buckets}
    adapter = find_adapter(optimizer)
    numbers = {adapter.algorithm(group): adapter.hyper(group) for group in adapter.groups(optimizer)}
    names = {"lr": ("muon", "lr"), "momentum": ("muon", "momentum"), "weight_decay": ("muon", "weight_decay")}
    names |= {f"adamw_{name}": ("adamw", name) for name in ("lr", "weight_decay")}
    (said,) = code(ours.split(" at ")[0].split(" and ")[0])
    kind, given = said.partition("(")[0], eval(f"dict({said.partition('(')[2]}")
    assert given
    for name, value in given.items():
        if kind == "Muon" and name == "betas":
            found: Any = tuple(numbers["adamw"][beta] for beta in ("beta1", "beta2"))
        elif kind == "Muon":
            algorithm, entry = names[name]
            found = numbers[algorithm][entry]
        else:
            found = getattr(configs["muon" if kind == "MuonConfig" else "adamw"], name)
        assert same(found, value) or math.isclose(float(found), value, rel_tol=1e-6), name  # dion's lr is a tensor
    assert kind in ("Muon", "MuonConfig", "AdamWConfig")


@pytest.mark.parametrize(("library", "adamw", "theirs"), [row[:3] for row in ROWS if row[3] == "refused"])
def test_what_the_page_says_is_refused(library: str, adamw: bool, theirs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if " = " in theirs:
        place, value = theirs.split(" = ")
        module, _, name = place.rpartition(".")
        pytest.importorskip(library)
        monkeypatch.setattr(importlib.import_module(module), name, eval(value))
        theirs = ""
    with pytest.raises(NotImplementedError, match=r"expected "):
        wrapped(library, adamw, theirs)


@pytest.mark.parametrize(("library", "theirs", "ours"), [(row[0], row[2], row[3]) for row in ROWS if not row[1]])
def test_a_row_of_defaults_is_all_of_the_config(library: str, theirs: str, ours: str) -> None:
    """But for dion's table, which the page says it has: what is not named there is the preset's."""
    if theirs:
        return
    _, step = wrapped(library, False, "")
    (config,) = {bucket.config for bucket in step.plan.buckets if bucket.algorithm == "muon"}
    assert isinstance(config, MuonConfig)
    given = eval(f"dict({code(ours)[0].partition('(')[2]}")
    given |= {"coefficients": config.coefficients} if library == "dion" else {}
    assert config == MuonConfig(**given)


def test_every_library_and_every_argument_has_a_row() -> None:
    assert {row[0] for row in ROWS} == set(BUILD) == set(NAMES) - {"muon_compile"}
    named = {library: " ".join(row[2] for row in ROWS if row[0] == library) for library in BUILD}
    classes = {"torch": torch.optim.Muon, "hyperparallel": formulas.HyperParallelMuon, "dion": formulas.DionMuon}
    classes |= {"moonlight": formulas.MoonlightMuon}
    places = {"params", "muon_params", "adamw_params", "distributed_mesh", "callbacks"}
    for library, cls in classes.items():
        code_of = cls.__init__.__code__
        arguments = set(code_of.co_varnames[1 : code_of.co_argcount]) - places
        assert not [name for name in arguments if f"{name}=" not in named[library]], library
    config_fields = " ".join(row[3] for row in ROWS)
    assert all(name in config_fields for name in PRESETS["torch"] if name not in ("eps_mode",))
    assert AdamWConfig.__dataclass_fields__.keys() <= set(re.findall(r"\w+", config_fields))


# -- wrapping ---------------------------------------------------------------------------------------------------------


def test_the_classes_of_the_page_are_known() -> None:
    known = set(adapters.known_optimizers())
    rows = {code(row[0])[0]: row[1] for row in table("| library | classes |")}
    assert rows.keys() == BUILD.keys()
    for library, cell in rows.items():
        if library != "hyperparallel":  # whose module is long
            assert [name for name in code(cell) if name not in known] == [], library


@pytest.mark.parametrize("library", BUILD)
def test_two_lines_wrap_an_optimizer(library: str) -> None:
    ours, theirs = make(library), make(library)
    chained = formulas.ChainedOptimizer(None, {str(i): o for i, o in enumerate(ours[1])})
    given = [chained] if library == "hyperparallel" else ours[1]
    config = mc.CompileConfig(ns_dtype="float32")
    step = mc.compile_step(*given, backend="aot_eager", config=config)  # type: ignore[arg-type]
    train(theirs, range(2))
    train(ours, range(2))
    assert step.stats.steps == 2
    if library != "heavyball":  # it rounds at random; its momenta do not
        for a, e in zip(ours[0], theirs[0], strict=True):
            assert relative_error(a, e) <= FLOAT32


def test_a_copy_in_ones_own_module_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    class Muon(formulas.MoonlightMuon):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    Muon.__module__, Muon.__qualname__ = "my_package.optim", "Muon"
    optimizer = Muon(muon_params=parameters((8, 12)), adamw_params=())
    with pytest.raises(TypeError, match=r"my_package\.optim\.Muon overrides step\(\)"):
        mc.compile_step(optimizer, backend="aot_eager")
    (line,) = re.findall(r"```python\n(mc\.register_adapter.*?)\n", PAGE)
    monkeypatch.setattr("muon_compile.adapters.registry._ADAPTERS", dict(adapters.registry._ADAPTERS))
    exec(line, {"mc": mc, "adapters": adapters})
    mc.compile_step(optimizer, backend="aot_eager")


def quirk_keller_missing() -> None:
    (p,), (optimizer,) = moved("keller")
    before = p.detach().clone()
    p.grad = None
    optimizer.step()
    assert not torch.equal(p, before)


def quirk_keller_convolution() -> None:
    import muon

    step = mc.compile_step(muon.SingleDeviceMuon(parameters((4, 2, 5, 3))), backend="aot_eager")
    (config,) = [bucket.config for bucket in step.plan.buckets]
    assert isinstance(config, MuonConfig) and config.flatten and config.scale == pytest.approx(math.sqrt(5 / 3))


def quirk_moonlight_eps() -> None:
    y = parameters((5,))
    optimizer = formulas.MoonlightMuon(adamw_params=y, lr=1.0, wd=0.0, adamw_betas=(0.9, 0.99), adamw_eps=0.1)
    mc.compile_step(optimizer, backend="aot_eager")
    with torch.no_grad():
        y[0].zero_()
    y[0].grad = torch.full((5,), 0.5)
    optimizer.step()
    expected = 0.5 / (0.5 + 0.1 / math.sqrt(1 - 0.99))
    torch.testing.assert_close(y[0].detach(), torch.full((5,), -expected))


def quirk_dion_margin() -> None:
    _, step = wrapped("dion", False, "")
    table_of = next(b.config for b in step.plan.buckets if isinstance(b.config, MuonConfig)).coefficients
    a, b, c = formulas.DION_POLAR[0]
    assert same(table_of[0], (a / 1.02, b / 1.02**3, c / 1.02**5))  # type: ignore[index]


def quirk_hyperparallel_steps() -> None:
    y = parameters((3,), (3,))
    optimizer = formulas.HyperParallelAdamW(y)
    mc.compile_step(optimizer, backend="aot_eager")
    give(y, seed=0, missing={1})
    optimizer.step()
    give(y, seed=1)
    before = y[1].detach().clone()
    optimizer.step()
    # The first moment of one gradient, corrected for two steps.
    grad = y[1].grad
    assert grad is not None
    expected = before * (1 - 1e-5) - 1e-3 * (0.1 / (1 - 0.9**2)) * grad / ((0.001 / (1 - 0.999**2)) ** 0.5 * grad.abs())
    torch.testing.assert_close(y[1].detach(), expected)


def quirk_heavyball_direction() -> None:
    _, step = wrapped("heavyball", False, "")
    (config,) = {bucket.config for bucket in step.plan.buckets}
    assert isinstance(config, MuonConfig) and config.momentum_form == "ema_added" and config.nesterov


def quirk_heavyball_gradients() -> None:
    (p,), _ = moved("heavyball")
    assert p.grad is None


def quirk_heavyball_rounding() -> None:
    module = pytest.importorskip("heavyball")
    for rounding in ("nearest", "stochastic"):
        x = parameters((64, 64), dtype=torch.bfloat16)
        optimizer = module.Muon(x, lr=1e-4)
        config = mc.CompileConfig(rounding=rounding)
        mc.compile_step(optimizer, backend="aot_eager", config=config)
        before = x[0].detach().clone()
        give(x, seed=0)
        optimizer.step()
        # Half a step of bfloat16 at 1 is 4e-3: only at random do entries of that size move.
        large = before.abs() > 0.5
        assert bool((x[0][large] != before[large]).any()) is (rounding == "stochastic")


def moved(library: str) -> tuple[list[Parameter], Made]:
    """A matrix and its optimizer, wrapped, after a step."""
    x = parameters((8, 12))
    options = {"lr": 0.1}
    if library == "keller":
        import muon

        optimizer: Any = muon.SingleDeviceMuon(x, **options)
    else:
        optimizer = pytest.importorskip("heavyball").Muon(x, **options)
    mc.compile_step(optimizer, backend="aot_eager")
    give(x, seed=0)
    optimizer.step()
    return x, [optimizer]


QUIRKS: dict[str, list[Callable[[], None]]] = {
    "keller": [quirk_keller_missing, quirk_keller_convolution],
    "moonlight": [quirk_moonlight_eps],
    "dion": [quirk_dion_margin],
    "hyperparallel": [quirk_hyperparallel_steps],
    "heavyball": [quirk_heavyball_direction, quirk_heavyball_gradients, quirk_heavyball_rounding],
}


@pytest.mark.parametrize("check", [check for checks in QUIRKS.values() for check in checks], ids=lambda c: c.__name__)
def test_quirks_are_kept(check: Callable[[], None]) -> None:
    rows = [code(row[0])[0] for row in table("| library | quirk |")]
    assert rows == [library for library, checks in QUIRKS.items() for _ in checks]
    check()


# -- learning rates ---------------------------------------------------------------------------------------------------


def formula(text: str, m: int, n: int) -> Any:
    return eval(text, {"sqrt": math.sqrt, "max": max, "m": m, "n": n})


def scale(name: str, m: int, n: int) -> float:
    return shape_scale(MuonConfig(scale=name), m, n)  # type: ignore[arg-type]


@pytest.mark.parametrize("row", table("| scale | s(m, n) | whose |"))
def test_scales_are_those_of_the_page(row: list[str]) -> None:
    (name,), (text,) = code(row[0]), code(row[1])
    for m, n in SHAPES:
        assert formula(text, m, n) == pytest.approx(scale(name, m, n))


RATES = "| from | to | lr' / lr | one factor for |"


@pytest.mark.parametrize("row", table(RATES))
def test_rates_give_the_same_updates(row: list[str]) -> None:
    (old,), (new,) = code(row[0]), code(row[1])
    factors = {}
    for m, n in SHAPES:
        factors[m, n] = scale(old, m, n) / scale(new, m, n)
        for text in code(row[2]):
            assert formula(text, m, n) == pytest.approx(factors[m, n]), text
    # For which one factor does.
    equal = [text for text in code(row[3]) if "=" not in text]
    only = [text for text in code(row[3]) if "=" in text]
    chosen = {shape: f for shape, f in factors.items() if all(formula(text, *shape) for text in only)}
    assert len(set(factors.values())) > 1 and len(chosen) > 2
    by_key: dict[Any, list[float]] = {}
    for shape, factor in chosen.items():
        by_key.setdefault(tuple(round(formula(text, *shape), 9) for text in equal), []).append(factor)
    assert any(len(found) > 1 for found in by_key.values())
    for found in by_key.values():
        assert max(found) == pytest.approx(min(found))
    if row[3].endswith(": 1"):
        assert all(factor == pytest.approx(1.0) for factor in chosen.values())
    for condition in only:  # and not without it
        assert any(
            f != pytest.approx(next(iter(chosen.values()))) for s, f in factors.items() if not formula(condition, *s)
        )


def test_rates_and_decay_between_keller_and_torch() -> None:
    """A training of Keller's, and torch's with the page's rate and decay: the same parameters."""
    import muon

    theirs, ours = parameters((24, 64), (24, 64)), parameters((24, 64), (24, 64))
    (row,) = [row for row in table(RATES) if code(row[0] + row[1]) == ["original", "match_rms_adamw"]]
    rate = 0.02 * formula(code(row[2])[-1], 24, 64)
    old = muon.SingleDeviceMuon(theirs, lr=0.02, weight_decay=0.1)
    new = torch.optim.Muon(ours, lr=rate, weight_decay=0.1 * 0.02 / rate, adjust_lr_fn="match_rms_adamw")
    start = values(ours)
    for seed in range(5):
        give(theirs, ours, seed=seed)
        with find.as_float32(True):
            old.step()
            new.step()
    for a, e, s in zip(ours, theirs, start, strict=True):
        assert relative_error(a - s, e - s) <= FLOAT32


# -- state, the example, links ----------------------------------------------------------------------------------------


def test_the_recipes_for_state() -> None:
    old, new = make("keller"), make("torch")
    train(old, range(2))
    recipes = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    split = next(text for text in recipes if "ns_steps" in text)
    converted = mc.convert_state(saved(old[1]), from_="keller", to="torch")
    exec(split, {"new": converted, "torch_muon": new[1][0], "torch_adamw": new[1][1]})
    momenta = [o.state[p[0]]["momentum_buffer"] for p, o in ((new[0], new[1][0]), (old[0], old[1][0]))]
    assert relative_error(*momenta) == 0
    assert float(new[1][1].state[new[0][3]]["step"]) == 2
    load(new[1], copy.deepcopy(converted))
    own = make("muon_compile")
    whole = next(text for text in recipes if "convert_state" in text)
    exec(whole, {"mc": mc, "old": old[1][0], "own_muon": own[1][0]})
    assert relative_error(own[1][0].state[own[0][0]]["momentum_buffer"], momenta[1]) == 0


def test_the_example_runs_and_its_adapter_is_short() -> None:
    source = (ROOT / "examples" / "own_muon.py").read_text(encoding="utf-8")
    adapter = re.search(r"class OwnMuonAdapter.*?\n\n\n", source, flags=re.DOTALL)
    assert adapter is not None
    lines = len(adapter[0].strip().splitlines())
    assert lines <= 30 and f"its adapter of {lines}\nlines" in PAGE
    words = [sys.executable, "examples/own_muon.py", "--backend", "aot_eager"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    found = re.fullmatch(r"10 steps, 1 compile; compiled and eager differ by (\S+)\n", done.stdout)
    assert found is not None and float(found[1]) <= 3e-2  # two orders of bfloat16 roundings
    assert "Warning" not in done.stderr


def test_the_page_is_linked_and_names_its_files() -> None:
    assert "docs/migrate.md" in (ROOT / "README.md").read_text(encoding="utf-8")
    for link in re.findall(r"\]\((\S+?)\)", PAGE):
        assert (ROOT / "docs" / link).is_file(), link
    for path in re.findall(r"`(tests/\S+\.py)`", PAGE):
        assert (ROOT / path).is_file(), path
