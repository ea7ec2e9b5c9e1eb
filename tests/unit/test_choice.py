"""Which form and kernel a batch takes: the cost model's regimes, ties, names, and what the planner makes of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

import muon_compile as mc
from muon_compile.plan import choose
from muon_compile.plan.choose import available_kernels, choose_dtype, choose_form
from muon_compile.plan.cost import Work, predict
from muon_compile.plan.forms import FORM_NAMES, Form, parse_form
from muon_compile.plan.hardware import Rates

CONFIG = mc.MuonConfig()
STANDARD, GRAM, SPLIT = (parse_form(name, 5) for name in ("standard", "gram", "gram_split"))


def flat(kernel: Any, dtype: str, rate: float) -> Rates:
    return Rates(kernel=kernel, dtype=dtype, flops_per_second=(rate,) * 6)


def machine(*, bf16: float = 1e12, f32: float = 5e11, native: float | None = None, **changes: Any) -> mc.Hardware:
    """A machine without host costs, memory costs or cache, unless told otherwise."""
    gemm = (flat("graph", "bfloat16", bf16), flat("graph", "float32", f32))
    if native is not None:
        gemm += (flat("native", "bfloat16", native),)
    values: dict[str, Any] = {"name": "made up", "device": "cpu", "gemm": gemm, "native": native is not None}
    values |= {"bytes_per_second": 1e18, "cache_bytes": 1, "op_seconds": 1e-15}
    return mc.Hardware(**(values | changes))


def work(num: int = 4, rows: int = 32, cols: int = 256, dtype: str = "bfloat16") -> Work:
    return Work(num_matrices=num, rows=rows, cols=cols, dtype=dtype)


@pytest.fixture
def all_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a float32 and a split Gram were accurate enough everywhere."""
    monkeypatch.setattr(choose, "auto_forms", lambda rows, cols, config: (STANDARD, GRAM, SPLIT))


# -- the model ------------------------------------------------------------------------------------------------------


def test_products_are_counted_by_kind_dtype_and_kernel() -> None:
    num, r, c = 4, 32, 256
    large, small = 2 * r * r * c, 2 * r**3
    fast = machine(bf16=1e12, f32=2.5e11, native=3e12)

    def gemm(form: Form, kernel: str, dtype: str = "bfloat16") -> float:
        return predict(work(num, r, c, dtype), form, kernel, fast).gemm_seconds / num

    assert gemm(STANDARD, "graph") == pytest.approx(STANDARD.flops(r, c) / 1e12)
    assert gemm(STANDARD, "native") == pytest.approx(STANDARD.flops(r, c, symmetric=True) / 3e12)
    # Q is wider than X, so it is applied as two halves; the Gram and 17 small products are float32.
    assert gemm(GRAM, "graph") == pytest.approx((large + 17 * small) / 2.5e11 + 2 * large / 1e12)
    assert gemm(SPLIT, "graph") == pytest.approx((large + 3 * 17 * small) / 2.5e11 + 2 * large / 1e12)
    assert gemm(SPLIT, "native") == pytest.approx(((large + 3 * 17 * small) / 2 + 2 * large) / 3e12)
    restart = parse_form("gram_half:2,3", 5)
    assert gemm(restart, "graph") == pytest.approx((2 * large + 14 * small + 2 * large) / 1e12)
    # In float32 products every small matrix is float32 anyway.
    assert gemm(SPLIT, "graph", "float32") == gemm(GRAM, "graph", "float32")
    assert gemm(GRAM, "graph", "float32") == pytest.approx((2 * large + 17 * small) / 2.5e11)
    assert gemm(STANDARD, "symmetric") == pytest.approx(STANDARD.flops(r, c, symmetric=True) / 1e12)


def test_tall_and_wide_cost_the_same() -> None:
    hardware = mc.Hardware.preset("cpu-2core-native")
    for kernel in ("graph", "native"):
        wide, tall = work(rows=32, cols=256), work(rows=256, cols=32)
        assert predict(wide, SPLIT, kernel, hardware) == predict(tall, SPLIT, kernel, hardware)


