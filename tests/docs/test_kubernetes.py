"""The Kubernetes manifests: options, ports and labels agree with the commands and each other."""

import re

import pytest
import yaml
from helpers.docs_pages import ROOT

from llmpq.cli.commands import serve
from llmpq.server.transport import OPEN_PATHS

FILES = sorted((ROOT / "deploy" / "kubernetes").glob("*.yaml"))
OBJECTS = [
    found for file in FILES for found in yaml.safe_load_all(file.read_text(encoding="utf-8"))
]
PODS = {
    found["metadata"]["name"]: found["spec"]["template"]
    for found in OBJECTS
    if found["kind"] == "Deployment"
}


def _container(name):
    (container,) = PODS[name]["spec"]["containers"]
    return container


def test_replicas_start_with_options_of_the_command():
    container = _container("llmpq-t4")
    options = serve._parser().parse_args(container["args"])
    assert options.port == container["ports"][0]["containerPort"]
    folders = [mount["mountPath"] for mount in container["volumeMounts"]]
    for path in (options.strat_file_name, options.model, str(options.api_key_file)):
        assert any(path.startswith(f"{folder}/") for folder in folders)
    assert PODS["llmpq-t4"]["spec"]["terminationGracePeriodSeconds"] > options.drain_timeout


def test_keys_are_readable_by_their_owner_only():
    (secret,) = [one["secret"] for one in PODS["llmpq-t4"]["spec"]["volumes"] if "secret" in one]
    assert secret["defaultMode"] & 0o077 == 0


@pytest.mark.parametrize("name", PODS)
def test_probes_ask_a_path_that_needs_no_key(name):
    container = _container(name)
    probes = [value for key, value in container.items() if key.endswith("Probe")]
    assert probes
    for probe in probes:
        assert probe["httpGet"]["path"] in OPEN_PATHS
        assert probe["httpGet"]["port"] in {port["name"] for port in container["ports"]}


def test_selectors_choose_the_pods_that_they_are_for():
    for found in OBJECTS:
        labels = {name: pod["metadata"]["labels"] for name, pod in PODS.items()}
        if found["kind"] == "Deployment":
            wanted = found["spec"]["selector"]["matchLabels"]
            assert _chosen(labels, wanted) == [found["metadata"]["name"]]
        elif found["kind"] == "Service":
            assert _chosen(labels, found["spec"]["selector"]) == ["llmpq-router"]
    (selector,) = _option("--selector")
    key, value = selector.split("=")
    assert _chosen(labels, {key: value}) == ["llmpq-t4"]


def test_router_asks_the_port_of_the_replicas():
    (port,) = _option("--service-discovery-port")
    assert int(port) == _container("llmpq-t4")["ports"][0]["containerPort"]


def _chosen(labels, wanted):
    return [name for name, own in labels.items() if wanted.items() <= own.items()]


def _option(name):
    pattern = re.compile(rf"{name}=(.+)")
    return [
        found[1] for word in _container("llmpq-router")["args"] if (found := pattern.match(word))
    ]
