"""Who shares memory and who speaks for a host follows from the hosts' names alone."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kindler.sync.ring import neighbours
from kindler.sync.topology import Topology

HOSTS = st.lists(st.sampled_from("abcd"), min_size=1, max_size=9)


@given(HOSTS)
def test_every_rank_computes_the_same_leaders_one_for_each_host(hosts: list[str]) -> None:
    views = [Topology.of(hosts, rank, shared_memory=True) for rank in range(len(hosts))]

    assert {view.leaders for view in views} == {views[0].leaders}
    assert sorted(hosts[leader] for leader in views[0].leaders) == sorted(set(hosts))
    for rank, view in enumerate(views):
        assert rank in view.ranks
        assert {hosts[other] for other in view.ranks} == {hosts[rank]}
        assert view.leads == (rank in view.leaders)
        assert hosts[view.leaders[view.leader_of[rank]]] == hosts[rank]


@given(HOSTS)
def test_without_shared_memory_every_rank_leads_itself(hosts: list[str]) -> None:
    view = Topology.of(hosts, 0, shared_memory=False)

    assert view.leaders == tuple(range(len(hosts)))
    assert view.ranks == (0,)
    assert not view.any_shared


@given(st.lists(st.integers(0, 99), min_size=2, max_size=9, unique=True))
def test_going_right_from_anyone_leads_through_all_and_back(members: list[int]) -> None:
    rank, seen = members[0], []
    for _ in members:
        seen.append(rank)
        right = neighbours(members, rank)[1]
        assert neighbours(members, right)[0] == rank
        rank = right

    assert rank == members[0]
    assert sorted(seen) == sorted(members)
