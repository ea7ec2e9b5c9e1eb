"""What a step cannot take is refused when it is wrapped: an error that says what is wrong, and nothing changed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import AdamW, Muon, Optimizer

import muon_compile as mc
from muon_compile.layout import check_tensor
from tests.unit.untouched import refused

BAD_NUMBERS = (float("nan"), float("inf"), -float("inf"), -0.5)


def matrix(*shape: int, **kwargs: Any) -> Parameter:
    generator = torch.Generator().manual_seed(0)
    return Parameter(torch.randn(shape or (4, 6), generator=generator).to(kwargs.get("dtype", torch.float32)))


def stepped(optimizer: Optimizer) -> Optimizer:
    """Run one stock step, so that there is state that a refusal could spoil."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.ones_like(param)
    optimizer.step()
    return optimizer


def wrap(*optimizers: Any, backend: str = "aot_eager", **kwargs: Any) -> mc.CompiledStep:
    return mc.compile_step(*optimizers, backend=backend, **kwargs)


# -- parameters ---------------------------------------------------------------------------------------------------

UNFIT: dict[str, tuple[Callable[[], Tensor], tuple[str, ...]]] = {
    "1-D": (lambda: torch.randn(5), ("2-D", "(5,)", "AdamW")),
    "0-D": (lambda: torch.tensor(1.0), ("2-D", "()", "AdamW")),
    "complex": (lambda: torch.randn(3, 3, dtype=torch.complex64), ("real floating", "complex64")),
    "sparse": (lambda: torch.randn(3, 3).to_sparse(), ("dense", "sparse_coo")),
    "transposed": (lambda: torch.randn(3, 5).t(), ("contiguous", "(5, 3)", "strides (1, 5)")),
    "expanded": (lambda: torch.randn(1, 4).expand(4, 4), ("contiguous", "(4, 4)", "strides (0, 1)")),
    "strided": (lambda: torch.randn(6, 6)[::2], ("contiguous", "(3, 6)", "strides (12, 1)")),
}


@pytest.mark.parametrize("kind", UNFIT)
@pytest.mark.parametrize("own", [False, True], ids=["torch.optim.Muon", "mc.Muon"])
def test_a_parameter_that_muon_cannot_take(kind: str, own: bool) -> None:
    make, words = UNFIT[kind]
    good, bad = matrix(), Parameter(make())
    if own:
        with refused(ValueError, "odd.weight", *words, tensors=(good, bad)):
            mc.Muon([("good.weight", good), ("odd.weight", bad)])
        return
    optimizer = stepped(Muon([("good.weight", good)]))
    optimizer.add_param_group({"params": [("odd.weight", bad)]})
    with refused(ValueError, "odd.weight", *words, by=[optimizer]):
        wrap(optimizer)


@pytest.mark.parametrize("kind", UNFIT)
def test_such_a_parameter_added_to_a_live_optimizer(kind: str) -> None:
    make, words = UNFIT[kind]
    optimizer = mc.Muon([("good.weight", matrix())], backend="aot_eager")
    stepped(optimizer)
    with refused(ValueError, "odd.weight", *words, by=[optimizer]):
        optimizer.add_param_group({"params": [("odd.weight", Parameter(make()))]})
    stepped(optimizer)
    assert optimizer.compiled.stats.graphs == 1


@pytest.mark.parametrize("kind", ["complex", "sparse", "transposed"])
def test_a_parameter_that_adamw_cannot_take(kind: str) -> None:
    make, words = UNFIT[kind]
    muon, adamw = stepped(Muon([matrix()])), AdamW([("odd", Parameter(make()))])
    with refused(ValueError, "'odd'", *words, by=[muon, adamw]):
        wrap(muon, adamw)


def test_a_dtype_that_is_no_plain_float() -> None:
    param = Parameter(torch.zeros(4, 4).to(torch.float8_e4m3fn), requires_grad=False)
    optimizer = AdamW([("tiny", param)])
    with refused(ValueError, "'tiny'", "float32", "float8_e4m3fn", tensors=[param.view(torch.uint8)]):
        wrap(optimizer)
    with refused(ValueError, "'tiny'", "float8_e4m3fn"):
        mc.Muon([("tiny", param)])


