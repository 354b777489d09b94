"""Decoder-only models cut into pipeline stages: transformers' own layers, our masks and KV.

``Checkpoint`` reads weights, ``build_layer`` makes a layer, ``DecoderStage`` runs a run of them,
``Master`` runs the two ends. Precisions are ``llmpq.quant``'s business, slots ``llmpq.dist``'s.
"""

from llmpq.models.adapter import build_layer
from llmpq.models.attention import KVShape, KVStore, KVView, MicroBatch
from llmpq.models.config import kv_shapes, load_config
from llmpq.models.files.tensor_files import TensorFiles
from llmpq.models.files.weights import Checkpoint
from llmpq.models.master import Master
from llmpq.models.stage import DecoderStage

__all__ = [
    "Checkpoint",
    "DecoderStage",
    "KVShape",
    "KVStore",
    "KVView",
    "Master",
    "MicroBatch",
    "TensorFiles",
    "build_layer",
    "kv_shapes",
    "load_config",
]
