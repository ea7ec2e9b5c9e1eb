"""What a rank does in ``soak.py``: make steps, and look now and then at what must hold."""

from __future__ import annotations

import faulthandler
import gc
import hashlib
import os
import random
import signal
import time
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

WORLD = 4
# On 4 shards: even rows; 2, 2, 1, 0; 1, 1, 1, 0; 1, 0, 0, 0; and experts likewise. Names with "cols" are cut so.
SHAPES: dict[str, tuple[int, ...]] = {
    "even": (16, 12),
    "even_too": (16, 12),
    "five_rows": (5, 8),
    "three_rows": (3, 8),
    "one_row": (1, 8),
    "wide": (8, 20),
    "tall": (64, 12),
    "cols": (6, 16),
    "experts": (6, 8, 12),
    "three_experts": (3, 8, 12),
    "bias": (9,),
    "replicated": (10, 6),
}
MESHES = {"fsdp": (WORLD,), "hsdp": (2, WORLD // 2)}
NUM_GRADIENTS = 8  # different ones per parameter, drawn anew every step
MISSING = 0.1  # of all gradients; in every tenth of those steps all are
# Between looks a process may grow by what its allocators keep; a leak of a tensor per step is more.
RSS_SLACK = 32 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One mesh with one strategy."""

    mesh: str
    strategy: str
    backend: str
    steps: int
    every: int
    seed: int
    deadline: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What a rank saw between two steps."""

    steps: int
    live_bytes: int
    live_tensors: int
    rss: int
    recompiles: int
    compiles: int
    problems: tuple[str, ...]


class Soaked:
    """A run's parameters and optimizer on this rank."""

    def __init__(self, run: Run, config: Any = None) -> None:
        import torch
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

        import muon_compile as mc

        sizes = MESHES[run.mesh]
        self.mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replica", "shard")[-len(sizes) :])
        generator = torch.Generator().manual_seed(run.seed)
        self.params: dict[str, Any] = {}
        self.grads: dict[str, list[Any]] = {}
        for name, shape in SHAPES.items():
            if name == "replicated" and run.mesh == "hsdp":
                continue  # its copies would lie along two axes, which the step refuses
            placement: Placement = Shard(1 if "cols" in name else 0)
            placements = [Replicate()] * len(sizes) if name == "replicated" else [Replicate(), placement][-len(sizes) :]
            # Every rank has the same values and cuts its own, as fully_shard does.
            whole = [torch.randn(shape, generator=generator) for _ in range(1 + NUM_GRADIENTS)]
            value, *grads = (distribute_tensor(t, self.mesh, placements, src_data_rank=None) for t in whole)
            self.params[name], self.grads[name] = torch.nn.Parameter(value), grads
        matrices = [(name, p) for name, p in self.params.items() if p.dim() > 1]
        rest = [(name, p) for name, p in self.params.items() if p.dim() == 1]
        groups: list[dict[str, Any]] = [{"params": matrices}, {"params": rest, "algorithm": "adamw"}]
        self.optimizer = mc.Muon(groups, lr=0.02, weight_decay=0.1, backend=run.backend)
        self.step = mc.compile_step(self.optimizer, backend=run.backend, strategy=run.strategy, config=config)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(self.optimizer, T_0=50)
        self.digests: dict[str, str] = {}

    def give(self, draw: random.Random) -> None:
        """New gradients; ``draw`` says the same on every rank."""
        nothing = draw.random() < MISSING / 10
        for name, param in self.params.items():
            gone, which = draw.random() < MISSING, draw.randrange(NUM_GRADIENTS)
            param.grad = None if nothing or gone else self.grads[name][which]

    def local(self, name: str) -> list[Any]:
        """This rank's memory of a parameter and its state."""
        param = self.params[name]
        tensors = [param, *self.optimizer.state[param].values()]
        return [getattr(t, "_local_tensor", t).detach() for t in tensors]

    def look(self, steps: int) -> Look:
        """What must hold; every rank calls it."""
        import torch
        import torch.distributed as dist

        problems = []
        digests = {}
        for name in self.params:
            tensors = self.local(name)
            if not all(bool(torch.isfinite(t).all()) for t in tensors):
                problems.append(f"{name} is not finite")
            digests[name] = hashlib.sha256(b"".join(t.contiguous().numpy().tobytes() for t in tensors)).hexdigest()
            if tensors[0].numel() and digests[name] == self.digests.get(name):
                problems.append(f"{name} has not moved")
        self.digests = digests
        at = {name: self._shard_of(name) for name in self.params}
        everyone: list[Any] = [None] * WORLD
        dist.all_gather_object(everyone, (at, digests))
        for name in self.params:
            copies: dict[Any, set[str]] = {}
            for places, found in everyone:
                copies.setdefault(places[name], set()).add(found[name])
            if any(len(found) > 1 for found in copies.values()):
                problems.append(f"copies of {name} differ")
        if self.step.stats.recompiles:
            problems.append(f"{self.step.stats.recompiles} recompiles")
        live_bytes, live_tensors = settled_memory()
        return Look(
            steps=steps,
            live_bytes=live_bytes,
            live_tensors=live_tensors,
            rss=resident_bytes(),
            recompiles=self.step.stats.recompiles,
            compiles=self.step.stats.compiles,
            problems=tuple(problems),
        )

    def _shard_of(self, name: str) -> tuple[int, ...]:
        """Which part of a parameter this rank holds: where it stands along the axes that cut it."""
        coordinate = self.mesh.get_coordinate()
        pairs = zip(coordinate, self.params[name].placements, strict=True)
        return tuple(c for c, placement in pairs if placement.is_shard())


def settled_memory() -> tuple[int, int]:
    """``live_memory`` once gloo's threads have let go of what the last collectives had: the least of a few looks."""
    found = []
    for _ in range(5):
        found.append(live_memory())
        time.sleep(0.02)
    return min(found)


def live_memory() -> tuple[int, int]:
    """Bytes of all storages that Python can reach, each once, and tensors; wrappers of transforms have none."""
    import torch
    from torch._C._functorch import is_functorch_wrapped_tensor

    gc.collect()
    tensors = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor) and not is_functorch_wrapped_tensor(x)]
    locals_ = [getattr(t, "_local_tensor", t) for t in tensors]
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in locals_ if t.device.type == "cpu"}
    return sum(storages.values()), len(tensors)