def test_a_lazy_parameter_is_named() -> None:
    with pytest.raises(ValueError, match="'lazy.weight'"):
        mc.Muon([("lazy.weight", nn.LazyLinear(3).weight)])


def test_one_parameter_twice_or_in_two_groups_or_optimizers() -> None:
    w, b = matrix(), Parameter(torch.randn(4))
    with pytest.warns(UserWarning, match="duplicate parameters"):
        twice = Muon([("w", w), ("w.again", w)])
    with refused(ValueError, "'w.again'", "'w'", "twice", by=[twice]):
        wrap(twice)

    muon, adamw = stepped(Muon([("w", w)])), stepped(AdamW([("b", b), ("w.again", w)]))
    with refused(ValueError, "'w.again'", "'w'", "twice", by=[muon, adamw]):
        wrap(muon, adamw)
    with refused(ValueError, "distinct optimizers", by=[muon]):
        wrap(muon, muon)

    groups = Muon([{"params": [("w", w)]}])
    groups.param_groups.append({**groups.param_groups[0], "param_names": ["w.again"]})
    with refused(ValueError, "'w.again'", "'w'", "twice", by=[groups]):
        wrap(groups)


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
def test_own_muon_refuses_one_parameter_twice_by_name() -> None:
    w = matrix()
    with refused(ValueError, "'w.again'", tensors=[w]):
        mc.Muon([("w", w), ("w.again", w)])
    with refused(ValueError, "'w.again'", tensors=[w]):
        mc.Muon([{"params": [("w", w)]}, {"params": [("w.again", w)]}])


def test_two_parameters_under_one_name() -> None:
    optimizer = Muon([matrix(), matrix()])
    names = [("w", p) for p in optimizer.param_groups[0]["params"]]
    with refused(ValueError, "unique names", "'w'", by=[optimizer]):
        wrap(optimizer, names=names)


def test_overlapping_parameters() -> None:
    flat = torch.randn(40)
    left, right = Parameter(flat[:16].view(4, 4)), Parameter(flat[12:28].view(4, 4))
    optimizer = Muon([("left", left), ("right", right)])
    with refused(ValueError, "'left'", "'right'", "overlap", by=[optimizer], tensors=[flat]):
        wrap(optimizer)

    vector = Parameter(flat[10:14])
    muon, adamw = Muon([("left", left)]), AdamW([("vector", vector)])
    with refused(ValueError, "'left'", "'vector'", "overlap", by=[muon, adamw]):
        wrap(muon, adamw)
    same = [("a", left), ("b", Parameter(left.detach()))]
    with refused(ValueError, "'a'", "'b'", "overlap", by=[Muon(same)]):
        wrap(Muon(same))


def test_overlap_of_memory_that_two_storages_share() -> None:
    array = torch.zeros(40).numpy()
    left, right = (Parameter(torch.from_numpy(array[i : i + 16]).view(4, 4)) for i in (0, 8))
    assert left.untyped_storage().data_ptr() != right.untyped_storage().data_ptr()
    optimizer = Muon([("left", left), ("right", right)])
    with refused(ValueError, "'left'", "'right'", "overlap", by=[optimizer]):
        wrap(optimizer)


def test_neighbours_in_one_flat_buffer_are_fine() -> None:
    flat, lr = torch.randn(3 + 2 * 24), 0.5
    neighbours = [Parameter(flat[3 + 24 * i : 27 + 24 * i].view(4, 6)) for i in range(2)]
    apart = [Parameter(p.detach().clone()) for p in neighbours]
    ours, theirs = Muon(neighbours, lr=lr), Muon(apart, lr=lr)
    wrap(ours)
    stepped(ours)
    stepped(theirs)
    for a, b in zip(neighbours, apart, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-2 * lr)
        assert flat.data_ptr() <= a.data_ptr() < flat.data_ptr() + flat.nbytes


