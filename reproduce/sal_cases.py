"""Fleets and runs of SAL's evaluation (Sec. 7): equal servers as in the paper, and different ones.

Arrivals are those of the single-server evaluation, with as many requests for each server.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from llmpq.batching import percentile
from llmpq.batching.queue_order import QueueOrder, queue_order
from llmpq.routing import LoadBalancer, RoutedRequest, WorkloadMeans, load_balancer
from llmpq.routing.balancers import Replicas, freed_tokens
from llmpq.sim.engine import simulate_engine
from llmpq.sim.fleet import FleetReplica, FleetReport, simulate_fleet
from llmpq.spec.runtime_constants import POLL_S
from llmpq.spec.workload import TraceRequest, scale_rate
from reproduce.larry import KEPT, LIMITS, METRICS, Figures, rate_of_pressure
from reproduce.larry_cases import (
    Server,
    a100_server,
    draw_requests,
    h100_server,
    llama_8b_server,
)

REFERENCE = "p2c", "fcfs"
"""Balancer and order that choose the rate of a case."""
START_RATE = 5.0


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """Servers behind one load balancer.

    Attributes:
        name: of servers and model.
        servers: at least one.
    """

    name: str
    servers: tuple[Server, ...]

    @property
    def is_equal(self) -> bool:
        """Whether all servers are of one type."""
        return len({server.name for server in self.servers}) == 1


def equal_fleets() -> tuple[Fleet, ...]:
    """Return the fleets of the paper."""
    return (
        Fleet(name="Llama-3-8B, 8 A100-40G", servers=(a100_server(),) * 8),
        Fleet(name="Llama-3-70B FP8, 4 x 2 H100", servers=(h100_server(),) * 4),
    )


def different_fleet() -> Fleet:
    """Return eight servers of four types; the paper has none."""
    types = ("A100-40G", "L40S", "RTX4090", "L4")
    servers = (server for name in types for server in (llama_8b_server(name),) * 2)
    return Fleet(name="Llama-3-8B, 2 each of A100-40G, L40S, RTX4090, L4", servers=tuple(servers))


@dataclass(frozen=True, kw_only=True)
class FleetCase:
    """A fleet, a law of lengths and a seed.

    Attributes:
        fleet: the servers.
        seed: of lengths, arrivals and random balancers.
        requests: at a mean rate of 1 a second for each server.
        longest: longest answer of the law, which No-Preempt reserves.
    """

    fleet: Fleet
    seed: int
    requests: tuple[TraceRequest, ...]
    longest: int

    def play(self, balancer: str, order: QueueOrder, rate: float) -> Figures:
        """Simulate at a mean rate for each server."""
        return figures(self.simulate(load_balancer(balancer, seed=self.seed), order, rate))

    def simulate(
        self, balancer: LoadBalancer, order: QueueOrder, rate: float, *, poll_s: float = POLL_S
    ) -> FleetReport:
        """Simulate with any balancer, at a mean rate for each server."""
        replicas = [
            FleetReplica(
                costs=server.costs,
                limits=replace(LIMITS, num_blocks=server.num_blocks),
                order=order,
            )
            for server in self.fleet.servers
        ]
        return simulate_fleet(
            replicas,
            balancer,
            scale_rate(self.requests, rate),
            poll_s=poll_s,
            max_tokens=self.longest if order.reserves_answer else None,
        )

    @cached_property
    def unloaded_s(self) -> float:
        """95th percentile of the time to first token when every request is alone, in turn."""
        alone = [replace(item, new_tokens=1) for item in scale_rate(self.requests, 1e-3)]
        count = len(self.fleet.servers)
        times: list[float] = []
        for place, server in enumerate(self.fleet.servers):
            limits = replace(LIMITS, num_blocks=server.num_blocks)
            own = simulate_engine(server.costs, limits, queue_order("fcfs"), alone[place::count])
            times += own.time_to_first_token_s
        return percentile(times, 95)

    @cached_property
    def rate(self) -> float:
        """Requests a second for each server at which the reference is under pressure."""
        return rate_of_pressure(self.pressure, START_RATE)

    def pressure(self, rate: float) -> float:
        """Return the reference's p95 of the time to first token over the unloaded one."""
        balancer, order = REFERENCE
        found = self.play(balancer, queue_order(order), rate)
        value: float = found[METRICS[0]]["p95"]
        return value / self.unloaded_s


def figures(report: FleetReport) -> Figures:
    """Return what the tables need."""
    found = report.total.to_json()
    return {name: found[name] for name in KEPT} | {
        "shares": [
            report.routed.count(number) / len(report.routed)
            for number in range(len(report.replicas))
        ]
    }


def make_case(
    fleet: Fleet, trace: Sequence[TraceRequest], seed: int, requests_per_server: int
) -> FleetCase:
    """Return the case of a seed."""
    servers = len(fleet.servers)
    requests = draw_requests(trace, requests_per_server * servers, seed, "two_state", servers)
    longest = max(item.new_tokens for item in trace)
    return FleetCase(fleet=fleet, seed=seed, requests=requests, longest=longest)


Weigh = Callable[[float, float], float]


class ChangedSal:
    """SAL with another rule: the load is ``weigh(steps for memory, steps for prompts)``.

    Args:
        weigh: returns the load.
        by_index: break ties by the index only.
    """

    def __init__(self, weigh: Weigh, *, by_index: bool = False) -> None:
        self._weigh = weigh
        self._by_index = by_index

    def rank(self, request: RoutedRequest, replicas: Replicas, means: WorkloadMeans) -> list[int]:
        """Return the numbers of the replicas, the best one first."""
        tokens = request.prompt_tokens

        def key(number: int) -> tuple[float, int, int]:
            view = replicas[number]
            capacity = view.capacity
            memory = max(0, tokens - view.free_tokens) / freed_tokens(capacity.kv_tokens, means)
            prompts = (view.queued_tokens + tokens) / capacity.token_budget
            used = 0 if self._by_index else capacity.kv_tokens - view.free_tokens
            return self._weigh(memory, prompts), used, number

        return sorted(replicas, key=key)

    def routed(self, request: RoutedRequest, number: int) -> None:
        """Take no note."""
