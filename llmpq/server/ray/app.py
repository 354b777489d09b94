"""The application for Ray Serve: ``serve run CONFIG.yaml`` with ``llmpq.server.ray.app:build``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig

from llmpq.options.run import DrainOptions
from llmpq.server.ray.ingress import Ingress
from llmpq.server.ray.options import FleetOptions, options_of
from llmpq.server.ray.replica import EngineReplica
from llmpq.server.ray.request_router import BalancedRequestRouter

STATS_TIMEOUT_S = 2.0
HEALTH_PERIOD_S = 2.0


def build(args: Mapping[str, Any]) -> Application:
    """Return the application of the arguments in a config file; see ``FleetOptions``.

    Raises:
        SpecError: a field cannot be used.
    """
    return application(options_of(args))


def application(
    options: FleetOptions,
    replica: type[Any] = EngineReplica,
    router: type[Any] = BalancedRequestRouter,
) -> Application:
    """Return an ingress in front of replicas.

    Args:
        options: of the fleet.
        replica: class of the replicas, made with the options.
        router: class of the request router.
    """
    values = ",".join(sorted(options.strategies))
    replicas = serve.deployment(
        replica,
        name="replicas",
        num_replicas=options.num_replicas,
        max_replicas_per_node=options.max_replicas_per_node,
        max_ongoing_requests=options.max_ongoing_requests,
        ray_actor_options={
            "num_cpus": options.num_cpus,
            "num_gpus": options.num_gpus,
            "label_selector": {options.label: f"in({values})"},
        },
        request_router_config=RequestRouterConfig(
            request_router_class=router,
            request_router_kwargs={"balancer": options.balancer, "seed": options.seed},
            request_routing_stats_period_s=options.poll_s,
            request_routing_stats_timeout_s=STATS_TIMEOUT_S,
        ),
        health_check_period_s=HEALTH_PERIOD_S,
        graceful_shutdown_timeout_s=DrainOptions().drain_timeout_s,
    )
    # One replica of the ingress sees every request, and counts it until the next statistics.
    ingress = serve.deployment(
        serve.ingress()(Ingress),
        name="ingress",
        num_replicas=1,
        max_ongoing_requests=options.num_replicas * options.max_ongoing_requests,
        ray_actor_options={"num_cpus": 0},
    )
    return ingress.bind(replicas.bind(options), options)
