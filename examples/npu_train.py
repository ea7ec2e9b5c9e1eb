"""Train a small byte-level transformer on Ascend NPUs, its whole optimizer step one GE graph by TorchAir.

    python examples/npu_train.py
    torchrun --standalone --nproc-per-node 4 examples/npu_train.py

Several ranks shard the model by `fully_shard`; the step's collectives are in the graph. Where there is no NPU it shows
a few steps on the CPU instead: TorchAir's own Python lowers the step to the graph that an NPU would get, this library's
reading of GE's operators runs it, and every step is held against the same one run eagerly. That needs protobuf and
packaging (`pip install 'muon-compile[npu]'`), and a network once, for TorchAir's Python.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import math
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from _model import ByteTransformer, loss_of
from _textdata import random_windows, standard_library_text
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR

import muon_compile as mc
from muon_compile.npu import stand_in
from muon_compile.npu.wheel import FetchError, torchair_sources

HAS_NPU = importlib.util.find_spec("torch_npu") is not None
if HAS_NPU:
    import torch_npu  # noqa: F401

MODEL = {"dim": 128, "num_layers": 4, "num_heads": 4, "context": 128}
BATCH_SIZE = 8  # of every rank
MAX_GRAD_NORM = 1.0
WARM_UP_FRACTION = 0.1
FINAL_LR_FRACTION = 0.05
NUM_STEPS = {"npu": 300, "cpu": 5}
# Float32 shows better whether the graph is right.
NS_DTYPE = {"npu": "bfloat16", "cpu": "float32"}
NUM_LINES = 20

MUON = {"lr": 2e-2, "momentum": 0.95, "weight_decay": 0.1}
ADAMW = {"adamw_lr": 3e-3, "betas": (0.9, 0.95), "adamw_weight_decay": 0.01}

TORCH_NPU = "2.13.0"
WITHOUT_NPU = f"""No NPU here, so this shows what the step becomes, not how fast it is.
  real      how it is lowered: TorchAir's own Python, out of torch_npu {TORCH_NPU}, makes one GE graph of it
  not real  what runs that graph: muon_compile's reading of GE's operators on the CPU, instead of GE and CANN. Whether
            GE takes the graph, what its passes make of it, an NPU's rounding, memory and speed are not shown
Each step is also run eagerly, from the same parameters and gradients; printed is how far the two changes of a parameter
are apart at most, relative to the change. Newton-Schulz amplifies roundings where a gradient is near singular: products
in float32 show 1e-4 or less, in bfloat16 up to 3e-1."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A model and what steps it."""

    model: nn.Module
    optimizer: mc.Muon
    step: mc.CompiledStep


@contextlib.contextmanager
def device_of_rank() -> Iterator[torch.device]:
    """This rank's device; under torchrun in a process group, HCCL's on NPUs and gloo's elsewhere."""
    device = torch.device("npu", int(os.environ.get("LOCAL_RANK", "0"))) if HAS_NPU else torch.device("cpu")
    if HAS_NPU:
        if not torch.npu.is_available():
            sys.exit("npu_train: torch_npu is installed, but finds no NPU; take a Python without it to run on the CPU.")
        torch.npu.set_device(device)
    launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if launched:
        # Of HCCL alone: from a mixed group TorchAir would take the wrong communicator.
        dist.init_process_group("hccl" if HAS_NPU else "gloo")
    try:
        yield device
    finally:
        if launched:
            dist.destroy_process_group()


def rank_and_world() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def install_stand_in() -> None:
    """Let TorchAir's Python work without an NPU. It is fetched by one rank, and all have it then."""
    # TorchAir asks torch for the device of a group in a way of old, and again of one whose backends are several.
    for message in (".*_get_pg_default_device", "Multiple backends are registered"):
        warnings.filterwarnings("ignore", message=message)
    rank, world = rank_and_world()
    failure: list[str | None] = [None]
    if rank == 0:
        try:
            torchair_sources(TORCH_NPU, progress=say)
        except FetchError as error:
            failure = [str(error)]
    if world > 1:
        dist.broadcast_object_list(failure)
    if failure[0] is not None:
        raise FetchError(failure[0])
    stand_in.install(torchair_sources(TORCH_NPU))


def new_training(device: torch.device, backend: str, arguments: argparse.Namespace) -> Training:
    """The same weights on every rank, then sharded; `route` sorts the parameters, one graph steps them all."""
    torch.manual_seed(arguments.seed)
    model = ByteTransformer(**MODEL).to(device)
    _, world = rank_and_world()
    if world > 1:
        mesh = init_device_mesh(device.type, (world,), mesh_dim_names=("shard",))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        # The logits are a view, and nobody writes to them.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    # Until compile_step says which it is, the optimizer only plans.
    config = mc.MuonConfig(ns_dtype=arguments.ns_dtype)
    optimizer = mc.Muon(mc.route(model, verbose=False), **MUON, config=config, **ADAMW, backend="torchair")
    # Without an NPU both plans are made of the same figures, so that they are the same step.
    step = mc.compile_step(
        optimizer, backend=backend, strategy=arguments.strategy, hardware=None if HAS_NPU else "cpu-2core"
    )
    return Training(model=model, optimizer=optimizer, step=step)


def lr_factor(step: int, num_steps: int) -> float:
    """Linear warm-up, then half a cosine down to `FINAL_LR_FRACTION`."""
    num_warm_up = max(1, round(WARM_UP_FRACTION * num_steps))
    if step < num_warm_up:
        return (step + 1) / num_warm_up
    done = (step - num_warm_up) / max(1, num_steps - num_warm_up)
    return FINAL_LR_FRACTION + (1 - FINAL_LR_FRACTION) * 0.5 * (1 + math.cos(math.pi * done))


