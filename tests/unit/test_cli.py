"""The command, in this process: help, arguments that are refused, and a verification on one rank."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from muon_compile import cli
from muon_compile.verification import verify as verify_module


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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_verify_on_one_rank(dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "new" / "report.json"
    assert cli.main(["verify", "--dtype", dtype, "--json", str(path)]) == 0
    out = capsys.readouterr().out
    assert "one process" in out and out.rstrip().endswith("ok")
    assert max(map(len, out.splitlines())) <= 120
    data = json.loads(path.read_text(encoding="utf-8"))
    assert data["ok"] and {row["strategy"] for row in data["rows"]} == {"auto", "local"}


def test_a_wrong_direction_exits_with_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    right = verify_module.reference_direction
    monkeypatch.setattr(verify_module, "reference_direction", lambda grad, spec: 1.0001 * right(grad, spec))
    assert cli.main(["verify"]) == 1
    assert "NOT OK" in capsys.readouterr().out


def test_help_does_not_wait_for_torch() -> None:
    code = "import sys; sys.argv[1:] = ['verify', '--dtype', 'x']\n"
    code += "from muon_compile.cli import main\ntry: main()\nexcept SystemExit: sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60).returncode == 0
