#!/usr/bin/env python3
"""Run llama.cpp's converter on a model without a tokenizer, in a process of its own.

    scripts/interop/converter.py LLAMA_CPP MODEL OUTPUT.gguf [OPTION ...]

``LLAMA_CPP`` is the folder of its sources.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def main(sources: str, model: str, output: str, *options: str) -> None:
    """Convert a model to float32."""
    sys.path[:0] = [sources, f"{sources}/gguf-py"]
    import conversion  # noqa: PLC0415  of llama.cpp
    import convert_hf_to_gguf  # noqa: PLC0415

    conversion.load_all_models()
    base = conversion.ModelBase
    for kind in (base, *_below(base)):
        kind.set_vocab = lambda self: self.gguf_writer.add_tokenizer_model("no_vocab")
    # As with versions of transformers that do not know a family: the fields of the file alone.
    base.load_hparams = staticmethod(
        lambda folder, *_, **__: json.loads((Path(folder) / "config.json").read_text())
    )
    sys.argv = ["convert", model, "--outfile", output, "--outtype", "f32", *options]
    convert_hf_to_gguf.main()


def _below(kind: Any) -> Iterator[Any]:
    for one in kind.__subclasses__():
        yield one
        yield from _below(one)


if __name__ == "__main__":
    main(*sys.argv[1:])
