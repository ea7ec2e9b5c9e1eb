"""Train a mixture-of-experts decoder under fully_shard, with this library's Muon step or with others to compare.

    python examples/train_moe.py --config tiny --steps 20
    torchrun --standalone --nproc-per-node 4 examples/train_moe.py --config small --mesh 2x2 --steps 100
    torchrun --standalone --nproc-per-node 4 examples/train_moe.py --config small --mesh 2x2 --optimizer naive
    python examples/train_moe.py --config 100b --plan --mesh 8x64 --hardware ascend-910c

`--mesh 4` shards over 4 ranks, `2x2` keeps 2 replicas of 2 shards each (HSDP). Experts are stacks of matrices
`[experts, out, in]`, sharded along their first dim like everything else. Every rank takes its share of one batch that
the step's number decides, so runs on other meshes see the same data. Writes `metrics.csv`, for TensorBoard where that
is installed, and checkpoints that the same command goes on from. `--plan` trains nothing: it builds the model without
memory, and prints how long its step would take on the mesh, with every strategy.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import dataclasses
import os
import resource
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _report import progress
from _textdata import Text, random_windows, standard_library_text
from checkpoints import latest, load, save, together
from moe.decoder import MoeConfig, MoeDecoder, losses_of, names, num_active_parameters
from moe.optimizers import KINDS, groups_of, optimizer_of
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

import muon_compile as mc

BACKENDS = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}
PEAK_SIDE, PEAK_SECONDS = 512, 0.3


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One step, over all ranks.

    Args:
        step: Number, from 1.
        loss: Cross-entropy in nats per byte, before the step.
        objective: What was trained on: with the load-balancing loss.
        seconds: Of the whole iteration.
        optimizer_seconds: Of the optimizer's step, on the first rank.
        optimizer_cpu_seconds: CPU time of the optimizer's step, summed over ranks.
        tokens_per_second: Bytes trained on.
        mfu: Share of the measured peak that 6 FLOPs per token and active parameter are.
        memory_mb: Most memory that a rank has had: resident, or allocated on its accelerator.
    """

    step: int
    loss: float
    objective: float
    seconds: float
    optimizer_seconds: float
    optimizer_cpu_seconds: float
    tokens_per_second: float
    mfu: float
    memory_mb: float


class World:
    """The ranks, and this one's place among them."""

    def __init__(self, mesh: tuple[int, ...], device: str) -> None:
        self.kind = device
        self.size = int(os.environ.get("WORLD_SIZE", "1"))
        self.rank = int(os.environ.get("RANK", "0"))
        self.device = torch.device(device)
        if device != "cpu":
            self.device = torch.device(device, int(os.environ.get("LOCAL_RANK", "0")))
            getattr(torch, device).set_device(self.device)
        self.mesh: DeviceMesh | None = None
        if self.size > 1:
            dist.init_process_group(BACKENDS[device])
            axes = ("shard",) if len(mesh) == 1 else ("replica", "shard")
            self.mesh = init_device_mesh(device, mesh, mesh_dim_names=axes)

    def sums(self, *values: float) -> list[float]:
        """Each value, added up over all ranks."""
        if self.size == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64 if self.kind != "npu" else torch.float32, device=self.device)
        dist.all_reduce(total)
        return total.tolist()

    def wait(self) -> None:
        """Until what was launched is done."""
        if self.kind != "cpu":
            getattr(torch, self.kind).synchronize(self.device)

    def memory_mb(self) -> float:
        if self.kind != "cpu":
            return getattr(torch, self.kind).max_memory_allocated(self.device) / 1e6
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def sharded(model: MoeDecoder, mesh: DeviceMesh | None) -> MoeDecoder:
    """Every block is gathered when it is needed; experts shard along the experts."""
    if mesh is not None:
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def peak_flops(world: World, dtype: torch.dtype) -> float:
    """FLOP/s of square products on all ranks at once: what MFU is a share of."""
    a = torch.ones(PEAK_SIDE, PEAK_SIDE, dtype=dtype, device=world.device)
    for _ in range(3):
        a @ a
    world.wait()
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < PEAK_SECONDS:
        a @ a
        count += 1
    world.wait()
    (total,) = world.sums(2 * PEAK_SIDE**3 * count / (time.perf_counter() - start))
    return total


