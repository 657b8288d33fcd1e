"""The plan of routes: the preferred transport that serves both ranks, the same seen from either."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fs_comm.errors import CommError
from fs_comm.topology import TRANSPORTS, Site, needs_verbs, plan_route, summary

HERE, THERE = "host a", "host b"


@st.composite
def sites(draw: st.DrawFn) -> list[Site]:
    size = draw(st.integers(2, 5))
    return [
        Site(
            draw(st.sampled_from([HERE, THERE])),
            draw(st.frozensets(st.integers(0, size - 1))),
            f"device of {rank}",
            draw(st.sampled_from([None, "no device"])),
        )
        for rank in range(size)
    ]


@given(sites(), st.permutations(TRANSPORTS))
def test_both_ranks_of_a_pair_find_the_same_first_transport_that_serves_both(where: list[Site], order: list[str]):
    for a, b in itertools.permutations(range(len(where)), 2):
        route = plan_route(where, a, b, order)
        assert route == plan_route(where, b, a, order)
        serves = {
            "shm": where[a].host == where[b].host,
            "verbs": where[a].no_verbs is None and where[b].no_verbs is None,
            "gloo": True,
        }
        assert route.transport == next(name for name in order if serves[name])
        if route.transport == "shm":
            assert (route.road == "attach") == (b in where[a].reads and a in where[b].reads)
        if route.transport == "verbs":
            assert needs_verbs([s.host for s in where], order), "nobody would have looked for devices"
        for refused in order[: order.index(route.transport)]:
            assert f"{refused}:" in route.reason


def test_a_pair_that_nothing_serves_is_told_why():
    where = [Site(HERE, no_verbs="no device"), Site(THERE, verbs="mlx5_0")]
    with pytest.raises(CommError, match=r"ranks 0 and 1 of the group: shm: .*several hosts; verbs: rank 0 .*no device"):
        plan_route(where, 1, 0, ["shm", "verbs"])


def test_nobody_looks_for_devices_where_all_meet_in_memory():
    assert not needs_verbs([HERE, HERE], TRANSPORTS)
    assert needs_verbs([HERE, THERE], TRANSPORTS)
    assert needs_verbs([HERE, HERE], ["verbs", "shm"])
    assert not needs_verbs([HERE], ["verbs"])


def test_a_summary_names_each_transport_once_in_order():
    assert summary({"gloo", "shm"}, TRANSPORTS) == "shm+gloo"
    assert summary(set(), TRANSPORTS) == "none"
