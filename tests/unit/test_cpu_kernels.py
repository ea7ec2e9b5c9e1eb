"""The CPU kernels against float64, over ragged shapes, forms, teams of threads and instruction sets."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from muon_compile.kernels import cpu
from muon_compile.kernels.cache import cache_dir
from muon_compile.plan.forms import parse_form

needs_kernels = pytest.mark.skipif(cpu.why_not() is not None, reason=f"no CPU kernels: {cpu.why_not()}")
JORDAN = (3.4445, -4.7750, 2.0315)
SHAPES = [(3, 24, 100), (2, 100, 24), (2, 1, 1), (2, 5, 3), (1, 33, 33), (3, 64, 64), (1, 130, 700), (1, 31, 2000)]


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def polynomial(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Five Jordan steps in ``dtype``, normalized as stock does."""
    tall = x.shape[-2] > x.shape[-1]
    x = (x.mT if tall else x).to(dtype)
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    a, b, c = JORDAN
    for _ in range(5):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def error(got: Tensor, want: Tensor) -> float:
    """Worst relative Frobenius error of a batch."""
    return float(((got.double() - want).norm(dim=(1, 2)) / want.norm(dim=(1, 2))).max())


def run(x: Tensor, form: str = "standard", eps: float = 1e-7, eps_add: bool = False) -> Tensor:
    parsed = parse_form(form, 5)
    out = torch.full_like(x, float("nan"))
    split = parsed.gram == "split"
    cpu.newton_schulz(x, out, JORDAN * 5, parsed.segments, split=split, eps=eps, eps_add=eps_add)
    return out


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


@needs_kernels
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_standard_errs_as_torch_does(shape: tuple[int, int, int]) -> None:
    x = gaussian(*shape)
    want = polynomial(x, torch.float64)
    # The same roundings in the same places, so the same error but for the order of sums.
    assert error(run(x), want) <= 1.1 * error(polynomial(x, torch.bfloat16), want)


