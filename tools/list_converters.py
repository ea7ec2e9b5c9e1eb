"""Write the operators that TorchAir has a working converter for to muon_compile/npu/converters.txt.

    python tools/list_converters.py [--version 2.13.0]

TorchAir registers a converter for nearly every operator, but most only raise; those are left out.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import textwrap
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import torch

from muon_compile.npu import stand_in, wheel

TARGET = Path(__file__).parent.parent / "muon_compile" / "npu" / "converters.txt"


def only_raises(function: Callable[..., object]) -> bool:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, TypeError, SyntaxError):
        return False
    assert isinstance(tree, ast.FunctionDef)
    body = [s for s in tree.body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))]
    return len(body) == 1 and isinstance(body[0], ast.Raise)


def working_converters() -> list[str]:
    """Of the TorchAir that is loaded."""
    torchair = import_module("torchair")
    import_module("torchair._ge_concrete_graph.ge_converter")
    import_module("torchair._ge_concrete_graph.ge_converter.experimental.hcom_reducescatter")
    torchair.get_npu_backend()  # registers those that it imports late
    names = []
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        try:
            operator = getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
        except (AttributeError, RuntimeError):
            continue
        converter = getattr(operator, "_ge_converter", None)
        if converter is None:
            continue
        functions = [v for v in vars(converter).values() if inspect.isfunction(v)]
        if not any(only_raises(function) for function in functions):
            names.append(str(operator))
    return sorted(set(names))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", default="2.13.0", help="of torch_npu (default: 2.13.0)")
    version = parser.parse_args().version
    stand_in.install(wheel.torchair_sources(version, progress=print))
    names = working_converters()
    head = f"# Operators with a working converter in the TorchAir of torch_npu {version}: tools/list_converters.py\n"
    TARGET.write_text(head + "\n".join(names) + "\n", encoding="utf-8")
    print(f"{len(names)} operators written to {TARGET}")


if __name__ == "__main__":
    main()
