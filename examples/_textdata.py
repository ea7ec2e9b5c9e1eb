"""Real text that any machine has: the Python sources of the standard library that runs this file."""

from __future__ import annotations

import dataclasses
import sysconfig
import zlib
from pathlib import Path

import torch
from torch import Tensor

# Not prose-like code (tables, build records), not part of the library proper, or absent on some systems.
SKIPPED_FOLDERS = frozenset(
    {"__pycache__", "dist-packages", "encodings", "idlelib", "lib2to3", "pydoc_data", "site-packages", "test"}
)
SKIPPED_PREFIX = "_sysconfigdata"
HELD_OUT_ONE_IN = 10


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """Bytes to train on and bytes of other files to validate on: 1-D uint8 tensors."""

    train: Tensor
    validation: Tensor
    num_train_files: int
    num_validation_files: int

    def describe(self) -> str:
        """One line: how many files and megabytes are on either side."""
        return (
            f"{self.num_train_files} files, {self.train.numel() / 1e6:.1f} MB to train on; "
            f"{self.num_validation_files} other files, {self.validation.numel() / 1e6:.1f} MB held out"
        )


def standard_library_text(folder: Path | None = None) -> Text:
    """Read the library's modules in a fixed order and hold out one file in ten.

    A file is held out by a checksum of its name, so a file stays on its side when others come or go.

    Raises: ValueError if `folder` has no Python sources (an embedded Python may keep them in a zip).
    """
    folder = Path(sysconfig.get_path("stdlib")) if folder is None else folder
    files = [
        path
        for path in (*folder.glob("*.py"), *folder.glob("*/*.py"))
        if path.parent.name not in SKIPPED_FOLDERS and not path.name.startswith(SKIPPED_PREFIX)
    ]
    sides: dict[bool, list[bytes]] = {False: [], True: []}
    for name, path in sorted((path.relative_to(folder).as_posix(), path) for path in files):
        sides[zlib.crc32(name.encode()) % HELD_OUT_ONE_IN == 0].append(path.read_bytes())
    if not sides[False] or not sides[True]:
        raise ValueError(f"folder: expected the standard library's .py files, got {len(files)} of them in {folder}")
    return Text(
        train=_as_tensor(sides[False]),
        validation=_as_tensor(sides[True]),
        num_train_files=len(sides[False]),
        num_validation_files=len(sides[True]),
    )


def random_windows(data: Tensor, *, num: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw `num` windows: inputs and next bytes, both `[num, length]` int64."""
    starts = torch.randint(data.numel() - length, (num, 1), generator=generator)
    windows = data[starts + torch.arange(length + 1)].long()
    return windows[:, :-1], windows[:, 1:]


def _as_tensor(parts: list[bytes]) -> Tensor:
    return torch.frombuffer(bytearray(b"\n".join(parts)), dtype=torch.uint8)
