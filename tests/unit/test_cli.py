"""The command, in this process: help, arguments that are refused, verify on one rank, and calibrate."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import muon_compile as mc
from muon_compile import cli
from muon_compile.cli.arguments import EXAMPLES, EXIT_CODES
from muon_compile.lower import inductor
from muon_compile.plan.hardware import SIDES, Rates
from muon_compile.run import calibrate as calibrate_module
from muon_compile.run import calibrate_group as group_module
from muon_compile.verification import verify as verify_module
from tests.unit.commands import output, refusal


@pytest.mark.parametrize("command", EXAMPLES)
def test_every_command_has_help_with_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([*command.split(), "--help"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert out.startswith(f"usage: python -m muon_compile {command} [-h]")
    assert f"examples:\n  muon-compile {command}" in out and EXIT_CODES in out
    assert ("--json" in out) is (command != "completion")
    assert max(map(len, out.splitlines())) <= 120


def test_the_command_has_help_of_all_commands_and_a_version(capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("--help", "--version"):
        with pytest.raises(SystemExit) as caught:
            cli.main([flag])
        assert caught.value.code == 0
    out = capsys.readouterr().out
    assert all(re.search(rf"\n    {command}\s", out) for command in EXAMPLES) and EXIT_CODES in out
    assert out.endswith(f"\nmuon-compile {mc.__version__}\n")


def test_the_installed_command_goes_by_its_own_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["/usr/bin/muon-compile", "--help"])
    with pytest.raises(SystemExit):
        cli.main()
    assert capsys.readouterr().out.startswith("usage: muon-compile ")


@pytest.mark.parametrize("arguments", [["--help"], ["verify", "--help"]])
def test_help_has_an_example(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: python -m muon_compile") and "torchrun --standalone" in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "required"),
        (["nonsense"], "nonsense"),
        (["verify", "--dtype", "float8"], "float8"),
        (["verify", "--ranks-axes", "2x2x2"], "expected S or RxS"),
        (["verify", "--ranks-axes", "0x2"], "expected S or RxS"),
        (["verify", "--ranks-axes", "2x2"], "torchrun"),
        (["verify", "--backends", "nonsense"], "nonsense"),
        (["verify", "--strategies", "nonsense"], "nonsense"),
        (["verify", "--strategies", "all_gather"], "one rank"),
    ],
)
def test_bad_arguments_exit_with_2_and_say_why(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    err = capsys.readouterr().err
    assert "usage: " in err and says in err.splitlines()[-1]


@pytest.mark.parametrize(("dtype", "flags"), [("float32", []), ("bfloat16", ["--json"])])
def test_verify_on_one_rank(dtype: str, flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "new" / "report.json"
    out = output(capsys, "verify", "--dtype", dtype, "--out", str(path), *flags)
    if flags:
        assert json.loads(out) == json.loads(path.read_text(encoding="utf-8"))
    else:
        assert "one process" in out and out.rstrip().endswith("ok")
        assert max(map(len, out.splitlines())) <= 120
    data = json.loads(path.read_text(encoding="utf-8"))
    assert data["ok"] and {row["strategy"] for row in data["rows"]} == {"auto", "local"}


def test_verify_says_what_a_backend_lacks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def no_compiler() -> None:
        raise mc.CompileError("no compiler; install one")

    monkeypatch.setattr(inductor, "check_compiler", no_compiler)
    assert "--backends: no compiler; install one" in refusal(capsys, "verify", "--backends", "inductor")


def test_a_wrong_direction_exits_with_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    right = verify_module.reference_direction
    monkeypatch.setattr(verify_module, "reference_direction", lambda grad, spec: 1.0001 * right(grad, spec))
    assert cli.main(["verify"]) == 1
    assert "NOT OK" in capsys.readouterr().out


def test_help_does_not_wait_for_torch() -> None:
    code = "import sys; sys.argv[1:] = ['verify', '--dtype', 'x']\n"
    code += "from muon_compile.cli import main\ntry: main()\nexcept SystemExit: sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60).returncode == 0


# -- calibrate ------------------------------------------------------------------------------------------------------


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[mc.Hardware]:
    """Stands in for the measurement, which takes seconds."""
    rates = tuple(10.0**9 * (1 + index) for index in range(len(SIDES)))
    gemm = (Rates(kernel="graph", dtype="float32", flops_per_second=rates),)
    figures = {"bytes_per_second": 12.5e9, "cache_bytes": 2**21, "op_seconds": 1.25e-6}
    hardware = mc.Hardware(name="made up", device="cpu", gemm=gemm, **figures)  # type: ignore[arg-type]
    monkeypatch.setenv("MUON_COMPILE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(calibrate_module, "_measure", lambda name: hardware)
    yield hardware
    calibrate_module._calibrated.cache_clear()


def test_calibrate_prints_and_writes_what_it_measured(
    measured: mc.Hardware, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "new" / "hardware.json"
    out = output(capsys, "calibrate", "--out", str(path))
    for words in ("graph float32: 1, 2, 3, 4, 5, 6", "12.5 GB/s", "2 MiB", "1.25 us", "network: not measured"):
        assert words in out
    assert mc.Hardware.from_json(path.read_text(encoding="utf-8")) == measured
    assert mc.Hardware.from_json(output(capsys, "calibrate", "--json")) == measured
    # The file, and auto, are that machine.
    for name in (str(path), "auto"):
        data = json.loads(output(capsys, "simulate", "gpt2", "--ranks", "2", "--hardware", name, "--json"))
        assert data["hardware"] == "made up"


def test_calibrate_in_a_group_measures_its_network(
    measured: mc.Hardware, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    in_group = dataclasses.replace(measured, network=mc.Hardware.preset("h100").network)
    monkeypatch.setattr(group_module, "calibrate_group", lambda: in_group)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        out = output(capsys, "calibrate")
    finally:
        torch.distributed.destroy_process_group()
    assert "network, cluster on infiniband: 14.0 us a message, 50.00 GB/s of one rank" in out
