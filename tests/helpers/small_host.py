"""Run a verb of llmpq as on a host of so much free memory: ``MEBIBYTES VERB OPTION ...``.

Of several hosts on one machine, each would else have all of its memory, and no model needed two.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from llmpq.cli.front import host_plan
from llmpq.cli.front.program import main
from llmpq.cli.workers import command, lender
from llmpq.spec.cluster import Cluster, DeviceGroup, Node
from llmpq.units import MIB


def small_host(mebibytes: int) -> Cluster:
    """Return a host with one CPU worker."""
    group = DeviceGroup(type="cpu", count=1, threads=1, memory_bytes=mebibytes * MIB)
    return Cluster(name="this host", nodes=(Node(name="here", devices=(group,)),))


def run(words: Sequence[str]) -> int:
    """Run the verb; return its exit status."""
    for module in (host_plan, command, lender):
        module.host_cluster = lambda: small_host(int(words[0]))
    return main(words[1:])


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
