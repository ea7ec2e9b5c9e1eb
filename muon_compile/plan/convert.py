"""Plans as plain data: how their configs pass through cattrs."""

from __future__ import annotations

from typing import Any

import cattrs

from muon_compile.config import AdamWConfig, MuonConfig


def make_converter() -> cattrs.Converter:
    """A converter of plans, that refuses fields it does not know."""
    converter = cattrs.Converter(forbid_extra_keys=True)

    kinds: dict[str, type[MuonConfig] | type[AdamWConfig]] = {"muon": MuonConfig, "adamw": AdamWConfig}

    # The configs check themselves, so their names, numbers and tuples pass through as they are.
    def unstructure(config: MuonConfig | AdamWConfig | None) -> dict[str, Any] | None:
        if config is None:
            return None
        algorithm = "muon" if isinstance(config, MuonConfig) else "adamw"
        return {"algorithm": algorithm} | {name: getattr(config, name) for name in config.__dataclass_fields__}

    def structure(data: dict[str, Any] | None, _: object) -> MuonConfig | AdamWConfig | None:
        if data is None:
            return None
        values = {name: _tuples(value) for name, value in data.items()}
        return kinds[values.pop("algorithm")](**values)

    for kind in (MuonConfig, AdamWConfig, MuonConfig | AdamWConfig, MuonConfig | AdamWConfig | None):
        converter.register_unstructure_hook(kind, unstructure)
        converter.register_structure_hook(kind, structure)
    return converter


def _tuples(value: Any) -> Any:
    return tuple(_tuples(v) for v in value) if isinstance(value, (list, tuple)) else value
