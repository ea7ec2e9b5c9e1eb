"""``python -m muon_compile``."""

from __future__ import annotations

import sys

from muon_compile.cli import main

if __name__ == "__main__":
    sys.exit(main())