def test_memory_is_paid_for_beyond_the_cache_only() -> None:
    one = 2 * 32 * 256  # bytes of one X in bfloat16
    both = 2 * 4 * (one + 2 * 32 * 32)
    everything = machine(cache_bytes=both)
    assert predict(work(), STANDARD, "graph", everything).memory_seconds == 0
    half = predict(work(), STANDARD, "graph", machine(cache_bytes=both // 2, bytes_per_second=1.0)).memory_seconds
    none = predict(work(), STANDARD, "graph", machine(bytes_per_second=1.0)).memory_seconds
    assert half == pytest.approx(none / 2, rel=1e-3)
    # Normalization: 3 passes; every step: one for the Gram, three for the application; six over small matrices.
    assert none == pytest.approx(4 * (3 * one + 5 * 4 * one + 5 * 4 * 2 * 32 * 32), rel=1e-3)
    # The native kernel reads and writes X once where one matrix fits.
    roomy = machine(native=1e12, cache_bytes=5 * one, bytes_per_second=1.0)
    assert predict(work(num=1000), STANDARD, "native", roomy).memory_seconds == pytest.approx(2000 * one, rel=1e-2)
    tight = dataclasses.replace(roomy, cache_bytes=1)
    assert predict(work(num=1000), STANDARD, "native", tight).memory_seconds == pytest.approx(11e3 * one, rel=1e-2)


def test_operators_of_the_host_are_counted() -> None:
    slow = machine(op_seconds=1.0, native=1e12)

    def operators(form: Form, kernel: str = "graph") -> float:
        return predict(work(), form, kernel, slow).host_seconds

    assert operators(STANDARD) == 2 + 5 * 3  # norm and division; Gram, square and application of every step
    assert operators(GRAM) == 2 + 1 + 17 + 2 + 3
    assert operators(SPLIT) == 2 + 1 + 17 * 5 + 2 + 3
    assert operators(STANDARD, "native") == operators(SPLIT, "native") == 1


@pytest.mark.parametrize(
    ("changes", "regime"),
    [({}, "GEMM"), ({"bytes_per_second": 1e9}, "memory"), ({"op_seconds": 1.0}, "host")],
    ids=["GEMM", "memory", "host"],
)
def test_every_regime_is_reached_and_named(changes: dict[str, float], regime: str) -> None:
    hardware = machine(**changes)
    cost = predict(work(), STANDARD, "graph", hardware)
    assert cost.regime == regime
    assert cost.seconds == cost.host_seconds + cost.gemm_seconds + cost.memory_seconds
    assert choose_form((4, 32, 256), CONFIG, hardware, "standard").reason == f"asked for; {regime}-bound"


# -- the choice -----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("all_forms")
def test_the_fastest_form_is_taken_where_it_is_clearly_faster() -> None:
    thin = choose_form((74, 24, 10240), CONFIG, machine())
    assert (thin.form, thin.kernel) == ("gram", "graph")
    assert thin.reason.startswith("GEMM-bound; ")
    assert thin.reason.endswith("x faster than standard")
    square = choose_form((12, 768, 768), CONFIG, machine())
    assert (square.form, square.kernel) == ("standard", "graph")
    assert square.reason.startswith("GEMM-bound; next gram at ")
    memory = choose_form((74, 24, 10240), CONFIG, machine(bytes_per_second=1e8, f32=1e12))
    assert memory.reason.startswith("memory-bound; ")
    host = choose_form((1, 24, 64), CONFIG, machine(op_seconds=1.0))
    assert host == ("standard", "graph", "host-bound; next gram at 1.5x the time")


@pytest.mark.usefixtures("all_forms")
def test_the_native_kernel_is_taken_where_it_is_faster() -> None:
    assert choose_form((12, 768, 768), CONFIG, machine(native=1e12)).kernel == "native"
    assert choose_form((12, 768, 768), CONFIG, machine(native=1e10)).kernel == "graph"
    fast = choose_form((74, 24, 10240), CONFIG, machine(native=1e12))
    assert (fast.form, fast.kernel) == ("gram_split", "native")


def test_without_another_accurate_form_standard_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "auto_forms", lambda rows, cols, config: (STANDARD,))
    choice = choose_form((74, 24, 10240), CONFIG, machine())
    assert choice == ("standard", "graph", "GEMM-bound; no other form is as accurate")
    monkeypatch.setattr(choose, "auto_forms", lambda rows, cols, config: ())
    assert choose_form((74, 24, 10240), CONFIG, machine()) == choice


def test_near_ties_go_to_standard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "auto_forms", lambda rows, cols, config: (GRAM,))
    dims = (4, 32, 256)
    tie = STANDARD.flops(32, 256) / 1e12
    applied, in_float32 = 2 * 2 * 32 * 32 * 256 / 1e12, 2 * 32 * 32 * 256 + 17 * 2 * 32**3

    def choice(ratio: float) -> choose.Choice:
        """The Gram form takes ``ratio`` of standard's time."""
        return choose_form(dims, CONFIG, machine(f32=in_float32 / (ratio * tie - applied)))

    assert [choice(ratio).form for ratio in (0.95, 0.98, 1.0, 1.02, 1.2)] == ["gram", *["standard"] * 4]
    assert choice(0.98).reason == choice(1.02).reason == "GEMM-bound; next gram is no faster"
    assert choice(1.2).reason == "GEMM-bound; next gram at 1.2x the time"
    assert choice(0.5).reason == "GEMM-bound; 2.0x faster than standard"


