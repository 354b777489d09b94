"""Decoder-only models cut into pipeline stages, built from the layers of transformers.

``Checkpoint`` reads weights, ``build_layer`` builds a layer, ``DecoderStage`` runs a range of
layers, ``Master`` runs the embedding and the head.
"""

from llmpq.models.adapter import build_layer, kv_shapes, load_config
from llmpq.models.attention import KVShape, KVStore, KVView, PackedBatch
from llmpq.models.master import Master
from llmpq.models.mtp import MtpEnds
from llmpq.models.stage import DecoderStage
from llmpq.models.tensor_files import TensorFiles
from llmpq.models.weights import Checkpoint, MtpCheckpoint

__all__ = [
    "Checkpoint",
    "DecoderStage",
    "KVShape",
    "KVStore",
    "KVView",
    "Master",
    "MtpCheckpoint",
    "MtpEnds",
    "PackedBatch",
    "TensorFiles",
    "build_layer",
    "kv_shapes",
    "load_config",
]