class Training:
    """A run: model, optimizer, data, and what it measures."""

    def __init__(self, arguments: argparse.Namespace, world: World, config: MoeConfig | None = None) -> None:
        self.config, self.world = config or MoeConfig.named(arguments.config), world
        self.dtype: torch.dtype = getattr(torch, arguments.dtype)
        torch.manual_seed(arguments.seed)  # the same weights on every rank
        with world.device:
            model = MoeDecoder(self.config).to(self.dtype)
        self.active = num_active_parameters(model)
        self.model = sharded(model, world.mesh)
        self.optimizer = optimizer_of(
            self.model,
            self.config,
            arguments.optimizer,
            strategy=arguments.strategy,
            backend=arguments.backend,
            ns_dtype=arguments.ns_dtype,
            compile_config=mc.CompileConfig(master_weights=arguments.master_weights, rounding=arguments.rounding),
        )
        self.seed = arguments.seed
        self.peak = peak_flops(world, self.dtype)
        self.text: Text = standard_library_text()

    def batch(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's share of the batch of a step."""
        generator = torch.Generator().manual_seed(1_000_003 * self.seed + number)
        windows = random_windows(
            self.text.train, num=self.config.batch, length=self.config.context, generator=generator
        )
        inputs, targets = (part.chunk(self.world.size)[self.world.rank].to(self.world.device) for part in windows)
        return inputs, targets

    def step(self, number: int) -> Row:
        """One iteration."""
        world = self.world
        started = time.perf_counter()
        inputs, targets = self.batch(number)
        objective, loss = losses_of(self.model, inputs, targets, self.config.balance)
        objective.backward()
        world.wait()
        before, cpu = time.perf_counter(), time.process_time()
        self.optimizer.step()
        world.wait()
        after, cpu = time.perf_counter(), time.process_time() - cpu
        self.optimizer.zero_grad()
        sums = world.sums(loss.item(), objective.item(), cpu)
        seconds = time.perf_counter() - started
        rate = self.config.batch * self.config.context / seconds
        return Row(
            step=number,
            loss=sums[0] / world.size,
            objective=sums[1] / world.size,
            seconds=seconds,
            optimizer_seconds=after - before,
            optimizer_cpu_seconds=sums[2],
            tokens_per_second=rate,
            mfu=6 * self.active * rate / self.peak,
            memory_mb=world.memory_mb(),
        )

    @torch.no_grad()
    def validation_loss(self, windows: int = 16) -> float:
        """Cross-entropy on one fixed set of windows of files that nothing was trained on."""
        generator = torch.Generator().manual_seed(0)
        drawn = random_windows(
            self.text.validation, num=windows, length=self.config.context, generator=generator
        )  # fmt: skip
        inputs, targets = (part.chunk(self.world.size)[self.world.rank].to(self.world.device) for part in drawn)
        return self.world.sums(losses_of(self.model, inputs, targets, 0.0)[1].item())[0] / self.world.size


def schedule_of(optimizer: Optimizer, warm_up: int) -> LambdaLR:
    """Linear warm-up, then constant: runs of other lengths stay comparable."""
    return LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / max(1, warm_up)))


