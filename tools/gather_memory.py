"""What a sharded step takes beside parameters, state and gradients, against ``CompileConfig(max_gather_bytes=...)``.

    python tools/gather_memory.py
    python tools/gather_memory.py --strategies all_gather --bounds 4 8 16 --backend inductor

4 gloo ranks step a model whose momenta take 80 MiB on the wire (bfloat16), ten times the first bound. A step's peak is
measured twice:

live      Bytes of all tensors that the graph's operators return and that are still alive, each storage once, at the
          worst moment of a step (aot_eager only). Of these, gathered: what collectives return, and what is made of
          that alone (whole units, put together); rest: gradients packed, directions, the iteration's own, results.
resident  High-water mark of the process's resident memory over a step, less what it held before. It has all of the
          above, scratch inside operators and gloo's buffers; the allocator is told to hand freed memory back at once.

planned is what the plan says that temporaries take at once, gathered or not (``plan.temp_bytes``). The bar: gathered
stays within the bound. Exit status 1: it does not.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

WORLD = 4
MIB = 2**20
# Read when torch is imported, or by glibc when a process starts. Blocks from 64 KiB on are mapped one by one and
# unmapped when freed, so that resident memory follows what is alive (mallopt(3)).
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"} | (
    {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
)
STRATEGIES = ("all_gather", "gather_broadcast", "gather_scatter")


def wait_until(holds: Callable[[], bool], seconds: float = 5.0) -> None:
    """Return once ``holds()``, or after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.001)


def live_mode() -> Any:
    """A dispatch mode that counts bytes of the tensors that operators return, while they live."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Live(TorchDispatchMode):
        """``peak``, and at that moment ``gathered``; ``peak_gathered`` is the latter's own peak.

        gloo's own thread lets go of a tensor a moment after its collective is over, later on a busy machine. Where that
        would count as over ``bound``, the step stands still for it: what the step itself holds it goes on holding.
        """

        def __init__(self, known: Sequence[torch.Tensor], bound: int) -> None:
            super().__init__()
            self._bound = bound
            self._known = {t.untyped_storage()._cdata for t in known}
            self._alive: dict[int, int] = {}  # tensors that look into each storage
            self._bytes: dict[int, int] = {}
            self._gathered: set[int] = set()
            self.now = self.now_gathered = self.peak = self.gathered = self.peak_gathered = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            read = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
            # A copy of nothing but gathered memory is gathered memory put together.
            copies = func.overloadpacket.__name__ in ("clone", "cat", "_to_copy", "_unsafe_view", "copy_")
            gathered = func.namespace == "_c10d_functional" or (
                copies and bool(read) and all(x.untyped_storage()._cdata in self._gathered for x in read)
            )
            for tensor in tree_leaves(result):
                if isinstance(tensor, torch.Tensor):
                    self._add(tensor, gathered)
            return result

        def _add(self, tensor: torch.Tensor, gathered: bool) -> None:
            storage = tensor.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key in self._known:
                return
            if key not in self._alive:
                self._alive[key], self._bytes[key] = 0, size
                self.now += size
                if gathered:
                    self._gathered.add(key)
                    self.now_gathered += size
            self._alive[key] += 1
            weakref.finalize(tensor, self._drop, key)
            if self.peak_gathered <= self._bound:
                wait_until(lambda: self.now_gathered <= self._bound)
            self.peak_gathered = max(self.peak_gathered, self.now_gathered)
            if self.now > self.peak:
                self.peak, self.gathered = self.now, self.now_gathered

        def _drop(self, key: int) -> None:
            self._alive[key] -= 1
            if self._alive[key]:
                return
            size = self._bytes.pop(key)
            del self._alive[key]
            self.now -= size
            if key in self._gathered:
                self._gathered.remove(key)
                self.now_gathered -= size

    return Live


def memory_status(field: str) -> int:
    """A field of /proc/self/status in bytes, 0 where there is none."""
    try:
        found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"))
    except OSError:
        return 0
    return int(found[1]) * 1024 if found else 0


def resident_peak(step: Any) -> int:
    """How far resident memory rises above what it was, over a call; 0 where the system does not tell."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # VmHWM starts anew (proc(5))
    except OSError:
        return 0
    before = memory_status("VmRSS")
    step()
    return memory_status("VmHWM") - before


