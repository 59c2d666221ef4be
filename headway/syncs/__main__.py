"""``python -m headway.syncs [options] -- script.py arguments``."""

from __future__ import annotations

import sys

from headway.syncs.cli import main

if __name__ == "__main__":
    sys.exit(main())