@contextlib.contextmanager
def writers(out: Path, first: int, is_first: bool) -> Iterator[Callable[[Row], None]]:
    """Write every row to `metrics.csv`, on the first rank, and for TensorBoard where that is installed."""
    if not is_first:
        yield lambda row: None
        return
    path = out / "metrics.csv"
    fields = [field.name for field in dataclasses.fields(Row)]
    kept = []
    if first > 1 and path.exists():  # goes on from a checkpoint: what came after that is made again
        with path.open(newline="", encoding="utf-8") as file:
            kept = [row for row in csv.DictReader(file) if int(row["step"]) < first]
    board: Any = None
    with contextlib.suppress(ImportError):
        from torch.utils.tensorboard import SummaryWriter

        board = SummaryWriter(str(out / "tensorboard"), purge_step=first)
    with path.open("w", newline="", encoding="utf-8") as file, board or contextlib.nullcontext():
        table = csv.DictWriter(file, fields)
        table.writeheader()
        table.writerows(kept)

        def write(row: Row) -> None:
            values = dataclasses.asdict(row)
            table.writerow(values)
            file.flush()
            for name in fields[1:] if board is not None else ():
                board.add_scalar(name, values[name], row.step)

        yield write


def train(arguments: argparse.Namespace) -> None:
    world = World(arguments.mesh, arguments.device)
    is_first = world.rank == 0
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    training = Training(arguments, world)
    model, optimizer = training.model, training.optimizer
    scheduler = schedule_of(optimizer, training.config.warm_up)
    if arguments.fresh and is_first:
        shutil.rmtree(out / "checkpoints", ignore_errors=True)
    together()
    found = latest(out / "checkpoints")
    first = 1 + (load(found, model, optimizer) if found is not None else 0)
    scheduler.last_epoch = first - 1
    for group, rate in zip(optimizer.param_groups, scheduler.base_lrs, strict=True):
        group["lr"] = rate * scheduler.lr_lambdas[0](first - 1)
    if is_first:
        total = sum(p.numel() for p in model.parameters())
        mesh = "x".join(map(str, arguments.mesh))
        print(
            f"{arguments.config}: {total / 1e6:.2f} M parameters, {training.active / 1e6:.2f} M of them per token; "
            f"{arguments.optimizer} on {mesh} rank(s); peak {training.peak / 1e9:.0f} GFLOP/s",
            flush=True,
        )
        if found is not None:
            print(f"goes on from {found}", flush=True)
    rows: list[Row] = []
    shown = progress(arguments.optimizer, arguments.steps) if is_first else contextlib.nullcontext(lambda *_: None)
    with writers(out, first, is_first) as write, shown as report:
        for number in range(first, arguments.steps + 1):
            rows.append(training.step(number))
            scheduler.step()
            write(rows[-1])
            report(number, rows[-1].loss)
            if number % arguments.checkpoint_every == 0 or number == arguments.steps:
                save(out / "checkpoints", number, model, optimizer)
    validation = training.validation_loss()
    if is_first and rows:
        summarize(rows, validation, optimizer)
        print(f"{out / 'metrics.csv'}: every step")
    if world.size > 1:
        dist.destroy_process_group()


