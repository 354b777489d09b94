"""Matrix multiplication by packed low-bit weights, on whatever this machine offers."""

from llmpq.kernels.base import Capability, KernelBackend, PackedWeight, PreparedWeight
from llmpq.kernels.registry import BACKENDS, choose_backend

__all__ = [
    "BACKENDS",
    "Capability",
    "KernelBackend",
    "PackedWeight",
    "PreparedWeight",
    "choose_backend",
]
