"""The mixture-of-experts example: its model, its baseline, its command, and what it plans for clusters."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples"))

from moe.decoder import Experts, MoeConfig, MoeDecoder, losses_of, names, num_active_parameters  # noqa: E402
from moe.optimizers import NaiveMuon  # noqa: E402

TINY = MoeConfig.named("tiny")
# Billions: of all parameters, and of those that a token meets.
SIZES = {
    "tiny": (4.3e-5, 2.6e-5),
    "study": (1.48e-4, 8.0e-5),
    "small": (9e-3, 2.7e-3),
    "1b": (1.07, 0.44),
    "30b-a3b": (30.5, 3.0),
    "100b": (100, 11),
}


def run(*words: str, code: int = 0, timeout: float = 100) -> str:
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout if code == 0 else done.stderr


def train(out: Path, *words: str) -> str:
    return run(sys.executable, "examples/train_moe.py", "--backend", "aot_eager", "--out", str(out), *words)


def rows(out: Path) -> list[dict[str, str]]:
    with (out / "metrics.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


# -- the model ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", names())
def test_every_configuration_builds_without_memory(name: str) -> None:
    with torch.device("meta"):
        model = MoeDecoder(MoeConfig.named(name))
    total = sum(p.numel() for p in model.parameters())
    assert (total / 1e9, num_active_parameters(model) / 1e9) == pytest.approx(SIZES[name], rel=0.05)


def test_experts_are_what_their_formula_says() -> None:
    torch.manual_seed(0)
    experts = Experts(TINY)
    x = torch.randn(3, 5, TINY.dim)
    found, balance = experts(x)
    chances = experts.router(x).softmax(dim=-1)
    weights, chosen = chances.topk(TINY.num_active, dim=-1)
    weights = weights / weights.sum(dim=-1, keepdim=True)
    hidden = F.silu(torch.einsum("btd,efd->btef", x, experts.gate)) * torch.einsum("btd,efd->btef", x, experts.up)
    each = torch.einsum("btef,edf->bted", hidden, experts.down)
    mask = torch.zeros_like(chances).scatter(-1, chosen, weights)
    torch.testing.assert_close(found, (each * mask[..., None]).sum(dim=2) + experts.shared(x), rtol=1e-4, atol=1e-5)
    share = (mask > 0).float().mean(dim=1) / TINY.num_active
    expected = TINY.num_experts * (share * chances.mean(dim=1)).sum(dim=-1).mean()
    torch.testing.assert_close(balance, expected, rtol=1e-5, atol=0)


def test_the_balance_of_equal_chances_is_one_and_pulls_towards_it() -> None:
    experts = Experts(TINY)
    nn.init.zeros_(experts.router.weight)
    _, balance = experts(torch.randn(2, 4, TINY.dim))
    assert float(balance) == pytest.approx(1.0)
    nn.init.normal_(experts.router.weight, std=3.0)
    x = torch.randn(1, 16, TINY.dim).abs()
    assert float(experts(x)[1]) > 1.05


def test_the_loss_does_not_depend_on_how_the_batch_is_divided() -> None:
    torch.manual_seed(0)
    model = MoeDecoder(TINY)
    windows = torch.randint(256, (8, TINY.context + 1))
    whole, _ = losses_of(model, windows[:, :-1], windows[:, 1:], 0.1)
    halves = [losses_of(model, part[:, :-1], part[:, 1:], 0.1)[0] for part in windows.chunk(4)]
    torch.testing.assert_close(whole, torch.stack(halves).mean(), rtol=1e-6, atol=0)


# -- what it is compared with ------------------------------------------------------------------------------------------


def test_naive_muon_is_the_stock_one() -> None:
    def make() -> list[nn.Parameter]:
        generator = torch.Generator().manual_seed(0)
        return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((6, 9), (9, 6))]

    mine, theirs = make(), make()
    values = {"lr": 0.1, "weight_decay": 0.1, "momentum": 0.95}
    naive, stock = NaiveMuon(mine, **values), torch.optim.Muon(theirs, **values)
    for seed in range(5):
        for a, b in zip(mine, theirs, strict=True):
            grad = torch.randn(a.shape, generator=torch.Generator().manual_seed(10 + seed))
            a.grad, b.grad = grad.clone(), grad.clone()
        naive.step()
        stock.step()
    for a, b, start in zip(mine, theirs, make(), strict=True):
        change = (b - start).detach().norm()
        assert float((a - b).detach().norm()) <= 1e-5 * float(change)  # the same bfloat16 operators


def test_naive_muon_takes_each_expert_by_itself() -> None:
    stack = nn.Parameter(torch.zeros(3, 4, 6))
    stack.grad = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(1))
    single = [nn.Parameter(torch.zeros(4, 6)) for _ in range(3)]
    for param, grad in zip(single, stack.grad, strict=True):
        param.grad = grad.clone()
    for params in ([stack], single):
        NaiveMuon(params, lr=0.1, weight_decay=0.0, momentum=0.9).step()
    assert torch.equal(stack.detach(), torch.stack([p.detach() for p in single]))


# -- the command -------------------------------------------------------------------------------------------------------


def test_it_trains_and_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    told = train(tmp_path / "whole", "--steps", "5")
    assert "compiles 1, recompiles 0, host launches 1 a step" in told and "MFU" in told
    train(tmp_path / "parts", "--steps", "1")  # before the learning rate is whole
    assert "goes on from" in train(tmp_path / "parts", "--steps", "5")
    whole, parts = rows(tmp_path / "whole"), rows(tmp_path / "parts")
    assert [row["step"] for row in parts] == ["1", "2", "3", "4", "5"]
    assert [row["loss"] for row in parts] == [row["loss"] for row in whole]
    assert all(float(row["mfu"]) > 0 and float(row["optimizer_cpu_seconds"]) > 0 for row in whole)
    assert float(whole[-1]["loss"]) < float(whole[0]["loss"])


def test_tensorboard_has_every_step(tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    train(tmp_path, "--steps", "3")
    board = events.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    logged = [event.value for event in board.Scalars("loss")]
    assert logged == pytest.approx([float(row["loss"]) for row in rows(tmp_path)], rel=1e-6)
    assert {"seconds", "optimizer_seconds", "tokens_per_second", "mfu", "memory_mb"} <= set(board.Tags()["scalars"])


@pytest.mark.parametrize("words", [("--dtype", "bfloat16", "--master-weights"), ("--optimizer", "naive")], ids=str)
def test_other_ways_to_train(words: tuple[str, ...], tmp_path: Path) -> None:
    train(tmp_path, "--steps", "3", *words)
    values = [float(row["loss"]) for row in rows(tmp_path)]
    assert values[2] < values[0] < 7.0


def test_a_cluster_is_planned_without_memory(tmp_path: Path) -> None:
    told = train(tmp_path, "--config", "100b", "--plan", "--mesh", "8x64", "--hardware", "ascend-910c")
    assert "100.4 B parameters" in told and "all_to_all" in told and "queue pairs" in told
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--optimizer", "adamw", "--master-weights"), "expected --optimizer muon"),
        (("--mesh", "2x2"), "expected 1 ranks"),
        (("--mesh", "2x"), "replicas x shards"),
        (("--steps", "0"), "positive"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(words: tuple[str, ...], says: str) -> None:
    assert says in run(sys.executable, "examples/train_moe.py", *words, code=2)


def losses(tmp_path: Path, mesh: str, *words: str) -> list[float]:
    out = tmp_path / f"{mesh}{''.join(words)}"
    ranks = torch.Size(int(part) for part in mesh.split("x")).numel()
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    how = ["--mesh", mesh, "--steps", "3", "--backend", "aot_eager", "--ns-dtype", "float32", "--out", str(out), *words]
    told = run(*launch, "examples/train_moe.py", *how, timeout=100)
    assert "naive" in words or "recompiles 0" in told
    return [float(row["loss"]) for row in rows(out)]


@pytest.mark.dist
def test_fsdp_and_hsdp_lose_as_one_process_does(tmp_path: Path) -> None:
    train(tmp_path / "alone", "--steps", "3", "--ns-dtype", "float32")
    alone = [float(row["loss"]) for row in rows(tmp_path / "alone")]
    for mesh in ("2", "2x2"):
        # float32 gradients summed in another order; three steps are too few for a token to choose another expert.
        assert losses(tmp_path, mesh) == pytest.approx(alone, rel=1e-4)
    assert losses(tmp_path, "2", "--optimizer", "naive") == pytest.approx(alone, rel=2e-2)  # bfloat16 products
