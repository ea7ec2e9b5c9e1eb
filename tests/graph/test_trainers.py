"""The step under trainers: each example trains as a plain eager loop does, resumes, and compiles once.

What trainers do to an optimizer that an example cannot show on a CPU is done here by hand.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import muon_compile as mc
from tests.graph.twins import assert_equal

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "trainers"
SAVED, LAST = 3, 5
TRAINERS = {"plain": "torch", "on_accelerate": "accelerate", "on_lightning": "lightning"}


def need(package: str) -> None:
    """Skip without the package; under CI, which installs it, fail."""
    if importlib.util.find_spec(package) is None:
        words = f"{package} is not installed; `make setup` installs it"
        if os.environ.get("CI"):
            pytest.fail(words)
        pytest.skip(words)


@functools.cache
def tiny() -> ModuleType:
    spec = importlib.util.spec_from_file_location("_tiny", FOLDER / "_tiny.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(words: list[str], *, steps: int, checkpoint: Path) -> dict[str, Any]:
    arguments = ["--steps", str(steps), "--backend", "aot_eager", "--checkpoint", str(checkpoint)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_GLOO_LAZY_INIT": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [sys.executable, *words, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


@functools.cache
def eager_losses(kind: str) -> tuple[float, ...]:
    """The loop that every example stands for, clipping eagerly: torch's optimizers, or ours."""
    shared = tiny()
    model = shared.new_model()
    optimizers: list[torch.optim.Optimizer]
    if kind == "stock":
        hidden, rest = mc.route(model, verbose=False)
        optimizers = [torch.optim.Muon(hidden["params"], lr=0.02), torch.optim.AdamW(rest["params"], lr=3e-3)]
    else:
        groups, config = mc.route(model, verbose=False), mc.MuonConfig(preset="torch")
        optimizers = [mc.Muon(groups, lr=0.02, adamw_lr=3e-3, config=config, backend="aot_eager")]
    schedulers = [shared.new_scheduler(optimizer) for optimizer in optimizers]
    losses = []
    for step in range(LAST):
        total = 0.0
        for (tokens,) in shared.loader_of(step, step + 1):
            loss = shared.loss_of(model, tokens) / shared.ACCUMULATE
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), shared.MAX_GRAD_NORM)
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(total)
    return tuple(losses)


def check(words: list[str], folder: Path) -> None:
    """Three steps, a checkpoint, two more in a new process."""
    first = run(words, steps=SAVED, checkpoint=folder)
    second = run(words, steps=LAST, checkpoint=folder)
    for told, num_steps in ((first, SAVED), (second, LAST - SAVED)):
        assert all(math.isfinite(loss) for loss in told["losses"])
        assert (told["graphs"], told["compiles"], told["graph_breaks"]) == (1, 1, 0), told
        assert told["steps"] == num_steps, told
    losses = first["losses"] + second["losses"]
    assert losses == pytest.approx(eager_losses("own"), abs=1e-4)
    assert losses == pytest.approx(eager_losses("stock"), abs=3e-3)  # bfloat16 products round elsewhere


@pytest.mark.timeout(240)  # two processes that import a trainer
@pytest.mark.parametrize("name", TRAINERS)
def test_a_trainer_is_the_eager_loop_and_resumes(name: str, tmp_path: Path) -> None:
    need(TRAINERS[name])
    check([f"examples/trainers/{name}.py"], tmp_path / "checkpoint")


@pytest.mark.dist
@pytest.mark.timeout(240)
def test_the_plain_loop_under_fully_shard(tmp_path: Path) -> None:
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "examples/trainers/plain.py"]
    check(words, tmp_path / "checkpoint")


def test_a_scaler_of_accelerate_calls_the_compiled_step() -> None:
    """Accelerate replaces `step` for each call under float16; an overflow is skipped and seen as such."""
    need("accelerate")
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer

    Accelerator(cpu=True)
    shared = tiny()
    model = shared.new_model()
    inner = shared.new_optimizer(model, "aot_eager")
    optimizer = AcceleratedOptimizer(inner, scaler=torch.amp.GradScaler("cpu", init_scale=1024.0))
    skipped = []
    for number, (tokens,) in enumerate(shared.loader_of(0, 2)):
        optimizer.scaler.scale(shared.loss_of(model, tokens)).backward()
        if number == 1:
            model.up.weight.grad.fill_(float("inf"))
        before = [parameter.detach().clone() for parameter in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        skipped.append(optimizer.step_was_skipped)
        if number == 1:
            assert_equal(list(model.parameters()), before)
    assert skipped == [False, True, False, False]
    assert (inner.compiled.stats.steps, inner.compiled.stats.compiles) == (3, 1)


def test_compiling_a_prepared_optimizer_says_which_one_it_takes() -> None:
    need("accelerate")
    from accelerate import Accelerator

    model = tiny().new_model()
    prepared = Accelerator(cpu=True).prepare(torch.optim.AdamW(model.parameters()))
    with pytest.raises(TypeError, match="no adapter knows accelerate.optimizer.AcceleratedOptimizer"):
        mc.compile_step(prepared, backend="aot_eager")
    step = mc.compile_step(prepared.optimizer, backend="aot_eager")
    shared = tiny()
    (tokens,) = next(iter(shared.loader_of(0, 1)))
    shared.loss_of(model, tokens).backward()
    prepared.step()
    assert step.stats.steps == 1


def test_parameters_switched_after_the_optimizer_was_made() -> None:
    """What Accelerate's FSDP2 does: other tensors in the groups. The old ones leave no state behind."""
    shared = tiny()
    twin, model = shared.new_model(), shared.new_model()
    plain, switched = shared.new_optimizer(twin, "aot_eager"), shared.new_optimizer(model, "aot_eager")
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    wanted = [[names[id(p)] for p in group["params"]] for group in switched.param_groups]
    model = shared.new_model()
    new = dict(model.named_parameters())
    for group, group_names in zip(switched.param_groups, wanted, strict=True):
        group["params"] = [new[name] for name in group_names]
    switched.compiled.rebind()
    for tokens in shared.loader_of(0, 2):
        for each, optimizer in ((twin, plain), (model, switched)):
            shared.loss_of(each, tokens[0]).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_equal(list(model.parameters()), list(twin.parameters()))
    assert switched.state_dict()["state"].keys() == plain.state_dict()["state"].keys()
    assert (switched.compiled.stats.graphs, switched.compiled.stats.compiles) == (1, 1)
