"""Exports to llama.cpp, run on RPC servers where its binaries are."""

import os
from pathlib import Path

import pytest

from scripts import llama_cpp_rpc

pytestmark = pytest.mark.nightly

BINARIES = os.environ.get("LLAMA_CPP_BINARIES")
"""Directories of llama-server, ggml-rpc-server and llama-quantize, separated by colons."""
LOG = """\
0.00.412.025 D load_tensors: layer   0 assigned to device RPC0, is_swa = 0
0.00.412.027 D load_tensors: layer   1 assigned to device RPC1, is_swa = 0
0.00.412.030 D load_tensors: layer   2 assigned to device RPC1, is_swa = 0
0.00.412.031 D load_tensors: layer   3 assigned to device RPC1, is_swa = 0
"""


def test_the_log_has_the_server_of_every_layer_but_the_output():
    assert llama_cpp_rpc.layer_places(LOG) == [0, 1, 1]
    assert llama_cpp_rpc.counts([0, 1, 1]) == [1, 2]


def test_the_log_has_the_tensors_that_stay_on_the_cpu():
    line = "tensor blk.{}.weight (8 MiB f32) buffer type overridden to {}"
    log = "\n".join(
        line.format(name, place)
        for name, place in [("2.ffn_up_exps", "CPU"), ("3.ffn_up_exps", "RPC0[127.0.0.1:1]")]
    )
    assert llama_cpp_rpc.overridden(log) == {(2, "ffn_up_exps")}


@pytest.mark.parametrize(
    ("log", "message"), [("nothing", "no layers"), (LOG.replace("RPC1", "CPU"), "on CPU")]
)
def test_a_layer_elsewhere_is_an_error(log, message):
    with pytest.raises(SystemExit, match=message):
        llama_cpp_rpc.layer_places(log)


@pytest.mark.slow
@pytest.mark.skipif(BINARIES is None, reason="needs llama.cpp: LLAMA_CPP_BINARIES=build/bin")
def test_exports_run_on_two_servers_with_the_layers_of_the_plan(monkeypatch, capsys):
    folders = [str(Path(one)) for one in BINARIES.split(":")]
    monkeypatch.setattr("sys.argv", ["llama_cpp_rpc", "--binaries", *folders])
    assert llama_cpp_rpc.main() == 0
    found = capsys.readouterr().out
    assert "layers of the plan [7, 5], of llama.cpp [7, 5]" in found
    assert "float32: experts of layers [0, 1, 2, 3] on the host, by llama.cpp's log [0, 1" in found