@needs_kernels
@pytest.mark.parametrize("form", ["gram_split", "gram_split_restart", "gram_split:1,4", "gram_split:1,1,1,1,1"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_split_forms_err_less_than_standard(shape: tuple[int, int, int], form: str) -> None:
    x = gaussian(*shape)
    want = polynomial(x, torch.float64)
    assert error(run(x, form), want) <= error(polynomial(x, torch.bfloat16), want)


@needs_kernels
def test_half_form_with_a_late_switch_stays_near_standard() -> None:
    x = gaussian(2, 96, 400)
    want = polynomial(x, torch.float64)
    assert error(run(x, "gram_half:1,1,1,2"), want) <= 2 * error(polynomial(x, torch.bfloat16), want)


@needs_kernels
@pytest.mark.parametrize("form", ["standard", "gram_split"])
@pytest.mark.parametrize("shape", [(1, 200, 700), (3, 192, 600), (1, 700, 200), (5, 24, 900)], ids=str)
def test_any_number_of_threads_gives_the_same_bits(
    shape: tuple[int, int, int], form: str, threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = gaussian(*shape)
    torch.set_num_threads(1)
    one = run(x, form)
    for count in (2, 3, 7):
        torch.set_num_threads(count)
        assert torch.equal(run(x, form), one)


@needs_kernels
def test_in_place_gives_the_same_bits() -> None:
    x = gaussian(4, 40, 90)
    want = run(x)
    cpu.newton_schulz(x, x, JORDAN * 5, (1,) * 5, split=False, eps=1e-7, eps_add=False)
    assert torch.equal(x, want)


@needs_kernels
@pytest.mark.parametrize("form", ["standard", "gram_split"])
@pytest.mark.parametrize("scale", [1e-30, 1e-15, 1e15, 1e30])
def test_a_scale_far_from_one_changes_nothing(form: str, scale: float) -> None:
    # Powers of two scale bfloat16 exactly. With squares out of float32's range stock normalizes by 0 or inf; so do we.
    power = 2.0 ** round(torch.tensor(scale).log2().item())
    x = gaussian(2, 24, 100)
    got = run(x * power, form, eps=0.0)
    if 1e-19 < scale < 1e18:
        assert (
            torch.equal(got, run(x, form, eps=0.0)) if form == "standard" else error(got, run(x, form).double()) < 1e-2
        )
    else:
        want = polynomial(x * power, torch.bfloat16)
        assert torch.equal(got.isfinite(), want.isfinite()) or torch.equal(got, torch.zeros_like(got))


@needs_kernels
@pytest.mark.parametrize("form", ["standard", "gram_split", "gram_half_restart"])
def test_zero_and_bad_matrices_keep_to_themselves(form: str) -> None:
    x = gaussian(4, 24, 100)
    x[1] = 0
    x[2, 3, 5] = float("nan")
    got = run(x, form)
    assert torch.equal(got[1], torch.zeros_like(got[1]))
    assert got[2].isnan().all()
    assert torch.equal(got[[0, 3]], run(x[[0, 3]].clone(), form))


@needs_kernels
def test_eps_clamps_or_adds() -> None:
    x = gaussian(1, 24, 100)
    x = x / x.norm()
    clamped, added = run(x, eps=2.0), run(x, eps=1.0, eps_add=True)
    assert torch.equal(clamped, added)
    assert not torch.equal(clamped, run(x))


@needs_kernels
@pytest.mark.parametrize("shape", [(0, 24, 100), (3, 0, 5), (3, 5, 0)], ids=str)
def test_nothing_to_do(shape: tuple[int, int, int]) -> None:
    assert run(gaussian(*shape)).shape == shape


@needs_kernels
@pytest.mark.parametrize("form", ["standard", "gram_split"])
def test_instruction_sets_agree(form: str, tmp_path: Path) -> None:
    code = (
        "import sys, torch; sys.path[:0] = sys.argv[3:]\n"
        "from tests.unit.test_cpu_kernels import gaussian, run; from muon_compile.kernels import cpu\n"
        "assert cpu.isa() == 'avx512_bf16'; torch.save(run(gaussian(2, 70, 90), sys.argv[1]), sys.argv[2])"
    )
    path = tmp_path / "out.pt"
    environment = os.environ | {"MUON_COMPILE_CPU_ISA": "avx512_bf16"}
    root = str(Path(__file__).parents[2])
    subprocess.run([sys.executable, "-c", code, form, str(path), root], env=environment, check=True, timeout=100)
    x = gaussian(2, 70, 90)
    want = polynomial(x, torch.float64)
    # Sums of products in another order: each is a bfloat16 rounding away at most.
    assert error(torch.load(path), want) <= 1.1 * error(run(x, form), want)


@needs_kernels
@pytest.mark.parametrize("types", [(g, m, o) for g in ("f", "b") for m in ("f", "b") for o in ("f", "b")], ids="".join)
@pytest.mark.parametrize(("ema", "nesterov"), [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("scale", [None, 0.125])
def test_momentum(types: tuple[str, str, str], ema: bool, nesterov: bool, scale: float | None) -> None:
    names = {"f": torch.float32, "b": torch.bfloat16}
    grad_type, state_type, out_type = (names[t] for t in types)
    generator = torch.Generator().manual_seed(1)
    grads = [torch.randn(7, 2501, generator=generator).to(grad_type) for _ in range(3)]
    state = torch.randn(3, 7, 2501, generator=generator).to(state_type)
    mus = torch.tensor([0.95, 0.5, 0.9], dtype=torch.float64)
    present = torch.tensor([True, False, True])
    old, out = state.clone(), torch.full(state.shape, float("nan"), dtype=out_type)
    factor = None if scale is None else torch.tensor(scale)
    cpu.momentum(grads, state, out, mus, present, factor, ema=ema, nesterov=nesterov)
    assert torch.equal(state[1], old[1])
    assert torch.equal(out[1], torch.zeros_like(out[1]))
    for row in (0, 2):
        g, m, mu = grads[row].double() * (scale or 1.0), old[row].double(), mus[row]
        m = m + (1 - mu) * (g - m) if ema else mu * m + g
        direction = m if not nesterov else g + mu * (m - g) if ema else g + mu * m
        for got, want in ((state[row], m), (out[row], direction)):
            # A rounding to the stored dtype, and float32 arithmetic before it.
            bound = (4e-3 if got.dtype == torch.bfloat16 else 1e-6) * want.abs() + 1e-6
            assert ((got.double() - want).abs() <= bound).all()


@needs_kernels
@pytest.mark.parametrize("param_type", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("update_type", [torch.float32, torch.bfloat16], ids=str)
def test_update(param_type: torch.dtype, update_type: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    params = [torch.randn(9, 1001, generator=generator).to(param_type) for _ in range(3)]
    params[1][0, 0] = -0.0
    direction = torch.randn(3, 9, 1001, generator=generator).to(update_type)
    direction[1] = float("nan")
    old = [p.clone() for p in params]
    decay, size = torch.tensor([0.9, 1.0, 0.99]).double(), torch.tensor([-0.1, 0.0, 0.2]).double()
    cpu.update(params, direction, decay, size)
    assert torch.equal(params[1].view(torch.uint8), old[1].view(torch.uint8))
    for row in (0, 2):
        # As torch.optim makes it, with its two roundings.
        want = old[row].clone().mul_(float(decay[row])).add_(direction[row].to(param_type), alpha=float(size[row]))
        kept = old[row].double().abs() * decay[row]
        bound = (1e-2 if param_type == torch.bfloat16 else 1e-6) * (want.double().abs() + kept) + 1e-6
        assert ((params[row].double() - want.double()).abs() <= bound).all()


@needs_kernels
def test_a_decay_that_bfloat16_cannot_hold_does_nothing_as_on_stock() -> None:
    param = torch.randn(9, 100, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    want = param.clone().mul_(1 - 1e-4)
    zero = torch.zeros(1, 9, 100, dtype=torch.bfloat16)
    cpu.update([param], zero, torch.tensor(1 - 1e-4).double(), torch.tensor(-0.1).double())
    assert torch.equal(param, want)


def run_alone(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    root = str(Path(__file__).parents[2])
    code = f"import sys; sys.path.insert(0, {root!r})\n{code}"
    return subprocess.run(
        [sys.executable, "-c", code], env=os.environ | environment, capture_output=True, text=True, timeout=100
    )


FEWER_THREADS = """
import torch
from tests.unit.test_cpu_kernels import gaussian, run
x = gaussian(5, 256, 256)
torch.set_num_threads(1)
one = run(x)
torch.set_num_threads(8)
assert torch.equal(run(x), one)
print("same")
"""


@needs_kernels
@pytest.mark.parametrize(
    ("name", "value"), [("OMP_THREAD_LIMIT", "2"), ("OMP_THREAD_LIMIT", "1"), ("OMP_DYNAMIC", "true")]
)
def test_fewer_threads_than_asked_for_do_all_of_the_work(name: str, value: str) -> None:
    done = run_alone(FEWER_THREADS, **{name: value})
    assert done.stdout.strip() == "same", done.stderr


@needs_kernels
def test_a_damaged_library_is_compiled_anew(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    code = "import torch; from muon_compile.kernels import cpu; print(cpu.available(), cpu.isa())"
    first = run_alone(code, MUON_COMPILE_CACHE_DIR=str(tmp_path))
    assert first.stdout.startswith("True")
    (library,) = tmp_path.glob("kernels-*.so")
    whole = library.read_bytes()
    for damaged in (whole[:20000], b"", whole[: len(whole) // 2] + bytes(len(whole) - len(whole) // 2)):
        library.write_bytes(damaged)
        assert run_alone(code, MUON_COMPILE_CACHE_DIR=str(tmp_path)).stdout == first.stdout
        assert len(library.read_bytes()) == len(whole)


@needs_kernels
def test_a_child_of_a_fork_can_use_them() -> None:
    code = (
        "import os, torch; torch.set_num_threads(1)\n"
        "from tests.unit.test_cpu_kernels import gaussian, run; run(gaussian(2, 24, 40))\n"
        "pid = os.fork()\n"
        "if pid == 0: run(gaussian(2, 24, 40)); os._exit(7)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))"
    )
    assert run_alone(code).stdout.strip() == "7"


@needs_kernels
def test_another_default_device_changes_nothing() -> None:
    code = (
        "import torch; from muon_compile.run.calibrate import calibrate\n"
        "torch.set_default_device('meta'); print(calibrate().native)"
    )
    with tempfile.TemporaryDirectory() as folder:
        done = run_alone(code, MUON_COMPILE_CACHE_DIR=folder)
    assert done.stdout.strip() == "True", done.stderr


@needs_kernels
def test_memory_that_a_kernel_cannot_read_is_refused() -> None:
    x = gaussian(2, 24, 40)
    with pytest.raises(ValueError, match="contiguous tensors on the CPU"):
        cpu.newton_schulz(x, x.to("meta"), JORDAN * 5, (1,) * 5, split=False, eps=1e-7, eps_add=False)
    with pytest.raises(ValueError, match="contiguous tensors on the CPU"):
        cpu.update([x[0].T], x[:1].float(), torch.tensor(1.0).double(), torch.tensor(1.0).double())


def test_no_home_is_no_error_where_the_cache_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.setenv("MUON_COMPILE_CACHE_DIR", str(tmp_path / "named"))
    assert cache_dir() == tmp_path / "named"
    monkeypatch.delenv("MUON_COMPILE_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    with pytest.raises(OSError, match="MUON_COMPILE_CACHE_DIR"):
        cache_dir()


@needs_kernels
def test_scratch_is_kept_from_call_to_call() -> None:
    x = gaussian(2, 40, 90)
    run(x)
    held = cpu.scratch_held()
    assert held > 0
    run(x)
    assert cpu.scratch_held() == held


def test_switched_off_by_the_environment(tmp_path: Path) -> None:
    code = "from muon_compile.kernels import cpu; print(cpu.why_not()); cpu.isa()"
    environment = os.environ | {"MUON_COMPILE_NATIVE": "0"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "MUON_COMPILE_NATIVE=0"
    assert "RuntimeError: The CPU kernels are not available here" in done.stderr


@needs_kernels
def test_no_compiler_is_said_in_words(tmp_path: Path) -> None:
    code = "import torch; from muon_compile.kernels import cpu; print(cpu.why_not())"
    environment = os.environ | {"CXX": "no-such-compiler", "MUON_COMPILE_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert "'no-such-compiler' was not found" in done.stdout


def test_a_cache_that_others_may_write_to_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    monkeypatch.setenv("MUON_COMPILE_CACHE_DIR", str(open_to_all))
    with pytest.raises(PermissionError, match="only you can write"):
        cache_dir()
    monkeypatch.setenv("MUON_COMPILE_CACHE_DIR", str(tmp_path / "new"))
    assert cache_dir().stat().st_mode & 0o777 == 0o700