def measure(mesh: Any, strategy: str, bound: int, args: argparse.Namespace) -> dict[str, Any]:
    """One optimizer's step on this rank: its peaks, in bytes."""
    import torch
    from torch.distributed.tensor import Shard, distribute_tensor

    import muon_compile as mc

    params = []
    for number in range(args.matrices):
        whole = torch.randn(args.rows, args.cols, generator=torch.Generator().manual_seed(number)).bfloat16()
        value, grad = (distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None) for _ in range(2))
        param = torch.nn.Parameter(value)
        param.grad = grad
        params.append(param)
    optimizer = mc.Muon(params, lr=0.01, config=mc.MuonConfig(ns_dtype="bfloat16", ns_steps=1), backend=args.backend)
    config = mc.CompileConfig(max_gather_bytes=bound, keep_memory=False)
    step = mc.compile_step(optimizer, backend=args.backend, strategy=strategy, ns="standard", config=config)
    for _ in range(2):  # compiles; afterwards what is kept from step to step is there
        optimizer.step()
    rss = resident_peak(optimizer.step)
    live = {}
    if args.backend == "aot_eager":
        known = [t._local_tensor for p in params for t in (p, p.grad)]
        known += list(step._binding._static) + [t.tensor for t in step._binding._presence]
        with live_mode()(known, bound) as mode:
            optimizer.step()
        wait_until(lambda: not mode.now)
        live = {"peak": mode.peak, "gathered": mode.peak_gathered, "at_peak": mode.gathered, "left": mode.now}
    plan = step.plan
    facts = {"waves": len(plan.waves), "planned": plan.temp_bytes, "wire": 2 * sum(p.numel() for p in params)}
    step.uninstall()
    return facts | {"strategy": strategy, "bound": bound, "resident": rss, "live": live}


def rank_main(rank: int, folder: str, args: argparse.Namespace) -> None:
    """One rank: everything, one after the other; the first rank writes what all of them measured."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("shard",))
    results = []
    for strategy in args.strategies:
        for mib in args.bounds:
            mine = measure(mesh, strategy, int(mib * MIB), args)
            everyone: list[Any] = [None] * WORLD
            dist.all_gather_object(everyone, mine)
            if rank == 0:
                print(f"done: {strategy}, {mib:g} MiB", file=sys.stderr, flush=True)
                results.append(worst(everyone))
                Path(folder, "results.json").write_text(json.dumps(results), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def worst(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The rank that takes the most, figure by figure."""
    live = {key: max(r["live"][key] for r in ranks) for key in ranks[0]["live"]}
    return ranks[0] | {"resident": max(r["resident"] for r in ranks), "live": live}


def print_results(results: Sequence[dict[str, Any]], args: argparse.Namespace) -> None:
    """A table, in MiB."""
    from rich.console import Console
    from rich.table import Table

    title = (
        f"MiB per rank, worst of {WORLD}; {args.matrices} x {args.rows} x {args.cols}, "
        f"{results[0]['wire'] / MIB:g} MiB on the wire; {args.backend}"
    )
    table = Table("strategy", title=title)
    for head in ("bound", "waves", "gathered", "rest at the peak", "live peak", "planned", "resident peak", ""):
        table.add_column(head, justify="right")
    for r in results:
        live = r["live"]
        cells = [live["gathered"], live["peak"] - live["at_peak"], live["peak"]] if live else [None] * 3
        table.add_row(
            r["strategy"],
            f"{r['bound'] / MIB:g}",
            str(r["waves"]),
            *("-" if value is None else f"{value / MIB:.1f}" for value in (*cells, r["planned"], r["resident"])),
            "" if not live else "within" if within(r) else "OVER",
        )
    Console(width=140).print(table)


def within(result: dict[str, Any]) -> bool:
    """Whether what was gathered stayed within its bound."""
    live = result["live"]
    return not live or bool(live["gathered"] <= result["bound"])


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is asked for."""
    assert __doc__ is not None
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES), metavar="NAME")
    parser.add_argument("--bounds", nargs="+", type=float, default=[8, 20, 40, 1024], metavar="MIB")
    parser.add_argument("--matrices", type=int, default=80)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--cols", type=int, default=8192)
    parser.add_argument("--backend", choices=("inductor", "aot_eager"), default="aot_eager")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write all figures there")
    args = parser.parse_args(argv)
    os.environ.update(ENVIRONMENT)
    import torch.multiprocessing

    with tempfile.TemporaryDirectory(prefix="gather-memory-") as folder:
        torch.multiprocessing.spawn(rank_main, args=(folder, args), nprocs=WORLD)
        results = json.loads(Path(folder, "results.json").read_text(encoding="utf-8"))
    print_results(results, args)
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({"world": WORLD, "results": results}, indent=1) + "\n", encoding="utf-8")
    return 0 if all(within(r) for r in results) else 1


if __name__ == "__main__":
    sys.exit(main())
