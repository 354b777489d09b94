"""Options of the engine that answers requests as they arrive."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from llmpq.batching.queue_order import ALPHA, QUEUE_ORDERS
from llmpq.batching.speculation import SpeculativeConfig, as_speculative_config
from llmpq.errors import SpecError
from llmpq.options.declare import Option, check_options
from llmpq.options.run import absolute_path
from llmpq.spec.runtime_constants import KV_BLOCK_SIZE, PROMPT_CHUNK_TOKENS
from llmpq.units import GIB

MAX_SEQUENCES = 256
"""Most running sequences where no other number is given, as in vLLM."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationOptions:
    """Draft tokens that every engine may verify."""

    speculative_config: Annotated[
        SpeculativeConfig | None,
        Option(
            metavar="JSON",
            accept=as_speculative_config,
            help="verify draft tokens, in vLLM's notation: "
            '\'{"method": "ngram", "num_speculative_tokens": 5}\' proposes tokens that followed '
            "the last ones before; prompt_lookup_max and prompt_lookup_min are the most and fewest "
            "last tokens looked up (default 4 and 2); method draft_model proposes those of a small "
            "model with the same vocabulary: model is its directory, bits those of its layers "
            "(default: as stored); method mtp proposes those of the model's own layer for "
            "multi-token prediction, at bits (default: those of the last layer); by default the "
            "strategy's draft model, if it has one",
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions(SpeculationOptions):
    """Options of an engine that serves requests as they arrive; ``None`` is the plan's own.

    Raises:
        SpecError: a value cannot be used.
    """

    scheduler: Annotated[
        str,
        Option(
            choices=QUEUE_ORDERS,
            help="order in which waiting requests are admitted (default %(default)s)",
        ),
    ] = "fcfs"
    alpha: Annotated[
        float | None,
        Option(
            help="scheduler larry: weight of waiting, in mean prefill times of a prompt (default "
            f"{ALPHA:g}; 0 is shortest prompt first, above 1000 fcfs)",
        ),
    ] = None
    predictor: Annotated[
        Path | None,
        Option(
            accept=absolute_path,
            metavar="FILE.json",
            help="scheduler trail: predicts the lengths of answers, as llmpq-profile lengths wrote "
            "it",
        ),
    ] = None
    token_budget: Annotated[
        int | None,
        Option(
            minimum=1,
            metavar="N",
            help=f"most tokens of a step (default: {PROMPT_CHUNK_TOKENS}, or fewer where the plan "
            "has less memory)",
        ),
    ] = None
    max_sequences: Annotated[
        int | None,
        Option(
            minimum=1,
            metavar="N",
            help=f"most sequences that run at a time (default: {MAX_SEQUENCES}, or fewer "
            "where there are fewer KV blocks)",
        ),
    ] = None
    num_blocks: Annotated[
        int | None,
        Option(
            minimum=1,
            metavar="N",
            help=f"KV blocks of {KV_BLOCK_SIZE} tokens (default: those that the plan has memory "
            "for)",
        ),
    ] = None
    max_model_len: Annotated[
        int | None,
        Option(
            minimum=2,
            metavar="N",
            help="tokens of the longest request, prompt and answer together, up to what the model, "
            "the KV blocks and the plan's free memory hold (default: the plan's --s + --n)",
        ),
    ] = None
    watermark: Annotated[
        float,
        Option(
            optional=True,
            maximum=1,
            help="share of the KV blocks that an admission leaves free (default %(default)g)",
        ),
    ] = 0.01
    prefix_caching: Annotated[
        bool,
        Option(
            flags=("no_prefix_caching",),
            help="compute every prompt, also where its beginning is in the cache",
        ),
    ] = True
    state_cache_bytes: Annotated[
        int,
        Option(
            flags=("state_cache_size",),
            unit=GIB,
            maximum=2**60,
            metavar="GIB",
            help="memory of all stages together, beyond the plan, for saved states of layers that "
            "have a recurrent one, with which later prompts go on (default %(default)g; with "
            "MODEL, 16 states where there is room)",
        ),
    ] = 0
    kv_offloading_bytes: Annotated[
        int,
        Option(
            flags=("kv_offloading_size",),
            unit=GIB,
            maximum=2**60,
            metavar="GIB",
            help="host memory of all stages together, beyond the plan, for beginnings of prompts "
            "whose KV blocks others take (default %(default)g)",
        ),
    ] = 0
    kv_offloading_folder: Annotated[
        Path | None,
        Option(
            accept=absolute_path,
            metavar="DIR",
            help="write what leaves that memory into files here, which are removed at the end",
        ),
    ] = None
    kv_offloading_disk_bytes: Annotated[
        int,
        Option(
            flags=("kv_offloading_disk_size",),
            unit=GIB,
            maximum=2**60,
            metavar="GIB",
            help="most bytes of these files (default %(default)g)",
        ),
    ] = 32 * GIB

    def __post_init__(self) -> None:
        check_options(self)
        if self.scheduler == "trail" and self.predictor is None:
            raise SpecError("scheduler: found trail without a predictor, expected both")
        if self.scheduler != "trail" and self.predictor is not None:
            raise SpecError(
                f"predictor: found with scheduler {self.scheduler}, expected scheduler trail"
            )
        if self.alpha is not None and self.scheduler != "larry":
            raise SpecError(
                f"alpha: found with scheduler {self.scheduler}, expected scheduler larry"
            )
        for name in ("state_cache_bytes", "kv_offloading_bytes", "kv_offloading_folder"):
            if getattr(self, name) and not self.prefix_caching:
                raise SpecError(f"{name}: found without prefix caching, expected both")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBound:
    """A bound in seconds instead of a token budget."""

    itl_bound: Annotated[
        float | None,
        Option(
            metavar="SECONDS",
            help="bound on the time between tokens, from which --token_budget is computed by the "
            "plan's own cost model",
        ),
    ] = None
