"""Which number format a device computes in, and which kernels it is offered.

A run has one number format; a device that does not compute it runs its stage in the nearest one it
has. Between stages a hidden state travels in the sender's format and is rounded once, on arrival:

- to the same format, and from any format to float32: exact;
- from bfloat16 to float16: exact from 2^-14 to 65504, beyond that an error of the stage; smaller
  numbers within 2^-25;
- to bfloat16: within 2^-8 of the number.
"""

from __future__ import annotations

from llmpq.errors import SpecError
from llmpq.spec.devices.figures import DeviceSpec
from llmpq.spec.precision import Dtype

LEAST_CAPABILITY = {
    "cuda_int4": (8, 0),
    "triton_int": (8, 0),
    "bnb_int8": (7, 5),
    "cuda_int8": (7, 5),
}
"""By kernel, the lowest compute capability of an NVIDIA GPU that its project supports.

Whether Triton runs below its own is tried when a rank starts."""
_KERNELS = {8: ("bnb_int8", "cuda_int8"), 4: ("cuda_int4", "triton_int"), 3: ("triton_int",)}


def compute_format(spec: DeviceSpec, dtype: Dtype, wanted: Dtype | None = None) -> Dtype:
    """Return the format in which a device runs its stage.

    It is ``wanted``, or the run's ``dtype``, where the device computes it. Else it is float16 where
    that is no slower than float32, which takes twice the memory, and float32 otherwise.

    Raises:
        SpecError: the device does not compute ``wanted``, or nothing as precise as float32 for a
            float32 run.
    """
    rates = dict(spec.flops)
    has = ", ".join(spec.formats)
    if wanted is not None and wanted not in rates:
        raise SpecError(
            f"device {spec.type}: field 'dtype': found '{wanted}', expected one of {has}, which it "
            "computes"
        )
    if (form := wanted or dtype) in rates:
        return form
    if dtype == "float32":
        raise SpecError(
            f"device {spec.type}: a float32 run found {has} alone, expected float32; plan with "
            f"--dtype {has.split(', ')[0]}"
        )
    if rates.get("float16", 0.0) >= rates.get("float32", 0.0):
        return "float16" if "float16" in rates else "bfloat16"
    return "float32"


def offered_kernels(spec: DeviceSpec, bits: int, dtype: Dtype) -> tuple[str, ...]:
    """Return the kernels for weights of ``bits`` that a device may run, the preferred one first.

    A GPU of unknown capability is offered those without a condition. Of ``reference``, which runs
    anywhere, every call dequantizes the whole weight.
    """
    if bits == 16:
        return ()
    if spec.kind == "cpu":
        with_int8 = "cpu_llm_int8" if bits == 8 else "cpu_packed_int8"
        return (with_int8, "cpu_packed") if bits == 8 or dtype != "float32" else ("cpu_packed",)
    found = []
    for name in _KERNELS[bits] if spec.kind == "cuda" else ():
        least = LEAST_CAPABILITY[name]
        is_new = spec.compute_capability is not None and spec.compute_capability >= least
        # Triton also drives AMD's GPUs, which have no compute capability.
        is_new = is_new or (name == "triton_int" and spec.compute_capability is None)
        if is_new and not (name == "cuda_int4" and dtype != "bfloat16"):
            found.append(name)
    return (*found, "reference")
