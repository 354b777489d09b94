"""The ``config.json`` that a GGUF file stands for.

llama.cpp's converter writes sizes as metadata and leaves out what follows from the architecture;
here they become the fields of transformers again. What transformers could not compute as
llama.cpp does is an error.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from llmpq.errors import SpecError, bad_field
from llmpq.spec.families import known_families
from llmpq.spec.fields import dump_json
from llmpq.spec.gguf.form import GgufMetadata, head_dim, rotation
from llmpq.spec.gguf.header import GgufHeader, find_gguf, read_header


def gguf_config(model: Path | str) -> dict[str, Any] | None:
    """Return the ``config.json`` of a GGUF model; ``None`` if the model is none.

    Raises:
        SpecError: the file is damaged, of an unknown architecture, or scales positions in a way
            that transformers does not.
    """
    path = find_gguf(model)
    return None if path is None else config_of(read_header(path))


def config_bytes(model: Path | str) -> bytes:
    """Return a model's ``config.json`` for a digest, as stored or as made from a GGUF file.

    Raises:
        SpecError: as :func:`gguf_config`.
        OSError: there is no such file.
    """
    config = gguf_config(model)
    if config is None:
        return (Path(model) / "config.json").read_bytes()
    return dump_json(config).encode()


def config_of(header: GgufHeader) -> dict[str, Any]:
    """Return the ``config.json`` of a header; errors as :func:`gguf_config`."""
    metadata = GgufMetadata(header)
    forms = {one.name: one.gguf for one in known_families() if one.gguf is not None}
    for name, form in forms.items():
        if form.means(metadata):
            return _common(metadata) | {"model_type": name} | form.fields(metadata)
    raise bad_field(
        str(header.path),
        "general.architecture",
        metadata.architecture,
        f"one of {', '.join(sorted({form.architecture for form in forms.values()}))}",
    )


def _common(metadata: GgufMetadata) -> dict[str, Any]:
    heads = metadata.whole("attention.head_count")
    vocabulary = metadata.header.tensors.get("token_embd.weight")
    if vocabulary is None or len(vocabulary.shape) != 2:
        raise SpecError(f"{metadata.header.path}: found no tensor 'token_embd.weight'")
    config: dict[str, Any] = {
        "hidden_size": metadata.whole("embedding_length"),
        "num_hidden_layers": metadata.whole("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.whole("attention.head_count_kv", heads),
        "head_dim": head_dim(metadata),
        "intermediate_size": metadata.whole("feed_forward_length"),
        "max_position_embeddings": metadata.whole("context_length"),
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "vocab_size": vocabulary.shape[0],
        "tie_word_embeddings": not metadata.has_tensor("output.weight"),
        "rope_parameters": rotation(metadata),
        "dtype": _dtype(metadata.header),
    }
    for name in ("bos", "eos", "padding"):
        token = metadata.header.metadata.get(f"tokenizer.ggml.{name}_token_id")
        config[f"{name.replace('padding', 'pad')}_token_id"] = token
    return config


def _dtype(header: GgufHeader) -> str:
    """Return the number format of most matrices by bytes; bfloat16 for quantized ones."""
    counts: Counter[str] = Counter()
    for tensor in header.tensors.values():
        if len(tensor.shape) > 1:
            counts[tensor.type.name] += tensor.nbytes
    most = counts.most_common(1)[0][0]
    return {"F32": "float32", "F16": "float16"}.get(most, "bfloat16")
