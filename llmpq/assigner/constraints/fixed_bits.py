"""Requests whose layers have fixed bits: the stored bits of a model, or those of an average."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from llmpq.assigner.constraints.average import bits_at_average, quantizable_weights
from llmpq.assigner.request import PlanRequest, omega_of
from llmpq.errors import SpecError


def with_stored_bits(request: PlanRequest) -> PlanRequest:
    """Return the request with the stored bits of layers that are quantized already.

    Raises:
        SpecError: the request does not allow these bits.
    """
    widths = [precision.bits for precision in request.model.stored]
    if not widths:
        return request
    bits = tuple(sorted(set(widths), reverse=True))
    if not set(bits) <= set(request.bits):
        raise SpecError(
            f"bits: found {list(request.bits)}, expected {list(bits)} among them: layers of "
            f"{request.model_source} are stored at these bits and can be served at no others"
        )
    request = replace(request, bits=bits)
    return request if len(bits) == 1 else _with_bits(request, widths)


def with_average_bits(request: PlanRequest, average: float) -> PlanRequest:
    """Return the request with the bits that lose least at a mean of ``average`` bits a weight.

    Raises:
        SpecError: the average is not a number above 0.
        InfeasibleError: it is below the fewest bits allowed.
    """
    weights = quantizable_weights(request.model)
    return _with_bits(request, bits_at_average(omega_of(request), request.bits, weights, average))


def _with_bits(request: PlanRequest, widths: Sequence[int]) -> PlanRequest:
    ranges: list[tuple[int, int, int]] = []
    for layer, width in enumerate(widths):
        if ranges and ranges[-1][2] == width:
            ranges[-1] = (ranges[-1][0], layer + 1, width)
        else:
            ranges.append((layer, layer + 1, width))
    return replace(request, overrides=replace(request.overrides, layer_bits=tuple(ranges)))