def summarize(rows: list[Row], validation: float, optimizer: Optimizer) -> None:
    """The second half of the run: the first steps compile, and caches are cold."""
    late = rows[len(rows) // 2 :]

    def median(name: str) -> float:
        values = sorted(getattr(row, name) for row in late)
        return values[len(values) // 2]

    share = median("optimizer_seconds") / median("seconds")
    print(
        f"loss {rows[-1].loss:.4f}, on held-out files {validation:.4f}\n"
        f"iteration {1e3 * median('seconds'):.1f} ms; optimizer step {1e3 * median('optimizer_seconds'):.1f} ms "
        f"({share:.1%}), {median('optimizer_cpu_seconds'):.4f} CPU seconds over all ranks\n"
        f"{median('tokens_per_second'):.0f} tokens/s, MFU {median('mfu'):.1%}, {rows[-1].memory_mb:.0f} MB at most"
    )
    if isinstance(optimizer, mc.Muon):
        stats = optimizer.compiled.stats
        print(f"sent {stats.bytes} bytes by each rank's part in the step's {stats.collectives} collectives")
        print(f"compiles {stats.compiles}, recompiles {stats.recompiles}, host launches {stats.host_launches} a step")


def plan(arguments: argparse.Namespace) -> None:
    """What the step would be on a cluster; nothing is allocated."""
    config = MoeConfig.named(arguments.config)
    with torch.device("meta"):
        model: nn.Module = MoeDecoder(config)
    axes = ("shard",) if len(arguments.mesh) == 1 else ("replica", "shard")
    mesh = mc.MeshSpec(axes=tuple(zip(axes, arguments.mesh, strict=True)))
    specs = [
        mc.MatrixSpec(name=name, shape=tuple(param.shape), dtype="bfloat16", algorithm=group["algorithm"], group=index)
        for index, group in enumerate(groups_of(model))
        for name, param in group["params"]
    ]
    print(f"{arguments.config}: {sum(p.numel() for p in model.parameters()) / 1e9:.1f} B parameters")
    print(mc.simulate(specs, mesh=mesh, hardware=arguments.hardware))


def mesh_of(text: str) -> tuple[int, ...]:
    sizes = tuple(int(part) for part in text.split("x") if part.isdigit())
    if "x".join(map(str, sizes)) != text or len(sizes) not in (1, 2) or min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"expected ranks, or replicas x shards, as in 4 or 2x2, got {text!r}")
    return sizes


def arguments_of(words: Sequence[str] | None = None) -> argparse.Namespace:
    assert __doc__ is not None
    world = int(os.environ.get("WORLD_SIZE", "1"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", choices=names(), default="tiny", help="sizes (default: tiny)")
    parser.add_argument("--optimizer", choices=KINDS, default="muon", help="default: muon")
    parser.add_argument("--strategy", default="auto", metavar="NAME", help="how muon makes matrices whole")
    parser.add_argument("--mesh", type=mesh_of, default=(world,), help="default: one axis of all ranks")
    parser.add_argument("--device", choices=sorted(BACKENDS), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the parameters")
    parser.add_argument("--master-weights", action="store_true", help="float32 copies of narrower parameters")
    parser.add_argument("--rounding", choices=("nearest", "stochastic"), default="nearest")
    parser.add_argument("--ns-dtype", choices=("auto", "bfloat16", "float32"), default="auto", help="of the products")
    parser.add_argument("--backend", choices=("inductor", "aot_eager", "torchair"), default="inductor")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--checkpoint-every", type=int, default=50, metavar="STEPS")
    parser.add_argument("--fresh", action="store_true", help="remove checkpoints in --out, and begin anew")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out/moe"))
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of a rank (default: 1)")
    parser.add_argument("--plan", action="store_true", help="print the predicted step on the mesh, and train nothing")
    parser.add_argument("--hardware", default="h100", help="for --plan: a preset's name (default: h100)")
    arguments = parser.parse_args(words)
    ranks = torch.Size(arguments.mesh).numel()
    if not arguments.plan and ranks != world:
        parser.error(f"--mesh: expected {world} ranks, as many as torchrun started, got {ranks}")
    batch = MoeConfig.named(arguments.config).batch
    if not arguments.plan and batch % ranks:
        parser.error(f"--mesh: expected ranks that divide the batch of {batch} windows, got {ranks}")
    if arguments.optimizer != "muon" and (arguments.master_weights or arguments.rounding != "nearest"):
        parser.error(f"--master-weights, --rounding: expected --optimizer muon, got {arguments.optimizer}")
    if arguments.steps < 1 or arguments.checkpoint_every < 1 or arguments.threads < 1:
        parser.error("--steps, --checkpoint-every, --threads: expected positive integers")
    return arguments


def main() -> int:
    arguments = arguments_of()
    torch.set_num_threads(arguments.threads)
    try:
        plan(arguments) if arguments.plan else train(arguments)
    except (mc.CompileError, ValueError) as error:
        print(f"\ntrain_moe: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
