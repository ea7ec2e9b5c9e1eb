"""The plan as a table for people."""

from __future__ import annotations

import pytest

import muon_compile as mc


def test_the_text_of_the_table() -> None:
    specs = [mc.MatrixSpec(name=f"l[{i}].w", shape=(64, 32)) for i in range(5)]
    specs.append(mc.MatrixSpec(name="bias", shape=(), algorithm="adamw", dtype="bfloat16", grad_dtype="float32"))
    text = mc.make_plan(specs).describe()
    muon = next(line for line in text.splitlines() if "muon0" in line)
    assert muon.split()[:7] == ["muon0", "5", "64x32", "float32", "float32", "cpu", "0"]
    assert "l[0].w, l[1].w, ... 3 more" in muon
    adamw = next(line for line in text.splitlines() if "adamw1" in line)
    assert "scalar" in adamw and "bfloat16 (grad float32)" in adamw
    batch = next(line for line in text.splitlines() if "ns0" in line)
    for word in ("64 x 32", "standard", "bfloat16", "jordan", "original", "muon0"):
        assert word in batch


@pytest.mark.parametrize(
    "name",
    ["block:fire:weight", "w[red]", "[/]", "back\\[slash]", "a" * 300, "line\nbreak"],
    ids=["emoji", "markup", "closing", "backslash", "long", "newline"],
)
def test_a_strange_name_does_not_spoil_the_table(name: str) -> None:
    specs = [mc.MatrixSpec(name=name, shape=(64, 32)), mc.MatrixSpec(name="b", shape=(1024, 16, 16, 16, 16))]
    lines = mc.make_plan(specs).describe().splitlines()
    assert max(map(len, lines)) <= 120
    found = [line.split() for line in lines if line.split()[:1] == ["muon0"]]
    assert len(found) == 1
    assert found[0][:7] == ["muon0", "1", "64x32", "float32", "float32", "cpu", "0"]
    if len(name) < 100 and "\n" not in name:
        assert found[0][7] == name


def test_the_plan_says_what_bounds_the_balance() -> None:
    def described(ranks: int) -> str:
        specs = [mc.MatrixSpec(name=f"m{i}", shape=(64, 64)) for i in range(12)]
        mesh = mc.MeshSpec(axes=(("shard", ranks),))
        return mc.make_plan(specs, mesh=mesh, strategy="gather_broadcast").describe().replace("\n", " ")

    assert "imbalance 0.0%" in described(4)
    assert "A matrix has one owner" not in described(4)
    # 12 matrices on 8 ranks: 2 on some, 1.5 on average.
    assert "imbalance 33.3%" in described(8)
    assert (
        "A matrix has one owner: 12 for 8 ranks, and the largest takes 0.008 GFLOP, 0.67 of the average load."
        in described(8)
    )