def test_a_sharded_parameter_is_refused_by_name() -> None:
    stand_in = torch.randn(4, 4)
    stand_in.placements = ("Shard(0)",)  # type: ignore[attr-defined]
    with refused(NotImplementedError, "'w'", "Shard(0)", "plain tensor"):
        check_tensor("w", stand_in, "muon")
    with refused(TypeError, "'w'", "SimpleNamespace"):
        check_tensor("w", SimpleNamespace(placements=()), "muon")


def run_python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh process, without the variables that name a compiler."""
    inherited = {k: v for k, v in os.environ.items() if k not in ("CXX", "CC")}
    inherited["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    return subprocess.run(
        [sys.executable, "-c", code], env=inherited | env, capture_output=True, text=True, timeout=100, check=False
    )


DTENSOR = """
import tempfile, torch, torch.distributed as dist, muon_compile as mc
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh
with tempfile.TemporaryDirectory() as folder:
    dist.init_process_group("gloo", store=dist.FileStore(folder + "/store", 1), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    plain = torch.nn.Parameter(torch.randn(4, 6))
    alone = torch.nn.Parameter(distribute_tensor(plain.detach().clone(), mesh, [Shard(0)]))
    for param in (plain, alone):
        optimizer = torch.optim.Muon([("block.weight", param)])
        step = mc.compile_step(optimizer, backend="aot_eager")
        param.grad = torch.ones(4, 6) if param is plain else distribute_tensor(torch.ones(4, 6), mesh, [Shard(0)])
        optimizer.step()
        assert step.plan.collectives == ()
    assert torch.equal(alone.full_tensor(), plain)
    assert isinstance(optimizer.state[alone]["momentum_buffer"], DTensor)
    dist.destroy_process_group()
print("equal")
"""


def test_a_dtensor_on_one_rank_steps_as_a_plain_tensor_does() -> None:
    done = run_python(DTENSOR)
    assert done.stdout.split()[-1:] == ["equal"], done.stderr  # Gloo may print before it


# -- no compiler --------------------------------------------------------------------------------------------------

NO_COMPILER = """
import torch, muon_compile as mc
from tests.unit.untouched import refused
w = torch.nn.Parameter(torch.randn(4, 4))
optimizer = torch.optim.Muon([w])
w.grad = torch.randn(4, 4)
optimizer.step()
with refused(mc.CompileError, "apt-get install g++", "backend='aot_eager'", by=[optimizer]):
    mc.compile_step(optimizer)
own = mc.Muon([w])
with refused(mc.CompileError, "apt-get install g++", by=[own]):
    own.step()
mc.compile_step(optimizer, backend="aot_eager")
optimizer.step()
print("refused")
"""


def test_no_compiler_is_said_at_wrap_time() -> None:
    done = run_python(NO_COMPILER, PATH="/nowhere")
    assert done.stdout.split() == ["refused"], done.stderr
    assert issubclass(mc.CompileError, RuntimeError)


# -- configs that do not fit a parameter --------------------------------------------------------------------------

MISFITS: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"split_sizes": (2, 1)}, ("split_sizes", "(2, 1)", "sum up to 3", "4 rows")),
    ({"split_sizes": (2, 2, 2)}, ("split_sizes", "sum up to 6", "4 rows")),
    ({"num_heads": 3}, ("num_heads=3", "4 rows", "divisor")),
    ({"ns_dtype": "float16"}, ("ns_dtype", "float16", "bfloat16")),
]


@pytest.mark.parametrize(("fields", "words"), MISFITS, ids=[str(f) for f, _ in MISFITS])
def test_a_config_that_does_not_fit_a_parameter(fields: dict[str, Any], words: tuple[str, ...]) -> None:
    config = mc.MuonConfig(**fields)
    with refused(ValueError, "'qkv.weight'", *words):
        mc.make_plan(mc.inspect_params([("qkv.weight", matrix(4, 6))], config=config))
    optimizer = mc.Muon([("qkv.weight", matrix(4, 6))], backend="aot_eager")
    stepped(optimizer)
    optimizer.param_groups[0]["config"] = config
    with refused(ValueError, "'qkv.weight'", *words, by=[optimizer]):
        optimizer.step()
    with refused(ValueError, "'qkv.weight'", *words, by=[optimizer]):
        wrap(optimizer)


@pytest.mark.parametrize(("fields", "words"), MISFITS, ids=[str(f) for f, _ in MISFITS])
def test_own_muon_refuses_such_a_config_when_it_is_made(fields: dict[str, Any], words: tuple[str, ...]) -> None:
    w, config = matrix(4, 6), mc.MuonConfig(**fields)
    with refused(ValueError, "'qkv.weight'", *words, tensors=[w]):
        mc.Muon([("qkv.weight", w)], config=config)
    optimizer = mc.Muon([("v.weight", matrix(4, 6))])
    with refused(ValueError, "'qkv.weight'", *words, by=[optimizer], tensors=[w]):
        optimizer.add_param_group({"params": [("qkv.weight", w)], "config": config})


def test_own_muon_refuses_other_misfits_when_it_is_made() -> None:
    w = matrix()
    with refused(ValueError, "backend", "aot_eager", "inducto", tensors=[w]):
        mc.Muon([w], backend="inducto")
    with refused(ValueError, "flatten", "adamw", tensors=[w]):
        mc.Muon([{"params": [w], "algorithm": "adamw", "flatten": True}])
    flat = torch.randn(40)
    left, right = Parameter(flat[:16].view(4, 4)), Parameter(flat[12:28].view(4, 4))
    with refused(ValueError, "'left'", "'right'", "overlap", tensors=[flat]):
        mc.Muon([("left", left), ("right", right)])


def test_exact_mode_refuses_what_stock_muon_cannot_do() -> None:
    w = matrix()
    for config in (mc.MuonConfig(preset="moonlight"), mc.MuonConfig(ns_dtype="float32"), mc.MuonConfig(eps="relative")):
        optimizer = mc.Muon([("w", w)], config=config)
        with refused(ValueError, "'w'", "exact=True", "preset 'torch'", by=[optimizer]):
            wrap(optimizer, config=mc.CompileConfig(exact=True))


# -- mixes that are split, not refused ----------------------------------------------------------------------------


def test_devices_and_dtypes_get_buckets_and_products_of_their_own() -> None:
    facts = [("cpu", "float32"), ("cuda:0", "float32"), ("cuda:1", "float32"), ("cpu", "bfloat16"), ("cpu", "float32")]
    specs = [
        mc.MatrixSpec(name=f"w{number}", shape=(4, 6), device=device, dtype=dtype)
        for number, (device, dtype) in enumerate(facts)
    ]
    plan = mc.make_plan(specs)
    assert [(b.device, b.dtype, b.params) for b in plan.buckets] == [
        ("cpu", "float32", (0, 4)),
        ("cuda:0", "float32", (1,)),
        ("cuda:1", "float32", (2,)),
        ("cpu", "bfloat16", (3,)),
    ]
    for batch in plan.batches:
        assert {plan.stretch(piece.part).bucket.device for piece in batch.pieces} == {batch.device}
    gradients = [mc.MatrixSpec(name=d, shape=(4, 6), dtype="float32", grad_dtype=d) for d in ("float32", "bfloat16")]
    assert len(mc.make_plan(gradients).buckets) == 2


def test_a_mix_of_dtypes_steps_as_stock_does() -> None:
    torch.manual_seed(0)
    dtypes, lr = (torch.float32, torch.bfloat16, torch.float32, torch.float64), 0.5
    ours, theirs = ([Parameter(torch.ones(8, 12, dtype=d)) for d in dtypes] for _ in range(2))
    compiled, stock = Muon(ours, lr=lr), Muon(theirs, lr=lr)
    step = wrap(compiled)
    assert [bucket.dtype for bucket in step.plan.buckets] == ["float32", "bfloat16", "float64"]
    for a, b in zip(ours, theirs, strict=True):
        a.grad = torch.randn_like(a)
        b.grad = a.grad.clone()
    compiled.step()
    stock.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=(2e-2 if a.dtype != torch.bfloat16 else 4e-2) * lr)
        assert compiled.state[a]["momentum_buffer"].dtype == a.dtype
