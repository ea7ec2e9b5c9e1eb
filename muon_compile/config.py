"""Frozen configuration: everything here shapes the graph, so a change of it means a new plan.

What changes from step to step (lr, weight decay, momentum, betas) is never here: it is a tensor input of the graph.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

Preset = Literal["torch", "keller", "moonlight", "dion", "hyperparallel"]
MomentumForm = Literal["ema", "sum", "ema_added"]
EpsMode = Literal["clamp", "add"]
Scale = Literal["original", "match_rms_adamw", "spectral_norm", "rms_norm", "none"]
DTypeName = Literal["bfloat16", "float16", "float32", "float64"]
ProductDTypeName = Literal["auto", "bfloat16", "float16", "float32", "float64"]
CoefficientName = Literal["jordan", "you", "polar_express", "cans"]
Triple = tuple[float, float, float]

# Keller Jordan, "Muon: an optimizer for hidden layers in neural networks" (2024). Every step the same; the singular
# values of the result lie in about [0.68, 1.13].
JORDAN: Triple = (3.4445, -4.7750, 2.0315)

# You Jiacheng, x.com/YouJiacheng/status/1905861218138804534 (2025). Made for exactly five steps.
YOU: tuple[Triple, ...] = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)

# Sources: torch.optim.Muon (torch 2.13); KellerJordan/Muon; MoonshotAI/Moonlight; microsoft/dion; HyperParallel.
PRESETS: dict[str, dict[str, Any]] = {
    "torch": {
        "momentum_form": "ema",
        "nesterov": True,
        "coefficients": "jordan",
        "eps": 1e-7,
        "eps_mode": "clamp",
        "scale": "original",
    },
    "keller": {
        "momentum_form": "ema",
        "nesterov": True,
        "coefficients": "jordan",
        "eps": 1e-7,
        "eps_mode": "add",
        "scale": "original",
    },
    "moonlight": {
        "momentum_form": "sum",
        "nesterov": True,
        "coefficients": "jordan",
        "eps": 1e-7,
        "eps_mode": "add",
        "scale": "match_rms_adamw",
    },
    "dion": {
        "momentum_form": "sum",
        "nesterov": False,
        "coefficients": "you",
        "eps": 1e-7,
        "eps_mode": "add",
        "scale": "spectral_norm",
    },
    "hyperparallel": {
        "momentum_form": "sum",
        "nesterov": True,
        "coefficients": "you",
        "eps": 1e-7,
        "eps_mode": "add",
        "scale": "match_rms_adamw",
    },
}


def _expect(owner: str, name: str, got: object, expected: str, ok: bool) -> None:
    if not ok:
        raise ValueError(f"{owner}.{name}: expected {expected}, got {got!r}.")


def _choice(owner: str, name: str, got: object, choices: Iterable[object]) -> None:
    options = tuple(choices)
    _expect(owner, name, got, "one of " + ", ".join(map(repr, options)), got in options)


def _flag(owner: str, name: str, got: object) -> None:
    _expect(owner, name, got, "True or False", isinstance(got, bool))


def _is_positive_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_finite(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class MuonConfig:
    """The mathematics of one Muon parameter group. Fields left at ``None`` take the preset's value.

    Args:
        preset: Whose Muon to reproduce; sets the defaults of the other fields.
        momentum_form: ``"ema"`` ``M <- M + (1 - mu)(G - M)`` or ``"sum"`` ``M <- mu M + G``; ``"ema_added"`` keeps
            the first and takes ``G + M`` as its Nesterov direction (heavyball).
        momentum_dtype: dtype that momentum is stored in; ``None`` stores it in the gradient's dtype.
        nesterov: Use the Nesterov direction instead of the momentum itself.
        ns_steps: Newton-Schulz iterations, 1 to 99.
        coefficients: A named table (sources: ``build.coefficients``), one ``(a, b, c)`` for every step, or one triple
            per step; the numbers of a named table are that table.
        ns_dtype: dtype of the Newton-Schulz products; ``"auto"`` lets the planner take the one that the device is
            fastest with. float16 is refused on CPUs, where it is emulated.
        eps: Guard of the normalization, or ``"relative"`` for scale invariance (divide by the largest entry first).
        eps_mode: ``"clamp"`` divides by ``max(norm, eps)``, ``"add"`` by ``norm + eps``.
        scale: Factor on lr from a matrix's shape ``m x n``, or a number.
        rms: Root mean square that ``"match_rms_adamw"`` and ``"rms_norm"`` scale updates to.
        split_sizes: Row counts of the blocks of a fused weight; each block is a matrix of its own.
        num_heads: Number of equal row blocks (heads) of the weight; each is a matrix of its own.
        flatten: Read ``[o, i, ...]`` as one ``o x (i ...)`` matrix. ``None`` does so for 4 or more dims; a 3-D
            parameter is otherwise a stack of matrices (experts).

    Raises:
        ValueError: A field has a value outside its range; the message names field, expected and got.
    """

    preset: Preset = "torch"
    momentum_form: MomentumForm | None = None
    momentum_dtype: DTypeName | None = None
    nesterov: bool | None = None
    ns_steps: int = 5
    coefficients: CoefficientName | Triple | tuple[Triple, ...] | None = None
    ns_dtype: ProductDTypeName = "bfloat16"
    eps: float | Literal["relative"] | None = None
    eps_mode: EpsMode | None = None
    scale: Scale | float | None = None
    rms: float = 0.2
    split_sizes: tuple[int, ...] | None = None
    num_heads: int | None = None
    flatten: bool | None = None

    def __post_init__(self) -> None:
        me = "MuonConfig"
        _choice(me, "preset", self.preset, PRESETS)
        for name, value in PRESETS[self.preset].items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        _choice(me, "momentum_form", self.momentum_form, get_args(MomentumForm))
        _choice(me, "momentum_dtype", self.momentum_dtype, (None, *get_args(DTypeName)))
        _flag(me, "nesterov", self.nesterov)
        _expect(
            me,
            "ns_steps",
            self.ns_steps,
            "an int from 1 to 99",
            _is_positive_int(self.ns_steps) and self.ns_steps < 100,
        )
        _choice(me, "ns_dtype", self.ns_dtype, get_args(ProductDTypeName))
        _choice(me, "eps_mode", self.eps_mode, get_args(EpsMode))
        if isinstance(self.scale, str):
            _choice(me, "scale", self.scale, get_args(Scale))
        else:
            ok = _is_finite(self.scale) and float(self.scale or 0.0) >= 0.0
            _expect(me, "scale", self.scale, f"one of {get_args(Scale)}, or a finite number >= 0", ok)
            object.__setattr__(self, "scale", float(self.scale or 0.0))
        _expect(me, "rms", self.rms, "a finite number > 0", _is_finite(self.rms) and self.rms > 0)
        object.__setattr__(self, "rms", float(self.rms))
        if self.eps != "relative":
            ok = _is_finite(self.eps) and float(self.eps or 0.0) >= 0.0
            _expect(me, "eps", self.eps, "a finite number >= 0 or 'relative'", ok)
            object.__setattr__(self, "eps", float(self.eps or 0.0))
        self._check_coefficients(me)
        self._check_blocks(me)

    def _check_coefficients(self, me: str) -> None:
        given = self.coefficients
        if isinstance(given, str):
            _choice(me, "coefficients", given, get_args(CoefficientName))
            if given == "you" and self.ns_steps != 5:
                raise ValueError(
                    f"MuonConfig.ns_steps: coefficients='you' is a table of 5 steps, got ns_steps={self.ns_steps}; "
                    "expected ns_steps=5, or one triple per step."
                )
            return
        what = "a known name, (a, b, c), or one (a, b, c) per step"
        _expect(me, "coefficients", given, what, isinstance(given, (tuple, list)) and len(given) > 0)
        assert given is not None
        one = all(_is_finite(x) for x in given)
        rows: tuple[Any, ...] = (given,) if one else tuple(given)
        for row in rows:
            ok = isinstance(row, (tuple, list)) and len(row) == 3 and all(_is_finite(x) for x in row)
            _expect(me, "coefficients", given, what, ok)
        triples = tuple((float(a), float(b), float(c)) for a, b, c in rows)
        if not one:
            expected = f"{self.ns_steps} triples (ns_steps={self.ns_steps})"
            _expect(me, "coefficients", given, expected, len(triples) == self.ns_steps)
        # A known table by its numbers, as torch.optim.Muon gives it, is that table: its accuracy is known.
        known: CoefficientName | None = "jordan" if set(triples) == {JORDAN} else None
        known = "you" if triples == YOU else known
        object.__setattr__(self, "coefficients", known or (triples[0] if one else triples))

    def _check_blocks(self, me: str) -> None:
        if self.split_sizes is not None:
            ok = isinstance(self.split_sizes, (tuple, list)) and len(self.split_sizes) > 0
            ok = ok and all(_is_positive_int(s) for s in self.split_sizes)
            _expect(me, "split_sizes", self.split_sizes, "a tuple of positive ints", ok)
            object.__setattr__(self, "split_sizes", tuple(self.split_sizes))
        if self.num_heads is not None:
            _expect(me, "num_heads", self.num_heads, "a positive int", _is_positive_int(self.num_heads))
            if self.split_sizes is not None:
                raise ValueError("MuonConfig: expected split_sizes or num_heads, got both; give one of them.")
        if self.flatten is not None:
            _flag(me, "flatten", self.flatten)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamWConfig:
    """The mathematics of one AdamW parameter group (``torch.optim.AdamW``).

    Args:
        eps: Added to the root of the second moment.
        amsgrad: Use the running maximum of the second moment.
        maximize: Step along the gradient instead of against it.
        corrected_eps: ``(sqrt(v) + eps)`` is bias-corrected as a whole, so ``eps`` too (Moonlight), instead of
            ``sqrt(v)`` alone.
        shared_steps: A parameter without a gradient counts the step too, as where a group has one count for all of its
            parameters (HyperParallel).

    Raises:
        ValueError: ``eps`` is negative or not finite.
    """

    eps: float = 1e-8
    amsgrad: bool = False
    maximize: bool = False
    corrected_eps: bool = False
    shared_steps: bool = False

    def __post_init__(self) -> None:
        _expect("AdamWConfig", "eps", self.eps, "a finite number >= 0", _is_finite(self.eps) and self.eps >= 0)
        object.__setattr__(self, "eps", float(self.eps))
        _flag("AdamWConfig", "amsgrad", self.amsgrad)
        _flag("AdamWConfig", "maximize", self.maximize)
        _flag("AdamWConfig", "corrected_eps", self.corrected_eps)
        _flag("AdamWConfig", "shared_steps", self.shared_steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class LionConfig:
    """The mathematics of one Lion parameter group (Chen et al., "Symbolic discovery of optimization algorithms", arXiv
    2302.06675): ``P <- P (1 - lr wd) - lr sign(beta1 M + (1 - beta1) G)``, then ``M <- beta2 M + (1 - beta2) G``."""


Config = MuonConfig | AdamWConfig | LionConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileConfig:
    """What is about compiling, and not about the mathematics.

    Args:
        ns_dtype: dtype of all Newton-Schulz products, or ``"auto"``, over what the groups say; None: as they say.
        exact: Reproduce stock ``torch.optim.Muon`` bit for bit: its operators and roundings, matrix by
            matrix, inside the one call.
        max_temp_bytes: Bound on the temporaries that are alive at once, in bytes: buckets beyond it wait for the next
            wave, a larger one is cut between its matrices. A single matrix is never cut; a warning says so.
        max_gather_bytes: The same bound for what is gathered from other ranks.
        replicas: Ranks that hold copies of a parameter ``"divide"`` the Newton-Schulz work, or ``"repeat"`` it.
        comm_dtype: dtype of momenta and results on the wire; None takes that of the products. Grams go in float32.
        node_size: Consecutive ranks of a shard axis that are a node to ``"hierarchical_all_to_all"``; None: as many as
            leave a rank the fewest peers.
        check: When a disagreement of ranks on which gradients are there is raised: ``"sync"`` in the step itself, or
            ``"async"`` at the beginning of the next one, so that the host need not wait for the device.
        inductor_route: ``"inner"`` hands the traced graph straight to Inductor; ``"standalone"`` goes through the
            documented ``torch._inductor.standalone_compile`` (slower to compile, same step).
        inductor_options: Options of ``torch._inductor.config``, laid over this library's own.
        cuda_graphs: Replay the step as one CUDA graph where all of it is on CUDA.
        torchair_options: Options of ``torchair.CompilerConfig`` by dotted name, laid over this library's own, for
            ``backend="torchair"``: ``{"experimental_config.frozen_parameter": True}``.
        probes: The step also leaves a few sums per bucket on its device, for ``CompiledStep.probes()``: how orthogonal
            the updates are, and how large they, the weights and the momenta. Without it the graph has none of that.
        clip_grad_norm: Scale all gradients of the step so that their norm together is at most this, as
            ``torch.nn.utils.clip_grad_norm_`` does before a step; ``.grad`` itself stays as it is. Where that leaves a
            matrix's momentum under ``eps`` the rank that orthogonalizes it warns, once per bucket. None: leave them.
        nonfinite: What a NaN or an infinity in any gradient does: ``"allow"`` lets it through, as stock does;
            ``"skip"`` leaves everything as it was, on all ranks; ``"raise"`` also says so, at the time of ``check``.
        master_weights: Keep a float32 copy of every bfloat16 or float16 parameter in the state, which the step goes on
            from, so that updates and decays that are too small for the parameter's dtype add up; AdamW's moments of
            such parameters are float32 as well. A parameter that somebody else writes (a checkpoint, an average of
            weights) becomes its copy.
        rounding: ``"nearest"``; or ``"stochastic"``, which rounds bfloat16 parameters up or down with the probability
            of what is cut off, so that small updates hold on average, at no memory.
        keep_memory: On the CPU with glibc, keep freed memory in the process, so that a step's large temporaries are not
            page-faulted anew every time. The setting is process-wide; it is made when a step is wrapped, and logged.

    Raises:
        ValueError: A field has a value outside its range.
    """

    ns_dtype: ProductDTypeName | None = None
    exact: bool = False
    max_temp_bytes: int = 2 * 1024**3
    max_gather_bytes: int = 1024**3
    replicas: Literal["divide", "repeat"] = "divide"
    comm_dtype: Literal["bfloat16", "float16", "float32", "float64"] | None = None
    node_size: int | None = None
    check: Literal["async", "sync"] = "async"
    inductor_route: Literal["inner", "standalone"] = "inner"
    inductor_options: Mapping[str, Any] = field(default_factory=dict)
    cuda_graphs: bool = True
    torchair_options: Mapping[str, Any] = field(default_factory=dict)
    probes: bool = False
    clip_grad_norm: float | None = None
    nonfinite: Literal["allow", "skip", "raise"] = "allow"
    master_weights: bool = False
    rounding: Literal["nearest", "stochastic"] = "nearest"
    keep_memory: bool = True

    def __post_init__(self) -> None:
        me = "CompileConfig"
        _choice(me, "ns_dtype", self.ns_dtype, (None, *get_args(ProductDTypeName)))
        _flag(me, "exact", self.exact)
        _choice(me, "replicas", self.replicas, ("divide", "repeat"))
        _choice(me, "comm_dtype", self.comm_dtype, (None, "bfloat16", "float16", "float32", "float64"))
        ok = self.node_size is None or _is_positive_int(self.node_size)
        _expect(me, "node_size", self.node_size, "a positive number of ranks, or None", ok)
        _choice(me, "check", self.check, ("async", "sync"))
        ok = _is_positive_int(self.max_gather_bytes)
        _expect(me, "max_gather_bytes", self.max_gather_bytes, "a positive number of bytes", ok)
        _choice(me, "inductor_route", self.inductor_route, ("inner", "standalone"))
        _flag(me, "cuda_graphs", self.cuda_graphs)
        _flag(me, "probes", self.probes)
        _flag(me, "keep_memory", self.keep_memory)
        _flag(me, "master_weights", self.master_weights)
        _choice(me, "rounding", self.rounding, ("nearest", "stochastic"))
        for name in ("inductor_options", "torchair_options"):
            value = getattr(self, name)
            _expect(me, name, value, "a mapping", isinstance(value, Mapping))
        ok = self.clip_grad_norm is None or (_is_finite(self.clip_grad_norm) and float(self.clip_grad_norm) > 0)
        _expect(me, "clip_grad_norm", self.clip_grad_norm, "a finite number > 0, or None", ok)
        _choice(me, "nonfinite", self.nonfinite, ("allow", "skip", "raise"))
        ok = _is_positive_int(self.max_temp_bytes)
        _expect(me, "max_temp_bytes", self.max_temp_bytes, "a positive number of bytes", ok)