def train(training: Training, eager: Training | None, device: torch.device, arguments: argparse.Namespace) -> None:
    """Train with warm-up, cosine decay and gradient clipping; what is compiled is dumped after the first step."""
    model, optimizer, num_steps = training.model, training.optimizer, arguments.steps
    scheduler = LambdaLR(optimizer, lambda step: lr_factor(step, num_steps))
    data = standard_library_text().train
    rank, _ = rank_and_world()
    batches = torch.Generator().manual_seed(arguments.seed + rank)
    for number in range(1, num_steps + 1):
        windows = random_windows(data, num=BATCH_SIZE, length=MODEL["context"], generator=batches)
        loss = loss_of(model, *(x.to(device) for x in windows))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        before = [local(p).clone() for p in model.parameters()] if eager else []
        optimizer.step()
        difference = "" if eager is None else f"  from eager {step_eagerly(eager, training, before):.1e}"
        scheduler.step()
        optimizer.zero_grad()
        if number == 1 or number % max(1, num_steps // NUM_LINES) == 0 or number == num_steps:
            say(f"  compiled  step {number:>4}/{num_steps}  loss {mean(loss):.3f}{difference}")
        if number == 1 and rank == 0:
            written = training.step.dump(arguments.out / "npu_train-dump")
            say(f"  {len(written)} files about the step, its GE graph among them: {arguments.out / 'npu_train-dump'}")


@torch.no_grad()
def step_eagerly(eager: Training, compiled: Training, before: list[Tensor]) -> float:
    """Take the step that was just compiled's eagerly, too, from where it started and with the same gradients.

    Returns:
        The largest relative difference of a parameter's change, over parameters and ranks.
    """
    pairs = list(zip(eager.model.parameters(), compiled.model.parameters(), before, strict=True))
    for mine, theirs, old in pairs:
        local(mine).copy_(old)
        mine.grad = theirs.grad.clone()
    for mine, theirs in zip(eager.optimizer.param_groups, compiled.optimizer.param_groups, strict=True):
        mine["lr"] = theirs["lr"]
    eager.optimizer.step()
    worst = torch.zeros(())
    for mine, theirs, old in pairs:
        expected = local(mine) - old
        if expected.numel():
            difference = (local(theirs) - old - expected).norm() / expected.norm().clamp(min=1e-12)
            worst = torch.maximum(worst, difference)
    if dist.is_initialized():
        dist.all_reduce(worst, dist.ReduceOp.MAX)
    return worst.item()


def local(x: Tensor) -> Tensor:
    """What of a parameter is this rank's."""
    return (x.to_local() if isinstance(x, DTensor) else x).detach()


def mean(loss: Tensor) -> float:
    """Of all ranks."""
    total = loss.detach().clone()
    if dist.is_initialized():
        dist.all_reduce(total)
    return total.item() / rank_and_world()[1]


def say(words: str) -> None:
    """Print on the first rank."""
    if rank_and_world()[0] == 0:
        print(words, flush=True)


def run(device: torch.device, arguments: argparse.Namespace) -> None:
    """Everything in the order it is printed."""
    arguments.steps = arguments.steps or NUM_STEPS[device.type]
    arguments.ns_dtype = arguments.ns_dtype or NS_DTYPE[device.type]
    _, world = rank_and_world()
    say("\n== Where this runs")
    if HAS_NPU:
        say(f"{world} x {torch.npu.get_device_name()}")
    else:
        say(WITHOUT_NPU)
        install_stand_in()
    training = new_training(device, "torchair", arguments)
    eager = None if HAS_NPU else new_training(device, "aot_eager", arguments)
    say("\n== Plan")
    say(training.step.plan.describe())
    what = f"{arguments.steps} steps, seed {arguments.seed}, products in {arguments.ns_dtype}, {world} rank(s)"
    say(f"\n== Training, {what}")
    say("  The first compiled step compiles, which takes a while.")
    train(training, eager, device, arguments)
    say("\n== Statistics of the compiled step")
    for name, value in training.step.stats.as_dict().items():
        say(f"{name:<16}  {value}")
    if world > 1:
        # None leaves while another works. And gloo's threads let go of tensors in here: once Python ends, they abort.
        dist.barrier()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    text = f"training steps (default: {NUM_STEPS['npu']} on NPUs, {NUM_STEPS['cpu']} without)"
    parser.add_argument("--steps", type=_positive, help=text)
    text = "how sharded matrices are made whole (default: auto)"
    parser.add_argument("--strategy", default="auto", metavar="NAME", help=text)
    text = f"dtype of the products (default: {NS_DTYPE['npu']} on NPUs, {NS_DTYPE['cpu']} without)"
    parser.add_argument("--ns-dtype", choices=("bfloat16", "float32"), help=text)
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the batches (default: 0)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the files (default: out)")
    return parser.parse_args()


def _positive(words: str) -> int:
    if not words.isdecimal() or int(words) < 1:
        raise argparse.ArgumentTypeError(f"expected a positive integer, got {words}")
    return int(words)


def main() -> int:
    arguments = parse_arguments()
    with device_of_rank() as device:
        try:
            run(device, arguments)
        except (mc.CompileError, FetchError) as error:
            if rank_and_world()[0] == 0:
                print(f"\nnpu_train: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
