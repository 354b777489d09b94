"""The compiled simulator of one engine, called through ctypes.

The structures mirror ``csrc/engine.c``, which documents every field. The first use compiles it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_double, c_int32, c_int64
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from llmpq.errors import CapacityError, SolverError
from llmpq.native_build import NotCompiledError, library_path

FLAGS = ("-std=c11", "-O3", "-ffp-contract=off", "-fPIC", "-shared")
ABI = 1
POINTS = 512
"""Points of a curve at most."""
DONE, NO_MEMORY, TOO_LONG = range(3)

Array = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
_Doubles, _Longs = POINTER(c_double), POINTER(c_int64)


@dataclass(frozen=True, kw_only=True, eq=False)
class EngineModel:
    """Limits and seconds of one engine.

    Attributes:
        mixed: steps mix decode tokens and chunks of prompts, up to the budget (ours, vLLM 1);
            otherwise waiting prompts are prefilled first, padded to the longest (vLLM 0.2-0.4).
        max_sequences: running sequences.
        token_budget: tokens of a mixed step, or padded tokens of a prefill iteration.
        num_blocks: KV blocks of ``block_size`` tokens.
        watermark_blocks: blocks that an admission leaves free while sequences run.
        prefill: weights of 1 and ``B s`` by batch [max_sequences + 1, 2].
        decode: weights of 1, ``S`` and ``B s`` by batch [max_sequences + 1, 3].
        packed: seconds of a mixed step of so many tokens [token_budget + 1], empty if not mixed.
        attention: seconds of a chunk ``[f, f + k)`` of a prompt, over ``(f + k)^2 - f^2``.
        flops_token: operations of one token without attention.
        flops_key: operations of attention of one token to one key.
    """

    mixed: bool
    max_sequences: int
    token_budget: int
    num_blocks: int
    block_size: int
    watermark_blocks: int
    prefill: Array
    decode: Array
    packed: Array
    attention: float
    flops_token: float
    flops_key: float

    @property
    def max_tokens(self) -> int:
        """Longest sequence that the blocks hold."""
        return self.num_blocks * self.block_size

    @cached_property
    def structure(self) -> _Engine:
        """The law as the core reads it; the law must outlive it."""
        found = _Engine()
        for name in ("prefill", "decode", "packed"):
            array = np.ascontiguousarray(getattr(self, name), np.float64)
            self._held.append(array)
            setattr(found, name, array.ctypes.data_as(_Doubles))
        for name in (
            "mixed", "max_sequences", "token_budget", "num_blocks", "block_size",
            "watermark_blocks", "attention", "flops_token", "flops_key",
        ):  # fmt: skip
            setattr(found, name, getattr(self, name))
        return found

    @cached_property
    def _held(self) -> list[Array]:
        return []


@dataclass(frozen=True, kw_only=True, eq=False)
class EngineRun:
    """What became of the requests of one engine.

    Attributes:
        finish_s: when each was finished [n]; infinite if not.
        made: tokens that each generated [n].
        curve: time, useful operations and seconds of computing so far, rising [points, 3].
        iterations: prefill, decode or mixed ones.
        preemptions: sequences that gave their blocks back.
    """

    finish_s: Array
    made: Ints
    curve: Array
    iterations: int
    preemptions: int


class _Engine(Structure):
    _fields_ = (
        ("mixed", c_int32),
        ("max_sequences", c_int32),
        *((name, c_int64) for name in ("token_budget", "num_blocks", "block_size")),
        ("watermark_blocks", c_int64),
        *((name, _Doubles) for name in ("prefill", "decode", "packed")),
        *((name, c_double) for name in ("attention", "flops_token", "flops_key")),
    )


class _Requests(Structure):
    _fields_ = (
        ("count", c_int64),
        ("order_count", c_int64),
        ("order", _Longs),
        ("ready", _Doubles),
        *((name, _Longs) for name in ("prompt", "answer", "next")),
        ("work", _Doubles),
        ("start_s", c_double),
        ("end_s", c_double),
        ("finish", _Doubles),
        ("made", _Longs),
        ("curve", _Doubles),
        *((name, c_int64) for name in ("points", "iterations", "preemptions")),
    )


def play(  # noqa: PLR0913  the columns of the requests
    law: EngineModel,
    *,
    ready_s: Array,
    prompt: Ints,
    answer: Ints,
    following: Ints,
    work: Array,
    start_s: float = 0.0,
    end_s: float = np.inf,
) -> EngineRun:
    """Simulate one engine.

    Args:
        law: its limits and seconds.
        ready_s: when each request becomes ready [n]; infinite for those that follow another one,
            and for those that never do.
        prompt: tokens to prefill [n], with those that an earlier process generated.
        answer: tokens to generate [n].
        following: request that becomes ready when this one finishes [n], -1 for none.
        work: operations that the first prefill of each request counts [n].
        start_s: when the engine is ready.
        end_s: no iteration begins then or later.

    Raises:
        CapacityError: a request is longer than all blocks.
        SolverError: the core could not be compiled, or found no memory.
    """
    count = len(prompt)
    finish = np.full(count, np.inf)
    made = np.zeros(count, np.int64)
    curve = np.zeros((POINTS, 3))
    order = np.argsort(ready_s, kind="stable")
    order = order[: int(np.isfinite(ready_s).sum())]
    held: Sequence[tuple[str, Array | Ints, type]] = (
        ("order", np.ascontiguousarray(order, np.int64), _Longs),
        ("ready", np.ascontiguousarray(ready_s, np.float64), _Doubles),
        ("prompt", np.ascontiguousarray(prompt, np.int64), _Longs),
        ("answer", np.ascontiguousarray(answer, np.int64), _Longs),
        ("next", np.ascontiguousarray(following, np.int64), _Longs),
        ("work", np.ascontiguousarray(work, np.float64), _Doubles),
        ("finish", finish, _Doubles),
        ("made", made, _Longs),
        ("curve", curve, _Doubles),
    )
    requests = _Requests(count=count, order_count=len(order), start_s=start_s, end_s=end_s)
    for name, array, kind in held:
        setattr(requests, name, array.ctypes.data_as(kind))
    status = library().engine_play(law.structure, requests)
    if status == TOO_LONG:
        raise CapacityError(
            f"engine: found a request of {int((prompt + answer).max())} tokens, expected at most "
            f"{law.max_tokens}, which its memory holds"
        )
    if status != DONE:
        raise SolverError("engine: found no memory for the simulation")
    return EngineRun(
        finish_s=finish,
        made=made,
        curve=curve[: requests.points].copy(),
        iterations=requests.iterations,
        preemptions=requests.preemptions,
    )


@cache
def library() -> ctypes.CDLL:
    """Load the compiled core, compiling it when needed.

    Raises:
        SolverError: there is none, and it cannot be compiled or stored.
    """
    try:
        path = library_path(Path(__file__).parent, "engine", FLAGS, "_engine*.so")
    except NotCompiledError as error:
        raise SolverError(f"the simulator of applications: {error}") from error
    loaded = ctypes.CDLL(str(path))
    if loaded.engine_abi() != ABI:
        raise SolverError(
            f"{path}: found version {loaded.engine_abi()} of the core, expected {ABI}"
        )
    loaded.engine_play.argtypes = (POINTER(_Engine), POINTER(_Requests))
    loaded.engine_play.restype = c_int32
    return loaded
