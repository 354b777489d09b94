"""A report names the method that made the integers."""

import json

import pytest

from llmpq.dist.metrics.report import quantizer_of


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, "rtn"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "gptq"),
        ({"quantization_config": {"quant_method": "gptq", "meta": {"damp_percent": 0.1}}}, "gptq"),
        ({"quantization_config": {"quant_method": "gptq", "meta": {"method": "rtn"}}}, "rtn"),
    ],
)
def test_the_method_is_the_files_own(tmp_path, config, expected):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert quantizer_of(tmp_path) == expected


def test_an_older_file_beside_the_config_means_gptq(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "quantize_config.json").write_text('{"bits": 4}')
    assert quantizer_of(tmp_path) == "gptq"
