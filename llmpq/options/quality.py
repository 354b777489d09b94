"""Options about quality: those of ``llmpq-eval``, ``llmpq-indicator`` and ``llmpq-quantize``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from llmpq.options.declare import Option, check_options
from llmpq.spec.precision import BITS, DTYPE_BYTES, Dtype

STORED_BITS = (3, 4, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationOptions:
    """The text that a model is calibrated on.

    Raises:
        SpecError: a value cannot be used.
    """

    calibration: Annotated[
        str | None, Option(metavar="FILE", help="calibration text (.txt, .jsonl)")
    ] = None
    calibration_sequences: Annotated[
        int, Option(minimum=1, metavar="N", help="sequences of the text (default %(default)s)")
    ] = 128
    calibration_tokens: Annotated[
        int, Option(minimum=1, metavar="T", help="tokens of a sequence (default %(default)s)")
    ] = 512

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalOptions:
    """What is evaluated, on which text, and how.

    Raises:
        SpecError: a value cannot be used.
    """

    model: Annotated[
        str | None, Option(metavar="DIR", help="weights (default: the strategy's own)")
    ] = None
    text: Annotated[str, Option(metavar="FILE", help="text to predict (UTF-8)")]
    bits: Annotated[int | None, Option(choices=BITS, help="all layers at one bitwidth")] = None
    strategy: Annotated[
        str | None, Option(metavar="FILE", help="layers at the bits of a strategy file")
    ] = None
    layer_bits: Annotated[
        str | None,
        Option(metavar="FILE.json", help="a JSON list with one bitwidth for every layer"),
    ] = None
    quantized: Annotated[
        str | None, Option(metavar="DIR", help="a GPTQ checkpoint of the model in --model")
    ] = None
    compare: Annotated[
        tuple[str, ...] | None,
        Option(
            metavar="WHAT",
            help="several in one table, with the model at 16 bits computed once: a bitwidth, "
            "gptq:DIR, layer_bits:FILE.json or strategy:FILE",
        ),
    ] = None
    pipeline: Annotated[
        bool, Option(help="run the ranks of the strategy instead of one process")
    ] = False
    dtype: Annotated[
        Literal["auto"] | Dtype,
        Option(
            choices=("auto", *DTYPE_BYTES),
            help="number format (default: that of the weights or the strategy)",
        ),
    ] = "auto"
    kv_bits: Annotated[
        int | None, Option(choices=(4, 8), help="keys and values at so few bits")
    ] = None
    window: Annotated[int, Option(minimum=2, help="tokens per window (default %(default)s)")] = 512
    rows: Annotated[int, Option(minimum=1, help="windows run together (default %(default)s)")] = 8
    max_tokens: Annotated[
        int | None, Option(minimum=2, help="tokens of the text to use (default all)")
    ] = None
    device: Annotated[str, Option(help="cpu, cuda or cuda:N (default %(default)s)")] = "cpu"
    threads: Annotated[int | None, Option(minimum=1, help="CPU threads (default: all cores)")] = (
        None
    )

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class IndicatorOptions(CalibrationOptions):
    """Of which model the sensitivity is measured, and how."""

    model: Annotated[str, Option(metavar="DIR", help="directory of the model")]
    method: Annotated[
        str | None,
        Option(
            choices=("divergence", "variance", "hessian", "random"),
            help="divergence: measured on the calibration text (default with one); variance: of "
            "the paper, from the weights (default without one); hessian, random: for comparison",
        ),
    ] = None
    bits: Annotated[
        tuple[int, ...], Option(choices=tuple(sorted(BITS)), metavar="BITS", help="")
    ] = STORED_BITS
    output: Annotated[
        str | None,
        Option(metavar="FILE.json", help="table to write, for llmpq-algo --omega_file"),
    ] = None
    average_bits: Annotated[
        float | None,
        Option(
            metavar="A",
            help="also print the bits of every layer that lose least at A bits per weight",
        ),
    ] = None
    experts: Annotated[
        bool,
        Option(
            help="instead count how many tokens of the calibration text visit each routed expert "
            "(JSON)"
        ),
    ] = False
    rounding: Annotated[
        Literal["deterministic", "stochastic"],
        Option(help="of --method variance: to nearest (default) or stochastic"),
    ] = "deterministic"
    seed: Annotated[int, Option(help="of --method random (default %(default)s)")] = 0
    dtype: Annotated[
        Literal["auto"] | Dtype,
        Option(
            choices=("auto", *DTYPE_BYTES),
            help="number format of the computation (default %(default)s)",
        ),
    ] = "float32"
    device: Annotated[str, Option(help="such as cpu or cuda (default %(default)s)")] = "cpu"
    threads: Annotated[
        int | None, Option(minimum=1, metavar="N", help="CPU threads (default: all cores)")
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeOptions(CalibrationOptions):
    """Which checkpoint is written, and by which quantizer."""

    model: Annotated[str, Option(metavar="DIR", help="directory of the model")]
    bits: Annotated[int | None, Option(choices=STORED_BITS, help="bits of every layer")] = None
    strategy: Annotated[
        str | None, Option(metavar="FILE", help="bits of each layer, from llmpq-algo")
    ] = None
    head_bits: Annotated[
        int | None,
        Option(
            choices=STORED_BITS,
            help="bits of the LM head (default: those of --strategy, else 16); a tied embedding "
            "stays at 16 bits",
        ),
    ] = None
    output: Annotated[str, Option(metavar="DIR", help="new directory to write")]
    method: Annotated[Literal["gptq", "rtn"], Option(help="quantizer (default %(default)s)")] = (
        "gptq"
    )
    format: Annotated[
        Literal["gptq", "compressed-tensors"],
        Option(
            help="format of the files (default gptq, which llmpq-dist keeps as stored; vLLM reads "
            "3 bits only in compressed-tensors)"
        ),
    ] = "gptq"
    group_size: Annotated[
        int | None,
        Option(
            minimum=-1,
            metavar="N",
            help="inputs that share a scale, -1 for all; default: 128, and -1 at 8 bits",
        ),
    ] = None
    sym: Annotated[bool, Option(help="symmetric codes at 3 and 4 bits too")] = False
    act_order: Annotated[bool, Option(help="group inputs by importance (slower to run)")] = False
    damping: Annotated[float, Option(help="share of the mean diagonal (default %(default)s)")] = (
        0.01
    )
