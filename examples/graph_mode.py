"""Train with forward, backward, clipping and update in one graph, beside the eager loop on the same batches.

    python examples/graph_mode.py                                               # one process
    python examples/graph_mode.py --backend aot_eager --steps 20                # without a C++ compiler
    torchrun --standalone --nproc-per-node 2 examples/graph_mode.py             # DistributedDataParallel

Prints both losses as they train, what the one graph holds, and how long an iteration took in each loop.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import time
from collections import Counter
from collections.abc import Iterator

import torch
import torch.distributed as dist
from _model import ByteTransformer, loss_of
from _report import progress
from _textdata import random_windows, standard_library_text
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

import muon_compile as mc

MAX_GRAD_NORM = 1.0
BATCH_SIZE = 8
# Where AdamW has seen little, it divides small gradients by their own size; a larger eps keeps both loops together.
ADAMW = mc.AdamWConfig(eps=1e-6)


def loss_fn(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Its first parameter is called `model`, so it is given the model and the whole batch."""
    return loss_of(model, inputs, targets)


def new_run(args: argparse.Namespace) -> tuple[nn.Module, mc.Muon, mc.CompiledStep]:
    """The same weights in every run and on every rank."""
    torch.manual_seed(args.seed)
    model: nn.Module = ByteTransformer(dim=args.dim, num_layers=args.layers, num_heads=4, context=args.context)
    optimizer = mc.Muon(
        mc.route(model, verbose=False),
        lr=2e-2,
        weight_decay=0.1,
        config=mc.MuonConfig(ns_dtype="float32"),
        adamw_lr=3e-3,
        adamw_config=ADAMW,
    )
    groups = {"replicate": dist.group.WORLD} if dist.is_initialized() else None
    config = mc.CompileConfig(clip_grad_norm=MAX_GRAD_NORM)
    step = mc.compile_step(optimizer, backend=args.backend, groups=groups, config=config)
    return (DistributedDataParallel(model) if dist.is_initialized() else model), optimizer, step


def train(args: argparse.Namespace) -> None:
    """Both loops, batch by batch."""
    text = standard_library_text()
    rank = dist.get_rank() if dist.is_initialized() else 0
    batches = torch.Generator().manual_seed(args.seed + rank)
    model, optimizer, step = new_run(args)
    other, reference, _ = new_run(args)
    schedulers = [LambdaLR(o, lambda number: 1 - number / args.steps) for o in (optimizer, reference)]

    train_step = mc.compile_train_step(model, loss_fn, step, backend=args.backend)  # the one graph

    differences, seconds = [], {"graph": [], "eager": []}
    show = progress("graph", args.steps) if rank == 0 else contextlib.nullcontext(lambda *_: None)
    with show as report:
        for number in range(1, args.steps + 1):
            batch = random_windows(text.train, num=BATCH_SIZE, length=args.context, generator=batches)
            started = time.perf_counter()
            loss = train_step(*batch)  # one call
            middle = time.perf_counter()
            expected = loss_fn(other, *batch)
            reference.zero_grad()
            expected.backward()
            reference.step()
            ended = time.perf_counter()
            for scheduler in schedulers:
                scheduler.step()
            seconds["graph"].append(middle - started)
            seconds["eager"].append(ended - middle)
            differences.append(abs(loss.item() - expected.item()))
            report(number, loss.item())
    if rank == 0:
        print(f"largest difference between the two losses: {max(differences):.1e} nats per byte")
        (graph,) = train_step.graphs
        kinds = Counter(node.op for node in graph.graph.nodes)
        print(f"graphs: {len(train_step.graphs)}, of {kinds['call_function']} operators as Dynamo saw them")
        later = {name: statistics.median(taken[1:] or taken) for name, taken in seconds.items()}
        print(f"iteration, eager loop / one graph: {later['eager'] / later['graph']:.2f}x (median, same process)")


@contextlib.contextmanager
def ranks() -> Iterator[None]:
    """Under torchrun, a gloo group."""
    launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if launched:
        dist.init_process_group("gloo")
    yield
    if launched:
        dist.barrier()
        dist.destroy_process_group()


def main() -> None:
    """Read the arguments and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--backend", choices=("inductor", "aot_eager"), default="inductor")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with ranks():
        train(args)


if __name__ == "__main__":
    main()
