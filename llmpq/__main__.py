"""``python -m llmpq VERB``: the command ``llmpq``, where scripts are not in ``PATH``."""

from __future__ import annotations

import sys

from llmpq.cli.front.program import main

if __name__ == "__main__":
    sys.exit(main())
