"""What a worker keeps out of its process: packages that a library would load and nothing here uses.

transformers' losses of object detectors import SciPy wherever it is installed, which took 36 MB of
every worker (395 instead of 359 MB before any weight), and scikit-learn needs it. Neither library
misses them. To import this module first is all there is to do; what is loaded already stays.
"""

from __future__ import annotations

import sys

UNUSED = ("scipy", "sklearn")

for _name in UNUSED:
    # Python's own way to say that a package is not there.
    sys.modules.setdefault(_name, None)  # type: ignore[arg-type]
