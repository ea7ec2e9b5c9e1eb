"""Options of ``torchair.CompilerConfig``: this library's own, and which of the user's would break a promise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from muon_compile.lower.compiled import CompileError

# Laid under the user's options. StableRDFS keeps the order of independent nodes, collectives among them, as traced;
# graphs captured by npugraph_ex keep it anyway, and know no such option.
_DEFAULTS: Mapping[str, Any] = {"experimental_config.keep_inference_input_mutations": True}
# The optimization of views goes by a tensor's strides, which GE has not: of ``(x.mT * 2).mT.reshape(-1)`` it drops a
# transposition that GE needs, and gives wrong numbers without a word (seen with the wheels of torch_npu 2.12 and 2.13).
_GE_DEFAULTS: Mapping[str, Any] = {
    "experimental_config.topology_sorting_strategy": "StableRDFS",
    "experimental_config.enable_view_optimize": False,
}

# Options that would take a promise away, and why.
_REFUSED: Mapping[str, tuple[tuple[object, ...], str]] = {
    "experimental_config.keep_inference_input_mutations": (
        (True,),
        "the step writes parameters and state in the graph; copied behind it they would be written once more",
    ),
    "experimental_config.topology_sorting_strategy": (
        ("StableRDFS",),
        "other orders may differ from rank to rank, and ranks that start collectives in another order wait for ever",
    ),
    "experimental_config.enable_view_optimize": (
        (False,),
        "where a transposed tensor is reshaped it gives wrong numbers without a word",
    ),
    "experimental_config.aot_config_enable_joint_graph": ((False,), "a step has no backward"),
    "debug.run_eagerly": ((False,), "it runs the graph operator by operator; backend='aot_eager' says so"),
    "debug.data_dump.type": ((None,), "it runs the graph operator by operator instead of compiling it"),
    "debug.fx_summary.type": ((None,), "it skips compiling; step.dump() writes a table of operators"),
}
# GE is initialized once in a process, with these.
ONCE = (
    "ge_config.enable_single_stream",
    "ge_config.oo_level",
    "ge_config.oo_constant_folding",
    "ge_config.oo_dead_code_elimination",
    "ge_config.export_compile_stat",
    "ge_config.aicore_num",
    "ge_config.optimization_switch",
    "experimental_config.cc_parallel_enable",
)
# TorchAir of torch_npu 2.10.0 cannot lower the bit views of the Gram forms; its post releases have a newer one.
VERSIONS = "torch_npu 2.11 to 2.14, of the same release as torch, and the CANN that its release notes name"


def compiler_config(config: Any, options: Mapping[str, Any]) -> Any:
    """Give a new ``torchair.CompilerConfig`` this library's options, and the user's over them.

    Raises:
        CompileError: No such option, no such value, or one that would take a promise away; says why.
    """
    mode = options.get("mode", "max-autotune")
    merged = {"mode": mode, **_DEFAULTS, **(_GE_DEFAULTS if mode == "max-autotune" else {}), **options}
    for name, value in merged.items():
        allowed, reason = _REFUSED.get(name, ((), ""))
        if allowed and value not in allowed:
            raise CompileError(
                f"torchair_options: {name}: expected {' or '.join(map(repr, allowed))}, got {value!r}: {reason}."
            )
        _set_option(config, name, value)
    return config


def _set_option(config: Any, name: str, value: object) -> None:
    *path, last = name.split(".")
    at, known = config, "CompilerConfig"
    for part in [*path, last]:
        names = sorted(key for key in vars(at) if not key.startswith("_")) + (["path"] if part == "path" else [])
        if part not in names:
            raise CompileError(f"torchair_options: {name}: {known} has no option {part!r}; it has {', '.join(names)}.")
        if part is not last:
            at, known = getattr(at, part), f"{known}.{part}"
    if not hasattr(at, last):
        raise CompileError(f"torchair_options: {name}: {known} has no option {last!r}.")
    try:
        setattr(at, last, value)
    except Exception as error:
        raise CompileError(f"torchair_options: {name}: {str(error).strip().splitlines()[0]}") from error