@pytest.mark.parametrize("name", [*FORM_NAMES, "gram_split:1,4", "gram:2,2,1"])
def test_a_named_form_is_taken_by_name(name: str) -> None:
    # On a machine where it is the slowest of all.
    choice = choose_form((12, 768, 768), CONFIG, machine(f32=1e3), name)
    assert choice.form == parse_form(name, 5).name
    assert choice.kernel == "graph"
    assert choice.reason.startswith("asked for; ")
    # Small matrices in float32 are not the native kernel's.
    native = choose_form((12, 768, 768), CONFIG, machine(native=1e15), name)
    float32 = parse_form(name, 5).gram == "float32"
    assert native.kernel == ("graph" if float32 else "native")


def test_kernels_are_there_by_device_and_dtype() -> None:
    assert available_kernels("bfloat16", machine()) == ("graph",)
    assert available_kernels("bfloat16", machine(native=1e12)) == ("graph", "native")
    assert available_kernels("float32", machine(native=1e12)) == ("graph",)
    gpu = dataclasses.replace(mc.Hardware.preset("h100"), symmetric=True)
    assert available_kernels("bfloat16", gpu) == ("graph", "symmetric")
    assert choose_form((12, 768, 768), CONFIG, gpu, "standard").kernel == "symmetric"


def test_exact_takes_the_standard_form_on_the_graph() -> None:
    hardware = machine(native=1e15)
    assert choose_form((12, 768, 768), CONFIG, hardware, exact=True)[:2] == ("standard", "graph")


def test_auto_dtype_follows_the_faster_products() -> None:
    assert choose_dtype(32, 256, machine(bf16=1e12, f32=5e11)) == "bfloat16"
    assert choose_dtype(32, 256, machine(bf16=1e12, f32=1e12)) == "bfloat16"
    assert choose_dtype(32, 256, machine(bf16=1e11, f32=1e12)) == "float32"
    # The native kernel multiplies bfloat16 even where bmm is slow at it.
    assert choose_dtype(32, 256, machine(bf16=1e11, f32=1e12, native=2e12)) == "bfloat16"
    assert choose_dtype(32, 256, dataclasses.replace(machine(bf16=1e11, f32=1e12), device="cuda")) == "bfloat16"
    only = dataclasses.replace(machine(), gemm=(flat("graph", "float32", 1e12),))
    assert choose_dtype(32, 256, only) == "bfloat16"
    # By the side of the products, the shorter one.
    rising = Rates(kernel="graph", dtype="bfloat16", flops_per_second=(1e9, 1e9, 1e9, 1e13, 1e13, 1e13))
    by_side = dataclasses.replace(machine(), gemm=(rising, flat("graph", "float32", 1e12)))
    sides = {(64, 4096): "float32", (4096, 64): "float32", (512, 512): "bfloat16"}
    assert {dims: choose_dtype(*dims, by_side) for dims in sides} == sides


# -- the planner ----------------------------------------------------------------------------------------------------

SPECS = [mc.MatrixSpec(name=f"w{i}", shape=shape) for i, shape in enumerate([(24, 2048), (24, 2048), (96, 96)])]


@pytest.mark.usefixtures("all_forms")
def test_the_plan_has_the_choice_of_every_batch_and_survives_its_text() -> None:
    hardware = mc.Hardware.preset("cpu-2core-native")
    plan = mc.make_plan(SPECS, hardware=hardware)
    thin, square = plan.batches
    assert (thin.form, thin.kernel) == ("gram_split", "native")
    assert (square.form, square.kernel) == ("standard", "native")
    for batch in plan.batches:
        dims = (batch.num_matrices, batch.rows, batch.cols)
        assert (batch.form, batch.kernel, batch.reason) == choose_form(dims, CONFIG, hardware)
    again = mc.Plan.from_json(plan.to_json())
    assert again == plan
    # Equal figures, equal plans; the measured machine's name is not in them.
    equal = dataclasses.replace(mc.Hardware.from_json(hardware.to_json()), name="the same elsewhere")
    assert mc.make_plan(SPECS, hardware=equal).digest == plan.digest == again.digest
    assert mc.make_plan(SPECS).digest != plan.digest


def test_without_hardware_every_device_has_its_fixed_preset() -> None:
    specs = [dataclasses.replace(SPECS[0], name=device, device=device) for device in ("cpu", "cuda:0", "npu:0")]
    plan = mc.make_plan(specs)
    given = mc.Hardware.preset("cpu-2core")
    assert mc.make_plan(specs, hardware=given) == plan
    # Figures are for devices of their type; the others keep their preset.
    other = mc.make_plan(specs, hardware=machine(native=1e15))
    assert [batch.kernel for batch in other.batches] == ["native", "graph", "graph"]
    assert other.batches[1:] == plan.batches[1:]


