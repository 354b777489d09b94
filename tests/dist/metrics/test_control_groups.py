"""Memory that a container or a service has left; the page cache is given back when needed."""

import pytest

from llmpq.dist.metrics import control_groups
from llmpq.dist.metrics.control_groups import available_memory_bytes

HOST = "MemTotal:  9 kB\nMemAvailable:  20000000 kB\n"
STAT = "anon 100\nfile 7800\ninactive_file 7000\nactive_file 800\nslab 5\n"


@pytest.fixture
def available(tmp_path, monkeypatch):
    monkeypatch.setattr(control_groups, "CGROUPS", tmp_path / "groups")

    def read(files, processes, meminfo=HOST):
        for name, text in files.items():
            path = tmp_path / "groups" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        (tmp_path / "self").write_text(processes)
        return available_memory_bytes(meminfo, tmp_path / "self")

    return read


def group(limit, used, stat=STAT, folder=""):
    return {
        f"{folder}memory.max": f"{limit}\n",
        f"{folder}memory.current": f"{used}\n",
        f"{folder}memory.stat": stat,
    }


def test_the_page_cache_of_a_container_is_available(available):
    assert available(group(8000, 7900), "0::/\n") == 8000 - 7900 + 7000 + 800


def test_without_statistics_all_of_the_use_counts(available):
    files = group(8000, 7900)
    del files["memory.stat"]
    assert available(files, "0::/\n") == 100


def test_the_least_of_a_group_of_those_around_it_and_of_the_host_counts(available):
    files = group(9000, 1000, "anon 1\n", "a/b/") | group(5000, 2000, "anon 1\n", "a/")
    assert available(files, "0::/a/b\n") == 3000
    assert available(files, "0::/a/b\n", "MemAvailable:  2 kB\n") == 2048


@pytest.mark.parametrize("limit", ["max", str(2**63 - 4096)])
def test_a_group_without_a_limit_has_the_memory_of_the_host(available, limit):
    assert available(group(limit, 7900), "0::/\n") == 20000000 * 1024


def test_version_one_counts_the_groups_below_under_another_name(available):
    files = {
        "memory/a/memory.limit_in_bytes": "8000\n",
        "memory/a/memory.usage_in_bytes": "7900\n",
        "memory/a/memory.stat": "inactive_file 1\nactive_file 2\n"
        "total_inactive_file 3000\ntotal_active_file 400\n",
    }
    assert available(files, "4:memory:/a\n1:cpu:/b\n") == 100 + 3400


def test_this_host_has_memory():
    assert available_memory_bytes() > 0
