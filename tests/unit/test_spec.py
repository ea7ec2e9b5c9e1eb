"""Plain data about parameters and meshes, and how a parameter reads as matrices."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import muon_compile as mc
from muon_compile.spec import MatrixView, matrix_view


def view(shape: tuple[int, ...], config: mc.MuonConfig) -> MatrixView:
    return matrix_view(mc.MatrixSpec(name="w", shape=shape), config)


@pytest.mark.parametrize(
    ("shape", "config", "expected"),
    [
        ((6, 4), mc.MuonConfig(), (1, 6, 4, (6,))),
        ((3, 6, 4), mc.MuonConfig(), (3, 6, 4, (6,))),
        ((512, 3, 3, 3), mc.MuonConfig(), (1, 512, 27, (512,))),
        ((8, 2, 3, 4, 5), mc.MuonConfig(), (1, 8, 120, (8,))),
        ((16, 4, 5), mc.MuonConfig(flatten=True), (1, 16, 20, (16,))),
        ((6, 4), mc.MuonConfig(flatten=True), (1, 6, 4, (6,))),
        ((2, 3, 6, 4), mc.MuonConfig(flatten=False), (6, 6, 4, (6,))),
        ((6, 4), mc.MuonConfig(num_heads=3), (3, 2, 4, (2,))),
        ((5, 6, 4), mc.MuonConfig(num_heads=3), (15, 2, 4, (2,))),
        ((8, 3, 2, 2), mc.MuonConfig(num_heads=2), (2, 4, 12, (4,))),
        ((10, 4), mc.MuonConfig(split_sizes=(6, 2, 2)), (1, 10, 4, (6, 2, 2))),
        ((5, 10, 4), mc.MuonConfig(split_sizes=(6, 2, 2)), (5, 10, 4, (6, 2, 2))),
        ((0, 4), mc.MuonConfig(), (1, 0, 4, (0,))),
    ],
)
def test_how_a_parameter_reads_as_matrices(
    shape: tuple[int, ...], config: mc.MuonConfig, expected: tuple[int, int, int, tuple[int, ...]]
) -> None:
    stacks, rows, cols, blocks = expected
    assert view(shape, config) == MatrixView(stacks=stacks, rows=rows, cols=cols, blocks=blocks)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    shape=st.lists(st.integers(1, 6), min_size=2, max_size=5).map(tuple),
    flatten=st.sampled_from([None, True, False]),
    heads=st.sampled_from([None, 1, 2, 3]),
)
def test_a_view_holds_every_element_once(shape: tuple[int, ...], flatten: bool | None, heads: int | None) -> None:
    try:
        found = view(shape, mc.MuonConfig(flatten=flatten, num_heads=heads))
    except ValueError as error:
        if heads and f"num_heads={heads} does not divide" in str(error):
            return
        raise
    assert found.stacks * found.rows * found.cols == math.prod(shape)
    assert sum(found.blocks) == found.rows


@pytest.mark.parametrize(
    ("shape", "config", "words"),
    [
        ((7, 4), mc.MuonConfig(num_heads=3), ("'w'", "num_heads=3", "7 rows", "(7, 4)")),
        ((10, 4), mc.MuonConfig(split_sizes=(6, 2)), ("'w'", "(6, 2)", "sum up to 8", "10 rows")),
        # Blocks of rows, not of experts: 3 experts of 10 rows are not 30 rows.
        ((3, 10, 4), mc.MuonConfig(split_sizes=(10, 10, 10)), ("'w'", "sum up to 30", "10 rows")),
    ],
)
def test_rows_that_do_not_divide(shape: tuple[int, ...], config: mc.MuonConfig, words: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="expected") as caught:
        mc.make_plan([mc.MatrixSpec(name="w", shape=shape, config=config)])
    for word in words:
        assert word in str(caught.value)


def test_a_spec_fills_in_its_gradient_dtype() -> None:
    assert mc.MatrixSpec(name="w", shape=(2, 3), dtype="bfloat16").grad_dtype == "bfloat16"
    assert mc.MatrixSpec(name="w", shape=(2, 3), dtype="bfloat16", grad_dtype="float32").grad_dtype == "float32"
    assert mc.MatrixSpec(name="w", shape=[2, 3]).shape == (2, 3)  # type: ignore[arg-type]
    assert mc.MatrixSpec(name="b", shape=(), algorithm="adamw").numel == 1
    assert mc.MatrixSpec(name="w", shape=(2, 3, 4)).numel == 24


def test_a_spec_that_does_not_fit_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"'w'.*2-D.*\(3,\)"):
        mc.MatrixSpec(name="w", shape=(3,))
    with pytest.raises(ValueError, match="'w'.*real floating.*complex64"):
        mc.MatrixSpec(name="w", shape=(3, 3), dtype="complex64")
    with pytest.raises(ValueError, match="'w'.*real floating.*int8"):
        mc.MatrixSpec(name="w", shape=(3, 3), grad_dtype="int8")
    with pytest.raises(ValueError, match="'w'.*'adamw'.*'sgd'"):
        mc.MatrixSpec(name="w", shape=(3, 3), algorithm="sgd")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'w'.*'adamw' takes AdamWConfig, got MuonConfig"):
        mc.MatrixSpec(name="w", shape=(3, 3), algorithm="adamw", config=mc.MuonConfig())
    with pytest.raises(ValueError, match="'w'.*'muon' takes MuonConfig, got AdamWConfig"):
        mc.MatrixSpec(name="w", shape=(3, 3), config=mc.AdamWConfig())


def test_a_mesh() -> None:
    assert mc.MeshSpec().num_ranks == 1
    assert mc.MeshSpec(axes=(("replicate", 2), ("shard", 4))).num_ranks == 8
    with pytest.raises(ValueError, match="distinct name"):
        mc.MeshSpec(axes=(("shard", 2), ("shard", 4)))
    with pytest.raises(ValueError, match="distinct name"):
        mc.MeshSpec(axes=(("", 2),))
    with pytest.raises(ValueError, match=r"axes\['shard'\].*>= 1.*0"):
        mc.MeshSpec(axes=(("shard", 0),))
