import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmpq.costmodel.tables.profiles import AlphaBetaCommModel, fit_links
from llmpq.errors import SpecError
from llmpq.spec import catalog
from llmpq.spec.cluster import DEFAULT_NETWORK, Cluster, DeviceGroup, LinkSpec, Node
from llmpq.spec.tables import CommSample

LINK = LinkSpec(between=("a", "b"), bytes_per_s=1e9, latency_s=1e-4)
CLUSTER = Cluster(
    name="three",
    nodes=(
        Node(name="a", devices=(DeviceGroup(type="T4-16G", count=2),)),
        Node(name="b", devices=(DeviceGroup(type="V100-32G", count=1),)),
        Node(name="c", devices=(DeviceGroup(type="V100-32G", count=1),)),
    ),
    links=(LINK,),
)
SPECS = tuple(catalog.device(name) for name in ("T4-16G", "V100-32G", "V100-32G"))
COMM = AlphaBetaCommModel(cluster=CLUSTER, specs=SPECS)
FIRST, SECOND, REMOTE, FAR = CLUSTER.devices


def test_a_send_is_latency_plus_size_over_bandwidth():
    assert COMM.send_s(FIRST, REMOTE, 10**6) == pytest.approx(1e-4 + 1e-3)
    assert COMM.send_s(REMOTE, SECOND, 10**6) == pytest.approx(1e-4 + 1e-3)


def test_devices_of_one_node_use_the_senders_own_link():
    expected = SPECS[0].link_latency_s + 10**6 / SPECS[0].link_bytes_per_s
    assert COMM.send_s(FIRST, SECOND, 10**6) == pytest.approx(expected)


def test_an_unlisted_pair_uses_the_default_network():
    expected = DEFAULT_NETWORK.latency_s + 10**6 / DEFAULT_NETWORK.bytes_per_s
    assert COMM.send_s(FIRST, FAR, 10**6) == pytest.approx(expected)


def test_a_device_sends_to_itself_in_no_time():
    assert COMM.send_s(FIRST, FIRST, 10**9) == 0


@given(size=st.integers(0, 10**10), more=st.integers(1, 10**9))
def test_larger_messages_never_arrive_sooner(size, more):
    for target in (SECOND, REMOTE, FAR):
        assert COMM.send_s(FIRST, target, size + more) > COMM.send_s(FIRST, target, size) > 0


def test_a_measured_link_replaces_the_stated_one():
    measured = LinkSpec(between=("b", "a"), bytes_per_s=1e8, latency_s=0.0)
    comm = AlphaBetaCommModel(cluster=CLUSTER, specs=SPECS, measured=(measured,))
    assert comm.send_s(FIRST, REMOTE, 10**6) == pytest.approx(1e-2)


def test_links_are_fitted_over_both_directions():
    samples = [
        CommSample(source=source, target=target, size_bytes=size, seconds=2e-5 + size / 5e8)
        for source, target in (("x", "y"), ("y", "x"))
        for size in (1000, 10**5, 10**7)
    ]
    (link,) = fit_links(samples)
    assert link.between == ("x", "y")
    assert link.latency_s == pytest.approx(2e-5, rel=1e-6)
    assert link.bytes_per_s == pytest.approx(5e8, rel=1e-6)


def test_times_that_do_not_grow_with_size_are_all_latency():
    samples = [
        CommSample(source="x", target="y", size_bytes=size, seconds=1e-3) for size in (10, 20)
    ]
    (link,) = fit_links(samples)
    assert link.latency_s == pytest.approx(1e-3)
    assert link.bytes_per_s > 1e14


def test_one_size_cannot_tell_latency_from_bandwidth():
    samples = [CommSample(source="x", target="y", size_bytes=10, seconds=1.0)] * 3
    with pytest.raises(SpecError, match="between 'x' and 'y'"):
        fit_links(samples)
