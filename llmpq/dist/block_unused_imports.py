"""Importing this module keeps unused packages out of a worker.

transformers imports SciPy, where it is installed, for losses of object detectors, and scikit-learn
needs it: 36 MB of every worker. torch's compiler imports Triton, 80 MB, which only GPUs use.
Packages that are already loaded stay.
"""

from __future__ import annotations

import sys

import torch

UNUSED = ("scipy", "sklearn", *(() if torch.cuda.is_available() else ("triton",)))

for _name in UNUSED:
    # An import of the name now raises ImportError.
    sys.modules.setdefault(_name, None)  # type: ignore[arg-type]
