"""Plans as plain data: how their configs pass through cattrs."""

from __future__ import annotations

from typing import Any

import cattrs

from muon_compile.config import AdamWConfig, Config, LionConfig, MuonConfig
from muon_compile.spec import CONFIGS


def make_converter() -> cattrs.Converter:
    """A converter of plans, that refuses fields it does not know."""
    converter = cattrs.Converter(forbid_extra_keys=True)

    names = {kind: algorithm for algorithm, kind in CONFIGS.items()}

    # The configs check themselves, so their names, numbers and tuples pass through as they are.
    def unstructure(config: Config | None) -> dict[str, Any] | None:
        if config is None:
            return None
        return {"algorithm": names[type(config)]} | {
            name: getattr(config, name) for name in config.__dataclass_fields__
        }

    def structure(data: dict[str, Any] | None, _: object) -> Config | None:
        if data is None:
            return None
        values = {name: _tuples(value) for name, value in data.items()}
        return CONFIGS[values.pop("algorithm")](**values)

    for kind in (MuonConfig, AdamWConfig, LionConfig, Config, Config | None):
        converter.register_unstructure_hook(kind, unstructure)
        converter.register_structure_hook(kind, structure)
    return converter


def _tuples(value: Any) -> Any:
    return tuple(_tuples(v) for v in value) if isinstance(value, (list, tuple)) else value
