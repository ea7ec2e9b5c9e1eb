"""Checkpoints that move: saved on 4 ranks, resumed on 4, 2, 2x2 and in one process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.dist.models import WORLD, Job, assert_same
from tests.dist.moving import SHAPES, Run, furthest, resume, save_and_go_on
from tests.dist.ranks import Ranks

pytestmark = [pytest.mark.dist, pytest.mark.timeout(180)]

# Mesh and strategy that a checkpoint is resumed with; one rank is a process of its own, with plain tensors.
PLACES: dict[str, tuple[tuple[int, ...], str]] = {
    "4": ((4,), "all_to_all"),
    "4 otherwise": ((4,), "gather_scatter"),
    "2x2": ((2, 2), "gather_broadcast"),
    "2": ((2,), "all_gather"),
    "1": ((1,), "auto"),
}
# Float32 rounding of parameters of size 1 that move by as much; momenta are the file's, bit for bit.
BAR = 1e-6


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    with Ranks(WORLD) as started:
        yield started


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2) as started:
        yield started


class Saved:
    """Checkpoints by way and source, each made once, with what the uninterrupted run came to."""

    def __init__(self, ranks: Ranks, folder: Path) -> None:
        self._ranks, self._folder = ranks, folder
        self._made: dict[tuple[str, tuple[int, ...]], tuple[Run, Path]] = {}

    def __call__(self, way: str, mesh: tuple[int, ...]) -> tuple[Run, Path]:
        key = (way, mesh)
        if key not in self._made:
            folder = self._folder / f"{way}-{'x'.join(map(str, mesh))}"
            folder.mkdir()
            job = Job(shapes=SHAPES, mesh=mesh, strategy="auto" if mesh == (1,) else PLACES["4"][1])
            call = (save_and_go_on, job, way, str(folder))
            runs = [save_and_go_on(0, *call[1:])] if mesh == (1,) else self._ranks.run(*call)
            for run in runs[1:]:
                assert run.momenta.keys() == runs[0].momenta.keys()
                assert_same(run.momenta, runs[0].momenta)
            self._made[key] = runs[0], folder
        return self._made[key]


@pytest.fixture(scope="module")
def saved(four: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(four, tmp_path_factory.mktemp("saved"))


# Way, mesh that saved, and where to; a way and a mesh are crossed with every place once.
MOVES = [
    *(("dcp", (4,), place) for place in PLACES),
    ("dcp", (2, 2), "2x2"),
    ("dcp", (2, 2), "4"),
    ("dcp", (1,), "1"),
    ("dcp", (1,), "4"),
    ("file", (4,), "2x2"),
    ("file", (2, 2), "1"),
    ("file", (1,), "2"),
    ("async", (4,), "2x2"),
    ("async", (2, 2), "2"),
]


@pytest.mark.parametrize(("way", "source", "place"), MOVES, ids=str)
def test_ten_steps_after_moving_are_the_uninterrupted_runs(
    saved: Saved, four: Ranks, two: Ranks, way: str, source: tuple[int, ...], place: str
) -> None:
    reference, folder = saved(way, source)
    mesh, strategy = PLACES[place]
    job = Job(shapes=SHAPES, mesh=mesh, strategy=strategy)
    if place == "1":
        runs = [resume(0, job, way, str(folder))]
    else:
        runs = (two if place == "2" else four).run(resume, job, way, str(folder))
    same = (mesh, strategy) == (source, PLACES["4"][1]) or place == "1" == str(source[0])
    for run in runs:
        assert_same(run.params, reference.params)
        assert_same(run.momenta, reference.momenta)
        worst, name = furthest(run, reference)
        assert worst <= (0.0 if same else BAR), name
        # One process has no ranks to agree with: a graph for all gradients joins that for missing ones.
        assert run.compiles == ((2, 0) if place == "1" else (1, 0))


def test_loading_into_a_run_that_has_stepped_compiles_nothing(saved: Saved, four: Ranks) -> None:
    reference, folder = saved("dcp", (4,))
    job = Job(shapes=SHAPES, mesh=(4,), strategy=PLACES["4"][1])
    for run in four.run(resume, job, "dcp", str(folder), True):
        assert furthest(run, reference)[0] == 0.0
        assert run.compiles == (1, 0)


def test_groups_keep_the_strategy_of_the_run_that_loads(saved: Saved, four: Ranks, tmp_path: Path) -> None:
    """Named for single groups, where the file has other names for them."""
    shapes = {name: SHAPES[name] for name in ("even", "five", "vector")}
    there = Job(shapes=shapes, strategies={"five": "gather_broadcast"})
    here = Job(shapes=shapes, strategies={"five": "all_gather"})
    reference = four.run(save_and_go_on, there, "dcp", str(tmp_path))[0]
    for run in four.run(resume, here, "dcp", str(tmp_path)):
        assert furthest(run, reference)[0] <= BAR
        assert run.strategies["five"] == "all_gather"
        assert run.compiles == (1, 0)
    alone = resume(0, here, "dcp", str(tmp_path))
    assert furthest(alone, reference)[0] <= BAR
