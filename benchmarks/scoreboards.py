"""Published speeds of whole models at 16 bits and fewer, for ``benchmarks/rooflines.py``.

Tokens a second that users of llama.cpp measured with its ``llama-bench``: one prompt at a time, and
answers to an empty one. Its 4 bits are Q4_0 (4.5 bits a weight) and Q4_K_M (4.9), its 3 bits Q3_K_S
(3.4), its 8 bits Q8_0 (8.5), with the head at 6 to 8. They are counted as llmpq's bitwidths, whose
codes and scales take about as much.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product

from llmpq.spec.precision import Phase
from llmpq.spec.tables import LatencySample

Speeds = Mapping[int, tuple[float, ...]]
"""By bits: tokens a second of each prompt, then of each answer."""
LLAMA_2 = "meta-llama/Llama-2-7b-hf"
LLAMA_3 = "meta-llama/Meta-Llama-3-8B"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoreboard:
    """What one page publishes of one model: ``speeds`` by device.

    ``prompts`` and ``answers`` are tokens of what is read and written.
    """

    source: str
    model: str
    prompts: tuple[int, ...] = (512,)
    answers: tuple[int, ...] = (128,)
    speeds: Mapping[str, Speeds]

    def samples(self, device: str, bits: int) -> tuple[LatencySample, ...]:
        """Return the seconds of prompts, and of a token of answers at half of their length."""
        speeds = self.speeds[device][bits]
        shapes = [(Phase.PREFILL, tokens, tokens) for tokens in self.prompts]
        shapes += [(Phase.DECODE, tokens // 2, 1) for tokens in self.answers]
        return tuple(
            LatencySample(phase=phase, bits=bits, batch=1, tokens=tokens, seconds=made / speed)
            for (phase, tokens, made), speed in zip(shapes, speeds, strict=True)
        )


BOARDS = (
    Scoreboard(
        source="llama.cpp discussion 4167",
        model=LLAMA_2,
        speeds={
            "M1": {8: (117.25, 7.91), 4: (117.96, 14.15)},
            "M1-Pro": {16: (302.14, 12.75), 8: (270.37, 22.34), 4: (266.25, 36.41)},
            "M1-Max": {16: (599.53, 23.03), 8: (537.37, 40.20), 4: (530.06, 61.19)},
            "M1-Ultra": {16: (1168.89, 37.01), 8: (1042.95, 59.87), 4: (1030.04, 83.73)},
            "M2": {16: (201.34, 6.72), 8: (181.40, 12.21), 4: (179.57, 21.91)},
            "M2-Pro": {16: (384.38, 13.06), 8: (344.50, 23.01), 4: (341.19, 38.86)},
            "M2-Max": {16: (755.67, 24.65), 8: (677.91, 41.83), 4: (671.31, 65.95)},
            "M2-Ultra": {16: (1401.85, 41.02), 8: (1248.59, 66.64), 4: (1238.48, 94.27)},
            "M3": {8: (187.52, 12.27), 4: (186.75, 21.34)},
            "M3-Pro": {16: (357.45, 9.89), 8: (344.66, 17.53), 4: (341.67, 30.74)},
            "M3-Max": {16: (779.17, 25.09), 8: (757.64, 42.75), 4: (759.70, 66.31)},
            "M3-Ultra": {16: (1538.34, 39.78), 8: (1487.51, 63.93), 4: (1471.24, 92.14)},
            "M4": {16: (230.18, 7.43), 8: (223.64, 13.54), 4: (221.29, 24.11)},
            "M4-Pro": {16: (464.48, 17.18), 8: (449.62, 30.69), 4: (439.78, 50.74)},
            "M4-Max": {16: (922.83, 31.64), 8: (891.94, 54.05), 4: (885.68, 83.06)},
            "M5-Max": {4: (3347.0, 119.1)},
        },
    ),
    Scoreboard(
        source="llama.cpp discussion 15013",
        model=LLAMA_2,
        speeds={
            "RTX3060-12G": {4: (2138.0, 75.6)},
            "RTX3090": {4: (5174.69, 158.16)},
            "RTX4090": {4: (11992.70, 186.21)},
            "RTX5060Ti-16G": {4: (3737.25, 90.94)},
            "RTX5070Ti": {4: (6952.38, 176.85)},
            "RTX5080": {4: (8297.36, 181.99)},
            "RTX5090": {4: (14073.41, 290.02)},
            "RTX-PRO-6000": {4: (14854.63, 274.20)},
            "GB10": {4: (3062.31, 57.21)},
        },
    ),
    Scoreboard(
        source="llama.cpp discussion 10879",
        model=LLAMA_2,
        speeds={
            "RX7900XTX": {4: (3726.99, 182.63)},
            "RX9070": {4: (3164.10, 119.71)},
            "RX9070XT": {4: (5036.04, 137.11)},
            "R9700": {4: (5609.82, 145.67)},
            "Arc-A770": {4: (1073.85, 52.56)},
        },
    ),
    Scoreboard(
        source="llama.cpp pull request 26284",
        model=LLAMA_3,
        prompts=(2048,),
        answers=(64,),
        speeds={"RX7900XTX": {4: (3390.81, 105.59)}},
    ),
    Scoreboard(
        source="llm-tracker.info on Strix Halo",
        model=LLAMA_2,
        speeds={"Strix-Halo": {4: (884.20, 52.73)}},
    ),
    Scoreboard(
        source="ipex-llm issue 12991",
        model="Qwen/Qwen2.5-7B",
        prompts=(512, 1024, 2048),
        answers=(128, 256, 512),
        speeds={"Arc-B580": {4: (2335.96, 2286.37, 1988.33, 66.48, 66.27, 66.10)}},
    ),
    Scoreboard(
        source="llama.cpp benches",
        model="Qwen/Qwen2.5-7B",
        prompts=(2048,),
        answers=(32,),
        speeds={"GB10": {8: (2250.28, 29.43)}, "M2-Ultra": {8: (1565.91, 79.68)}},
    ),
    Scoreboard(
        source="llama.cpp pull request 4766",
        model=LLAMA_2,
        speeds={
            "RTX3090": {16: (4407.44, 48.09), 4: (3510.53, 119.90), 3: (3409.98, 85.45)},
            "P40": {4: (934.74, 56.29), 3: (592.36, 30.74)},
        },
    ),
    Scoreboard(
        source="XiongjieDai/GPU-Benchmarks-on-LLM-Inference",
        model=LLAMA_3,
        prompts=(512, 1024),
        answers=(512, 1024),
        speeds={
            "RTX3070": {4: (2402.51, 2283.62, 72.79, 70.94)},
            "RTX3080-10G": {4: (3728.86, 3557.02, 109.57, 106.40)},
            "RTX3080Ti": {4: (3690.30, 3556.67, 110.60, 106.71)},
            "RTX3090": {
                16: (4444.65, 4239.64, 47.40, 46.51), 4: (4030.40, 3865.39, 115.42, 111.74),
            },
            "RTX4070Ti": {4: (3936.29, 3653.07, 83.50, 82.21)},
            "RTX4080": {
                16: (7246.97, 6758.90, 40.58, 40.29), 4: (5389.74, 5064.99, 108.15, 106.22),
            },
            "RTX4090": {
                16: (9382.00, 9056.26, 54.84, 54.34), 4: (7138.99, 6898.71, 130.58, 127.74),
            },
            "M1-Max": {16: (517.34, 418.77, 18.75, 18.43), 4: (408.23, 355.45, 35.73, 34.49)},
            "M2-Ultra": {16: (1175.40, 1202.74, 36.90, 36.25), 4: (994.04, 1023.89, 78.81, 76.28)},
            "M3-Max": {16: (769.84, 751.49, 22.04, 22.39), 4: (693.32, 678.04, 48.97, 50.74)},
        },
    ),
)  # fmt: skip
"""Discussions and pull requests of github.com/ggml-org/llama.cpp, and other pages by name.

Left out: prompts longer than 1,024 tokens of builds without fused attention; the Arc B580 by Vulkan
without its matrix units; the A100 and the H100, whose fewer bits are fitted to kernels of vLLM.
"""


def published(
    devices: Iterable[str], widths: Iterable[int]
) -> Iterator[tuple[Scoreboard, str, int]]:
    """Yield every scoreboard with a device and bitwidth that it has."""
    for board, device, bits in product(BOARDS, devices, widths):
        if bits in board.speeds.get(device, {}):
            yield board, device, bits
