"""What the torchair backend refuses, and what it says."""

from __future__ import annotations

import functools
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch

import muon_compile as mc
from muon_compile.lower import torchair
from muon_compile.lower.compiled import CompileError
from tests.dist.ranks import run_ranks
from tests.npu.refusing import answers, one_rank_fails
from tests.npu.sources import sources


def optimizer() -> mc.Muon:
    return mc.Muon([{"params": [torch.nn.Parameter(torch.randn(4, 6))]}], lr=0.1)


def test_without_torch_npu_one_error_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CompileError, match=r"torch_npu 2\.11 to 2\.14.*Missing here: torch_npu .*backend='inductor'"):
        mc.compile_step(optimizer(), backend="torchair")
    monkeypatch.setattr(torchair, "_found", lambda module: False)
    with pytest.raises(CompileError, match="Missing here: protobuf, packaging, torch_npu"):
        mc.compile_step(optimizer(), backend="torchair")


def test_a_torch_npu_that_cannot_be_imported_names_cann(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchair, "_found", lambda module: True)  # found, and then import torch_npu fails
    with pytest.raises(CompileError, match=r"ModuleNotFoundError.*\n.*set_env\.sh"):
        mc.compile_step(optimizer(), backend="torchair")


def test_nothing_of_the_optimizer_has_changed_then() -> None:
    given = torch.optim.Muon([torch.nn.Parameter(torch.randn(4, 6))], lr=0.1)
    with pytest.raises(CompileError):
        mc.compile_step(given, backend="torchair")
    assert "step" not in vars(given)
    assert not given.state


@functools.cache
def _answers(folder: str, out: str) -> dict[str, Any]:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(answers, folder, out).result(timeout=100)


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return _answers(sources("2.13.0"), str(tmp_path_factory.mktemp("dump")))


@pytest.mark.npu
@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("unknown option", ["CompileError", "has no option 'frozen_parameters'", "frozen_parameter,"]),
        ("unknown section", ["CompileError", "CompilerConfig has no option 'ge'", "ge_config"]),
        ("wrong value", ["CompileError", "ge_config.oo_level", "'O2'", "O1"]),
        ("wrong mode", ["CompileError", "mode", "'fast'", "npugraph_ex"]),
        ("views", ["CompileError", "expected False, got True", "wrong numbers"]),
        ("order", ["CompileError", "expected 'StableRDFS', got 'BFS'", "wait for ever"]),
        ("mutations", ["CompileError", "expected True, got False", "in the graph"]),
        ("eager", ["CompileError", "expected False, got True", "aot_eager"]),
        ("captured", ["CompileError", "npugraph_ex", "torch_npu"]),
        ("exact", ["ValueError", "exact=False", "inductor"]),
        ("native", ["CompileError", "kernels that TorchAir has not", "native"]),
        ("other backend", ["ValueError", "torchair_options", "backend='aot_eager'"]),
        ("once", ["CompileError", "whole process", "enable_single_stream"]),
    ],
)
def test_options_that_do_not_fit(said: dict[str, Any], what: str, words: list[str]) -> None:
    for word in words:
        assert word in said[what], said[what]


@pytest.mark.npu
def test_a_failure_of_the_engine_changes_nothing(said: dict[str, Any]) -> None:
    answer = said["failing engine"]
    assert "CompileError" in answer["said"]
    assert "EZ9999" in answer["said"]
    assert answer["same"]
    assert answer["moved"]


@pytest.mark.npu
def test_frozen_parameters_are_compiled_anew_where_they_move(said: dict[str, Any]) -> None:
    answer = said["frozen"]
    assert "1" in answer["frozen"] or set(answer["frozen"]) == {"0", ","}  # the flag is for inputs on NPUs alone
    assert answer["more_graphs"] == 1


@pytest.mark.npu
def test_a_dump_has_torchairs_own_and_the_table(said: dict[str, Any]) -> None:
    files = said["dumped"]
    folder = "all_gradients"
    assert 'op: "BatchMatMul"' in files[f"{folder}/ge_graph.pbtxt"]
    assert "BatchMatMul" in files[f"{folder}/ge_graph.py"]
    assert "BatchMatMul" in files[f"{folder}/ge_operators.txt"]
    assert "Collectives: none" in files[f"{folder}/ge_operators.txt"]


@pytest.mark.npu
@pytest.mark.dist
@pytest.mark.timeout(200)
def test_a_failure_on_one_rank_is_raised_on_all() -> None:
    said = run_ranks(one_rank_fails, 4, sources("2.13.0"), timeout=120)
    assert all("EZ9999" in text for text in said), said
