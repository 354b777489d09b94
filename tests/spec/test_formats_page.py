"""Every example of docs/reference/formats.md is a file that its reader accepts."""

import re
from pathlib import Path

import pytest

from llmpq.spec.catalog import device_types, load_devices
from llmpq.spec.cluster import load_cluster
from llmpq.spec.plan import read_plan
from llmpq.spec.tables import read_comm_table, read_latency_table, read_sensitivity
from llmpq.spec.workload import load_workload

PAGES = [
    Path(__file__).parents[2] / "docs" / "reference" / name for name in ("formats.md", "devices.md")
]
READERS = {
    "Cluster": load_cluster,
    "Describe your own": load_devices,
    "Workload": load_workload,
    "Latency table": read_latency_table,
    "Link table": read_comm_table,
    "Sensitivity": read_sensitivity,
    "Strategy": read_plan,
}


def examples() -> dict[str, str]:
    pattern = r"^## ([^\n]+)\n(?:(?!^## ).)*?```(?!bash)\w+\n(.*?)```"
    texts = [page.read_text(encoding="utf-8") for page in PAGES]
    found = [one for text in texts for one in re.findall(pattern, text, re.S | re.M)]
    return dict(found)


def test_every_format_has_an_example():
    assert set(examples()) == set(READERS)


@pytest.mark.parametrize("title", READERS)
def test_the_example_is_accepted(title, tmp_path):
    path = tmp_path / "example"
    path.write_text(examples()[title], encoding="utf-8")
    READERS[title](path)


def test_devices_of_the_examples_are_in_the_catalogue(tmp_path):
    path = tmp_path / "example"
    path.write_text(examples()["Cluster"], encoding="utf-8")
    assert {device.type for device in load_cluster(path).devices} <= set(device_types())