def resident_bytes() -> int:
    """Memory of this process, on Linux; elsewhere 0."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def grown(first: Look, now: Look) -> list[str]:
    """What takes more memory than at the first look."""
    problems = []
    if now.live_bytes != first.live_bytes or now.live_tensors != first.live_tensors:
        before, after = (f"{x.live_bytes} bytes in {x.live_tensors} tensors" for x in (first, now))
        problems.append(f"live memory was {before}, and is {after}")
    if now.rss > first.rss + RSS_SLACK:
        problems.append(f"resident memory grew from {first.rss >> 20} to {now.rss >> 20} MiB")
    return problems


def rank_main(rank: int, folder: str, run: Run, pipe: Connection) -> None:
    """One rank: sends the number of steps made, and a look every so often."""
    stack = Path(folder, f"stack-{rank}.txt").open("w", encoding="utf-8")  # noqa: SIM115
    faulthandler.register(signal.SIGUSR1, file=stack)
    faulthandler.enable()
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    soaked = Soaked(run)
    draw = random.Random(run.seed)
    soaked.optimizer.step()  # no gradient at all: makes the zeros that stand in for missing ones, and keeps them
    first: Look | None = None
    for number in range(1, run.steps + 1):
        soaked.give(draw)
        soaked.optimizer.step()
        soaked.schedule.step()
        pipe.send(number)
        if number % run.every and number != run.steps:
            continue
        look = soaked.look(number)
        if first is not None:
            look = Look(**asdict(look) | {"problems": (*look.problems, *grown(first, look))})
        first = first or look
        pipe.send(look)
        if _any_rank(time.time() > run.deadline or bool(look.problems)):
            break
    dist.barrier()
    pipe.send(None)


def _any_rank(flag: bool) -> bool:
    """Whether any rank says so: all stop at the same step, whatever their clocks say and whoever found something."""
    import torch
    import torch.distributed as dist

    total = torch.tensor([flag], dtype=torch.int32)
    dist.all_reduce(total)
    return bool(total.item())
