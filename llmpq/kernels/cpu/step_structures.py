"""Structures of the compiled step (``csrc/step.c`` and its headers), for ctypes."""

from __future__ import annotations

from ctypes import Structure, c_float, c_int32, c_int64, c_void_p
from enum import IntEnum, auto

from llmpq.kernels.cpu.native import Norm, Product

MOST_PRODUCTS = 3
"""Most products of one operator."""


class Kind(IntEnum):
    """Kinds of operators, in the order of ``csrc/step.c``."""

    NORM = 0
    ADD = auto()
    ROTATE = auto()
    GATE = auto()
    PREPARE = auto()
    STORE = auto()
    ROUTE = auto()
    COMBINE = auto()
    PRODUCTS = auto()
    ATTEND = auto()
    GATHER = auto()
    ACTIVATE = auto()
    EXPERTS = auto()


class Heads(Structure):
    """Heads of rows, by strides."""

    _fields_ = (("data", c_void_p), *((name, c_int64) for name in ("row", "head")))


class NormRows(Structure):
    """A norm of each head of a row."""

    _fields_ = (
        ("norm", Norm),
        *((name, Heads) for name in ("x", "y")),
        *((name, c_int64) for name in ("heads", "weight_head")),
    )


class AddRows(Structure):
    """A sum of rows, or a product by a factor."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "more")),
        ("columns", c_int64),
        ("factor", c_float),
    )


class RotateRows(Structure):
    """A rotary embedding of heads."""

    _fields_ = (
        ("x", Heads),
        *((name, c_void_p) for name in ("cos", "sin")),
        *((name, c_int64) for name in ("heads", "turned")),
        *((name, c_int32) for name in ("pairs", "table_type")),
    )


class GateRows(Structure):
    """An activation of rows (``csrc/rows.h``)."""

    _fields_ = (
        *((name, c_void_p) for name in ("gate", "up", "y")),
        *((name, c_int64) for name in ("gate_row", "up_row", "columns")),
        *((name, c_float) for name in ("alpha", "limit")),
        ("activation", c_int32),
    )


class Prepared(Structure):
    """What products need of rows (``csrc/step.h``)."""

    _fields_ = (
        ("x", c_void_p),
        *((name, c_int64) for name in ("columns", "block")),
        *((name, c_void_p) for name in ("sums", "codes", "scale", "sum")),
        *((name, c_void_p) for name in ("start", "end", "column", "value", "used")),
        ("threshold", c_float),
        *((name, c_int32) for name in ("type", "bits")),
    )


class PrepareRows(Structure):
    """What products need of rows (``csrc/experts.h``)."""

    _fields_ = (("prepared", Prepared), ("kernel", c_int32))


class Products(Structure):
    """Up to ``MOST_PRODUCTS`` products of the same rows."""

    _fields_ = (
        ("products", Product * MOST_PRODUCTS),
        ("prepared", c_void_p),
        *((name, c_int64) for name in ("count", "few_limit")),
        *((name, c_int32) for name in ("kernel", "out")),
    )


class RouteRows(Structure):
    """The choice of experts for a row (``csrc/experts.h``)."""

    _fields_ = (
        *((name, c_void_p) for name in ("logits", "correction", "chosen", "weight")),
        *((name, c_int64) for name in ("experts", "count")),
        *((name, c_float) for name in ("factor", "jitter")),
        *((name, c_int32) for name in ("score", "normalizes", "type", "rounds")),
    )


class GatherRows(Structure):
    """Copies of rows, one for each of their experts."""

    _fields_ = (
        *((name, c_void_p) for name in ("route", "x", "y")),
        ("columns", c_int64),
        ("prepared", c_void_p),
    )


class ActivateSlots(Structure):
    """An activation of what experts made of rows."""

    _fields_ = (("gate", GateRows), ("prepared", c_void_p))


class ExpertProducts(Structure):
    """Products of rows, each by the weights of its experts."""

    _fields_ = (
        *((name, c_void_p) for name in ("weights", "biases", "x", "y", "prepared")),
        ("few_limit", c_int64),
        *((name, c_int32) for name in ("kernel", "in_float", "gathered")),
    )


class CombineRows(Structure):
    """The sum of what the experts of a row made of it."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "weight", "y", "shared", "shared_gate")),
        *((name, c_int64) for name in ("columns", "count")),
    )


class Operator(Structure):
    """A kind of operator, and the structure with its arguments."""

    _fields_ = (("kind", c_int32), ("what", c_void_p))


class Step(Structure):
    """A call of the compiled step."""

    _fields_ = (
        ("operators", c_void_p),
        *((name, c_int64) for name in ("count", "rows")),
        *((name, c_void_p) for name in ("tables", "starts", "lengths", "chosen", "runs")),
        ("window_tables", c_void_p),
        *((name, c_int64) for name in ("chosen_count", "run_count")),
        *((name, c_int32) for name in ("type", "threads")),
    )