def test_auto_dtype_is_resolved_in_the_plan() -> None:
    auto = mc.MuonConfig(ns_dtype="auto")
    slow = machine(bf16=1e11, f32=1e12)
    specs = [*SPECS, dataclasses.replace(SPECS[0], name="there", device="cuda:0")]
    plan = mc.make_plan(specs, config=auto, hardware=slow)
    assert [spec.config.ns_dtype for spec in plan.specs] == ["float32"] * 3 + ["bfloat16"]  # type: ignore[union-attr]
    assert [batch.config.ns_dtype for batch in plan.batches] == ["float32", "float32", "bfloat16"]
    assert mc.Plan.from_json(plan.to_json()) == plan
    assert mc.make_plan(SPECS, config=auto) == mc.make_plan(SPECS)
    exact = mc.make_plan(SPECS, config=auto, hardware=slow, exact=True)
    assert {batch.config.ns_dtype for batch in exact.batches} == {"bfloat16"}
    # By the largest block of a fused weight, in its own shape.
    rising = Rates(kernel="graph", dtype="bfloat16", flops_per_second=(1e9, 1e9, 1e9, 1e13, 1e13, 1e13))
    by_side = dataclasses.replace(machine(), gemm=(rising, flat("graph", "float32", 1e12)))
    fused = mc.MatrixSpec(name="qkv", shape=(640, 512), config=mc.MuonConfig(ns_dtype="auto", split_sizes=(512, 128)))
    assert {b.config.ns_dtype for b in mc.make_plan([fused], hardware=by_side).batches} == {"bfloat16"}
    heads = mc.MatrixSpec(name="heads", shape=(512, 512), config=mc.MuonConfig(ns_dtype="auto", num_heads=8))
    assert {b.config.ns_dtype for b in mc.make_plan([heads], hardware=by_side).batches} == {"float32"}


def test_float16_is_refused_on_a_cpu_with_its_reason() -> None:
    with pytest.raises(ValueError, match=r"'w0': ns_dtype: float16 .*on most CPUs.*overflow; expected 'auto', 'bfloat"):
        mc.make_plan(SPECS, config=mc.MuonConfig(ns_dtype="float16"))


@pytest.mark.parametrize("name", ["gramm", "", "standard:5", "gram_restart:2,3", "gram_split:2,2", "gram:0,5", "GRAM"])
def test_unknown_forms_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"^ns: expected ") as caught:
        mc.make_plan(SPECS, ns=name)
    assert repr(name) in str(caught.value)
    adamw = [mc.MatrixSpec(name="b", shape=(4,), algorithm="adamw")]
    with pytest.raises(ValueError, match=r"^ns: expected "):
        mc.make_plan(adamw, ns=name)


def test_a_forms_segments_have_to_fit_every_group() -> None:
    ten = dataclasses.replace(SPECS[0], name="ten", config=mc.MuonConfig(ns_steps=10))
    assert [b.form for b in mc.make_plan([*SPECS, ten], ns="gram_restart").batches][:2] == ["gram:2,3"] * 2
    with pytest.raises(ValueError, match="ns_steps=10"):
        mc.make_plan([*SPECS, ten], ns="gram:2,3")


def test_exact_beside_another_form_is_refused() -> None:
    with pytest.raises(ValueError, match=r"ns: exact=True .*'auto' or 'standard'.*'gram'"):
        mc.make_plan(SPECS, ns="gram", exact=True)
    for name in ("auto", "standard"):
        plan = mc.make_plan(SPECS, ns=name, exact=True, hardware=machine(native=1e15))
        assert {(b.form, b.kernel) for b in plan.batches} == {("standard", "graph")}


@pytest.mark.usefixtures("all_forms")
@pytest.mark.parametrize("ns", ["auto", "gram_split_restart"])
def test_the_table_names_form_kernel_and_reason_of_every_batch(ns: str) -> None:
    config = mc.MuonConfig(scale="match_rms_adamw", coefficients="polar_express")
    shapes = [(24, 10240), (4, 4096, 128000), (256, 4096)]
    specs = [mc.MatrixSpec(name=f"w{i}", shape=shape, config=config) for i, shape in enumerate(shapes)]
    for name in ("cpu-2core", "cpu-2core-native"):
        plan = mc.make_plan(specs, ns=ns, hardware=mc.Hardware.preset(name))
        lines = plan.describe().splitlines()
        assert max(map(len, lines)) <= 120
        assert not any("…" in line for line in lines)
        for batch in plan.batches:
            (row,) = [line for line in lines if line.split()[:1] == [batch.name]]
            (reason,) = [line for line in lines if line.split()[:1] == [f"{batch.name}:"]]
            for word in (batch.form, batch.kernel, "bfloat16", "5 polar_express", "match_rms_adamw", "muon"):
                assert word in row
            assert batch.reason in reason
