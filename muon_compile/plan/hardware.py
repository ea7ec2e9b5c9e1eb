"""What a machine can do, as plain data: the figures that the cost model (``plan.cost``) counts with."""

from __future__ import annotations

import importlib
import json
import math
import sys
from dataclasses import dataclass
from typing import Any, Literal, get_args

import cattrs
import cattrs.v

from muon_compile.plan.forms import Kernel
from muon_compile.plan.network import Network
from muon_compile.plan.presets import NETWORKS

Device = Literal["cpu", "cuda", "npu"]
HARDWARE_VERSION = 2

# Sides of the batched square products that a row of rates is about.
SIDES = (32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """How fast one kernel multiplies batches of square matrices of one dtype.

    Args:
        kernel: ``"graph"``: ``bmm``; ``"native"``: this library's CPU kernel; ``"symmetric"``: the symmetric operator.
        dtype: dtype of the products, such as ``"bfloat16"``.
        flops_per_second: FLOP/s for every side of ``SIDES``, of arithmetic really done: a product of which one triangle
            is computed counts half, a split product counts as its three.

    Raises:
        ValueError: Another number of figures than ``SIDES`` has, or one that is not positive and finite.
    """

    kernel: Kernel
    dtype: str
    flops_per_second: tuple[float, ...]

    def __post_init__(self) -> None:
        if self.kernel not in get_args(Kernel):
            raise ValueError(f"Rates.kernel: expected one of {get_args(Kernel)}, got {self.kernel!r}.")
        rates = tuple(self.flops_per_second)
        if len(rates) != len(SIDES) or not all(_positive(rate) for rate in rates):
            raise ValueError(
                f"Rates.flops_per_second: expected {len(SIDES)} positive FLOP/s, one for every side of {SIDES}, "
                f"got {self.flops_per_second!r}."
            )
        object.__setattr__(self, "flops_per_second", tuple(map(float, rates)))

    def at(self, side: int) -> float:
        """FLOP/s at a side: linear between the sides of ``SIDES`` on a log scale, constant outside them."""
        position = min(max(math.log2(max(side, 1) / SIDES[0]), 0.0), len(SIDES) - 1.0)
        low = min(int(position), len(SIDES) - 2)
        left, right = self.flops_per_second[low : low + 2]
        return left + (right - left) * (position - low)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One device as the planner sees it.

    Args:
        name: A name for people.
        device: Device type that the figures are about: ``"cpu"``, ``"cuda"`` or ``"npu"``.
        gemm: Rates by kernel and dtype; at least one of ``"graph"``.
        bytes_per_second: Memory bandwidth, read and written bytes together.
        cache_bytes: What stays near the arithmetic between two operators; beyond it, memory is paid for.
        op_seconds: Host's time for one operator of the graph.
        native: This library's CPU kernel works here.
        symmetric: Products known to be symmetric have an operator of their own here.
        network: What joins it to its likes; None: nothing is known of it.

    Raises:
        ValueError: A figure is not positive, or rates are missing or twice there.
    """

    name: str
    device: Device
    gemm: tuple[Rates, ...]
    bytes_per_second: float
    cache_bytes: int
    op_seconds: float
    native: bool = False
    symmetric: bool = False
    network: Network | None = None

    def __post_init__(self) -> None:
        if self.device not in get_args(Device):
            raise ValueError(f"Hardware.device: expected one of {get_args(Device)}, got {self.device!r}.")
        for name in ("bytes_per_second", "cache_bytes", "op_seconds"):
            if not _positive(getattr(self, name)):
                raise ValueError(f"Hardware.{name}: expected a positive finite number, got {getattr(self, name)!r}.")
        keys = [(rates.kernel, rates.dtype) for rates in self.gemm]
        if "graph" not in dict(keys) or len(set(keys)) != len(keys):
            raise ValueError(
                f"Hardware.gemm: expected Rates for kernel 'graph', and one for each kernel and dtype, got {keys}."
            )
        if self.native and (self.device != "cpu" or "native" not in dict(keys)):
            raise ValueError(
                "Hardware.native: expected native=False, or device='cpu' and Rates for kernel 'native', "
                f"got device={self.device!r} and {keys}."
            )

    def find(self, kernel: str, dtype: str) -> Rates | None:
        """The rates of a kernel in a dtype, None where there are no figures."""
        return next((r for r in self.gemm if (r.kernel, r.dtype) == (kernel, dtype)), None)

    def rate(self, kernel: str, dtype: str, side: int) -> float:
        """FLOP/s of batched products of a side, in the nearest figures there are.

        A kernel without figures counts as ``"graph"``, float64 without them as half of float32, any other dtype as the
        first one of ``gemm``.
        """
        found = self.find(kernel, dtype) or self.find("graph", dtype)
        if found is None and dtype == "float64":
            return self.rate(kernel, "float32", side) / 2
        return (found or next(r for r in self.gemm if r.kernel == "graph")).at(side)

    def to_json(self) -> str:
        """The figures as JSON text, readable by ``Hardware.from_json``."""
        return json.dumps({"version": HARDWARE_VERSION} | cattrs.unstructure(self), indent=1)

    @staticmethod
    def from_json(text: str) -> Hardware:
        """Read figures back.

        Raises:
            ValueError: The text is no Hardware, or one of another version.
        """
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"Hardware.from_json: expected JSON from Hardware.to_json, got unreadable text: {error}."
            ) from error
        version = data.pop("version", None) if isinstance(data, dict) else None
        if version != HARDWARE_VERSION:
            raise ValueError(
                f"Hardware.from_json: expected version {HARDWARE_VERSION}, got {version!r}; measure it again."
            )
        return _structured(data, "Hardware.from_json: expected figures from Hardware.to_json")

    @staticmethod
    def from_toml(text: str) -> Hardware:
        """Read figures that a person wrote down: the fields of ``Hardware`` as TOML (docs/hardware-example.toml).

        Raises:
            ValueError: No TOML, a field that is missing or unknown, or a figure that cannot be; it names the field.
            ModuleNotFoundError: Python 3.10 without ``tomli``.
        """
        # The standard library reads TOML from Python 3.11 on, with what was tomli before.
        toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
        try:
            data = toml.loads(text)
        except toml.TOMLDecodeError as error:
            raise ValueError(f"Hardware.from_toml: expected TOML, got unreadable text: {error}.") from error
        return _structured(data, "Hardware.from_toml: expected the fields of Hardware")

    @staticmethod
    def preset(name: str) -> Hardware:
        """Figures for a machine that is not at hand.

        Raises:
            ValueError: Unknown name; the message lists the presets.
        """
        if name not in PRESETS:
            raise ValueError(f"Hardware.preset: expected one of {', '.join(map(repr, PRESETS))}, got {name!r}.")
        return PRESETS[name]


def _structured(data: Any, expected: str) -> Hardware:
    try:
        return _CONVERTER.structure(data, Hardware)
    except (cattrs.BaseValidationError, KeyError, TypeError) as error:
        lines = "; ".join(cattrs.transform_error(error, format_exception=_in_words))
        raise ValueError(f"{expected}, got: {lines}.") from error


def _in_words(error: BaseException, kind: type | None) -> str:
    return str(error) if isinstance(error, ValueError) else cattrs.v.format_exception(error, kind)


def _positive(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


def default_hardware(device: str) -> Hardware:
    """The preset that stands for a device nobody gave figures for: equal on any machine.

    Args:
        device: Such as ``"cpu"`` or ``"cuda:0"``; a device type without a preset counts as a CPU.
    """
    names = {"cuda": "h100", "npu": "ascend-910b"}
    return PRESETS[names.get(device.split(":")[0], "cpu-2core")]


def network_of(hardware: Hardware) -> Network:
    """Its network, or where it has none that of the preset of its device type."""
    network = hardware.network or default_hardware(hardware.device).network
    assert network is not None
    return network


def _rates(kernel: Kernel, **by_dtype: tuple[float, ...]) -> tuple[Rates, ...]:
    return tuple(
        Rates(kernel=kernel, dtype=dtype, flops_per_second=tuple(rate * 1e9 for rate in rates))
        for dtype, rates in by_dtype.items()
    )


def _accelerator(
    name: str, device: Device, *, half: float, single: float, bandwidth: float, cache: int, tile: int
) -> Hardware:
    """An accelerator from its data sheet: peak FLOP/s in half and single precision, bytes/s, bytes of last-level cache.

    A product smaller than the matrix unit's ``tile`` rows still takes the time of a whole tile. Peaks are not reached,
    so predicted times are lower bounds; a choice needs only their ratios.
    """
    narrow = tuple(half * min(1.0, side / tile) / 1e9 for side in SIDES)
    wide = (single / 1e9,) * len(SIDES)
    return Hardware(
        name=name,
        device=device,
        gemm=_rates("graph", bfloat16=narrow, float16=narrow, float32=wide),
        bytes_per_second=bandwidth,
        cache_bytes=cache,
        # A short kernel replayed from a CUDA graph takes 3.4 us from start to start ("Getting Started with CUDA
        # Graphs", NVIDIA technical blog, 2019). NPUs: assumed alike.
        op_seconds=3e-6,
        network=NETWORKS[name],
    )


# Two cores of a server CPU with AVX512-BF16, measured on torch 2.13: bmm at 380 GFLOP/s in bfloat16 and 128 in float32
# on large sides; copies through memory at 20 GB/s; 2 us for an operator called from Python; 2 MiB of L2 for each core.
_CPU = _rates("graph", bfloat16=(60, 150, 250, 330, 370, 380), float32=(60, 85, 105, 115, 125, 128))
_CPU_2CORE = Hardware(
    name="cpu-2core",
    device="cpu",
    gemm=_CPU,
    bytes_per_second=20e9,
    cache_bytes=4 * 2**20,
    op_seconds=2e-6,
    network=NETWORKS["cpu-2core"],
)
# The same with this library's kernel, at bmm's rates on large sides and without bmm's overhead on small ones.
_CPU_2CORE_NATIVE = Hardware(
    name="cpu-2core-native",
    device="cpu",
    gemm=_CPU + _rates("native", bfloat16=(150, 250, 330, 370, 380, 380)),
    bytes_per_second=20e9,
    cache_bytes=4 * 2**20,
    op_seconds=2e-6,
    native=True,
    network=NETWORKS["cpu-2core-native"],
)

PRESETS = {
    hardware.name: hardware
    for hardware in (
        _CPU_2CORE,
        _CPU_2CORE_NATIVE,
        # NVIDIA H100 and H200 data sheets, SXM: 989 TFLOP/s bf16 without sparsity, 67 TFLOP/s float32, 3.35 and 4.8
        # TB/s; H100 white paper: 50 MB of L2. wgmma multiplies 64 rows at least (PTX ISA, wgmma.mma_async).
        _accelerator("h100", "cuda", half=989e12, single=67e12, bandwidth=3.35e12, cache=50 * 10**6, tile=64),
        _accelerator("h200", "cuda", half=989e12, single=67e12, bandwidth=4.8e12, cache=50 * 10**6, tile=64),
        # One die, which is one NPU to PyTorch, of the 910C package: half of 752 TFLOP/s bf16 and of 3.2 TB/s
        # (Zuo et al. 2025, CloudMatrix384, arXiv 2506.12708). A 910B's figures are not public: sources name 256 to 376
        # TFLOP/s, most 320, so all of its are assumed, and so are float32 at a quarter of the peak and 96 MB of cache.
        # The cube unit multiplies 16 x 16 x 16 (Liao et al. 2021, Ascend, HPCA).
        _accelerator("ascend-910b", "npu", half=320e12, single=80e12, bandwidth=1.6e12, cache=96 * 10**6, tile=16),
        _accelerator("ascend-910c", "npu", half=376e12, single=94e12, bandwidth=1.6e12, cache=96 * 10**6, tile=16),
    )
}

_CONVERTER = cattrs.Converter(forbid_extra_keys=True)


def _keep(value: Any, kind: type) -> Any:
    """A value of a plain type as it is: cattrs would convert, and so read ``"false"`` as True and 8.5 as 8."""
    kinds = (int, float) if kind is float else kind
    if not isinstance(value, kinds) or isinstance(value, bool) is not (kind is bool):
        raise ValueError(f"expected {kind.__name__}, got {value!r}")
    return kind(value)


for _kind in (bool, int, float, str):
    _CONVERTER.register_structure_hook(_kind, _keep)
