"""Small GGUF files made by hand, without the ``gguf`` package."""

from __future__ import annotations

import struct

SIZES = {
    "context_length": 64,
    "embedding_length": 32,
    "block_count": 1,
    "feed_forward_length": 64,
    "attention.head_count": 2,
}


def text(value):
    return struct.pack("<Q", len(value)) + value.encode()


def key(name, kind, form, *values):
    return text(name) + struct.pack("<I", kind) + struct.pack("<" + form, *values)


def gguf_bytes(
    *, version=3, architecture="llama", extra=(), tensors=(("token_embd.weight", (32, 8), 0),)
):
    """A small model: the keys of ``SIZES``, ``extra`` ones, and tensors of F32."""
    keys = [text("general.architecture") + struct.pack("<I", 8) + text(architecture)]
    keys += [key(f"{architecture}.{name}", 4, "I", value) for name, value in SIZES.items()]
    keys += [key(f"{architecture}.attention.layer_norm_rms_epsilon", 6, "f", 1e-5), *extra]
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(keys)) + b"".join(keys)
    data = 0
    for name, shape, kind in tensors:
        head += text(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        head += struct.pack("<IQ", kind, data)
        data += shape[0] * shape[1] * 4
    return head + b"\0" * (-len(head) % 32) + b"\0" * data
