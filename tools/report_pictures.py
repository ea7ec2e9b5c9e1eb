"""Draw the pictures of docs/report.md: pages that this library renders, as Chromium shows them.

tools/install_chromium.sh && python tools/report_pictures.py [--out docs/pictures]
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import muon_compile as mc
from muon_compile.inspect.report import render_comparison, render_report

_FLAGS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
_FLAGS += ["--disable-component-update", "--disable-sync", "--hide-scrollbars", "--force-prefers-reduced-motion"]
_DARK = ["--blink-settings=preferredColorScheme=0"]


def plan_of(model: str, strategy: str = "auto", **axes: int) -> mc.Plan:
    mesh = mc.MeshSpec(axes=tuple(axes.items()))
    machine = mc.Hardware.preset("h100")
    specs = mc.model_specs(model, mesh=mesh, device=machine.device)
    return mc.make_plan(specs, mesh=mesh, hardware=machine, strategy=strategy)


def picture(page: str, anchor: str, size: tuple[int, int], out: Path, *, dark: bool = False) -> None:
    """A page's picture, ``size`` pixels, with what ``anchor`` opens."""
    names = ("chromium", "chromium-browser", "google-chrome")
    browser = next((path for name in names if (path := shutil.which(name))), "")
    if not browser:
        sys.exit("report_pictures: expected Chromium, found none; run tools/install_chromium.sh")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        file = Path(folder) / "page.html"
        file.write_text(page, encoding="utf-8")
        command = [browser, *_FLAGS, *(_DARK if dark else []), f"--user-data-dir={folder}/profile"]
        command += [f"--window-size={size[0]},{size[1]}", f"--screenshot={out.resolve()}", f"file://{file}{anchor}"]
        subprocess.run(command, check=True, capture_output=True, timeout=60)
    print(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/pictures"), help="folder (default: docs/pictures)")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    gpt2 = render_report(plan_of("gpt2", replicate=2, shard=4), title="gpt2 on 2 x 4 ranks")
    picture(gpt2, "", (1280, 880), out / "step.png")
    picture(gpt2, "#bucket/0/muon6", (1280, 880), out / "bucket.png", dark=True)
    old, new = plan_of("gpt2", "all_gather", shard=8), plan_of("gpt2", shard=8)
    picture(render_comparison(old, new), "", (1280, 700), out / "comparison.png")


if __name__ == "__main__":
    main()
