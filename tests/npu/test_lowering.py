"""Layer B: the real TorchAir lowers every strategy and form to one GE graph that keeps the plan's promises."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.npu.plans import SHARDED
from tests.npu.sources import VERSIONS, sources

pytestmark = [pytest.mark.npu, pytest.mark.timeout(900)]
ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, dict[str, Any]]]:
    """What the worker found, by version and case; both versions side by side."""
    folders = {version: sources(version) for version in VERSIONS}
    out = tmp_path_factory.mktemp("lowering")
    workers = {
        version: subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.npu.lowering", version, folder, str(out / version)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for version, folder in folders.items()
    }
    try:
        results = {}
        for version, worker in workers.items():
            said, _ = worker.communicate(timeout=840)
            assert worker.returncode == 0, f"{version}:\n{said[-5000:]}"
            results[version] = json.loads((out / version).read_text())["cases"]
        yield results
    finally:
        for worker in workers.values():
            worker.kill()
            worker.wait()


@pytest.mark.parametrize("version", VERSIONS)
def test_every_plan_is_one_static_graph_that_writes_in_place(found: dict[str, dict[str, Any]], version: str) -> None:
    assert len(found[version]) >= (len(SHARDED) * 2 + 13 if version == "2.13.0" else len(SHARDED) + 6)
    for name, case in found[version].items():
        assert case["static"], name
        assert case["written"] == case["to_write"], name
        assert case["placements"] == ["NPU"], name
        assert case["wide"] == case["mixed"] == case["hazards"] == [], name
        assert case["options"]["ge.topoSortingMode"] == "3", name  # StableRDFS


@pytest.mark.parametrize("version", VERSIONS)
def test_collectives_are_the_plans_and_the_same_on_every_rank(found: dict[str, dict[str, Any]], version: str) -> None:
    compared = 0
    for name, case in found[version].items():
        assert len(case["collectives"]) == len(case["promised"]), name
        assert bool(case["promised"]) == name.startswith(("four", "hsdp")), name
        for collectives in case.get("ranks", ()):
            assert collectives == case["collectives"], name
            compared += 1
    assert compared == len(SHARDED)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_wave_writes_its_own_stretch(found: dict[str, dict[str, Any]], version: str) -> None:
    """Of 2 matrices that go one by one the state is two inputs, and no operator puts a whole together."""
    case = found[version]["one local waves"]
    assert {"muon0_momentum_buffer[0:48]", "muon0_momentum_buffer[48:96]"} <= set(case["written"])
    assert not {"ConcatV2", "ConcatV2D", "ScatterUpdate", "TensorMove", "SplitD", "SplitV"} & case["ops"].keys()


def test_the_list_boundary_is_one_pack_and_one_unpack(found: dict[str, dict[str, Any]]) -> None:
    """300 parameters in 10 shapes: per bucket gradients and parameters packed, new parameters unpacked."""
    case = found["2.13.0"]["300 parameters in 10 shapes"]
    ops = dict(case["ops"])
    assert ops.pop("Pack") == 20
    assert ops.pop("Unpack") == 11  # and one of the hyperparameters
    assert not {"GatherV2", "StridedSliceV2", "Split", "SplitV"} & ops.keys()
    assert sum(ops.values()) / case["params"] <= 3


def test_the_shipped_list_of_converters_is_the_wheels() -> None:
    code = (
        "import sys; from pathlib import Path; from muon_compile.npu import audit, stand_in; "
        "stand_in.install(Path(sys.argv[1])); sys.path.insert(0, 'tools'); import list_converters; "
        "print(sorted(set(list_converters.working_converters()) ^ audit.real_converters()))"
    )
    command = [sys.executable, "-W", "ignore", "-c", code, sources("2.13.0")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "[]"
