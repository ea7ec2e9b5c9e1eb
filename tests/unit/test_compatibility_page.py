"""Every row of docs/compatibility.md has its test, and every test of a loop its row."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "compatibility.md").read_text()
ROWS = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith(("| a loop", "| a check"))]
# Files whose every test has a row; of the others some are named.
WHOLE = ("graph/test_compatibility.py", "dist/test_compatible_loops.py")
SOME = (
    "dist/test_moving_checkpoints.py",
    "dist/test_damaged_checkpoints.py",
    "graph/test_foreign_checkpoints.py",
    "graph/test_checkpoints.py",
    "graph/test_inductor_cache.py",
)


def names_in(files: tuple[str, ...]) -> set[str]:
    found: set[str] = set()
    for file in files:
        body = ast.parse((ROOT / "tests" / file).read_text()).body
        found |= {node.name for node in body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}
    return found


def named(row: str) -> list[str]:
    return re.findall(r"`(test_\w+)`", row.rstrip(" |").rpartition("|")[2])


def test_every_row_names_tests_that_there_are() -> None:
    assert len(ROWS) > 30
    known = names_in(WHOLE + SOME)
    for row in ROWS:
        assert row.count("|") == 4, row
        assert named(row), row
        assert set(named(row)) <= known, row


def test_every_test_of_a_loop_has_a_row() -> None:
    assert names_in(WHOLE) <= {name for row in ROWS for name in named(row)}


def test_the_page_is_linked_and_names_its_files() -> None:
    assert "docs/compatibility.md" in (ROOT / "README.md").read_text()
    for path in re.findall(r"`(tests/\S+\.py)`", PAGE):
        assert (ROOT / path).is_file(), path
    for link in re.findall(r"\]\((\S+?)\)", PAGE):
        assert (ROOT / "docs" / link).is_file(), link
