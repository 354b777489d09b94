"""Importing this module keeps unused packages out of a worker.

transformers imports SciPy, where it is installed, for losses of object detectors, and scikit-learn
needs it: 36 MB of every worker. Packages that are already loaded stay.
"""

from __future__ import annotations

import sys

UNUSED = ("scipy", "sklearn")

for _name in UNUSED:
    # An import of the name now raises ImportError.
    sys.modules.setdefault(_name, None)  # type: ignore[arg-type]
