"""Seconds to the first step: cold (empty disk cache) and warm (new process, filled cache).

    python tools/compile_time.py

300 parameters in 10 shapes by default. Each measurement is a process of its own; "first step" is tracing, compiling and
running the first step, imports apart.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))


def child(name: str, count: int | None) -> None:
    """Measure in this process and print one line of JSON."""
    started = time.perf_counter()
    import torch
    from _shapes import SHAPE_SETS, make_params

    import muon_compile as mc

    shapes = SHAPE_SETS[name][:count]
    optimizer = torch.optim.Muon(make_params(shapes), lr=1e-3)
    imported = time.perf_counter()
    step = mc.compile_step(optimizer)
    optimizer.step()
    first = time.perf_counter() - imported
    stats = step.stats.as_dict() | {"imports": imported - started, "first": first, "parameters": len(shapes)}
    print(json.dumps(stats))


def measure(name: str, cache: str) -> dict[str, float]:
    """One child process on the given cache folder."""
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache}
    command = [sys.executable, __file__, "--child", name]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"the measuring process failed:\n{done.stderr}")
    facts: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return facts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", default="ten-shapes", help="shape set (see _shapes.py)")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child, None)
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("run", "first step s", "trace + compile s", "from disk cache", "FX nodes", "imports + setup s")
    console = Console(width=120)
    with console.status("") as status:
        for number in range(args.repeat):
            with tempfile.TemporaryDirectory() as cache:
                for kind in ("cold", "warm"):
                    status.update(f"{kind} {number + 1}/{args.repeat}")
                    facts = measure(args.set, cache)
                    cells = [f"{facts['first']:.1f}", f"{facts['compile_seconds']:.1f}", str(bool(facts["cached"]))]
                    table.add_row(kind, *cells, str(int(facts["fx_nodes"])), f"{facts['imports']:.1f}")
    console.print(f"{args.set}: {int(facts['parameters'])} parameters", highlight=False)
    console.print(table)


if __name__ == "__main__":
    main()
