"""Which cores a process keeps to."""

import os

import pytest

from sattle_dist.runtime import Place, keep_to_own_cores

if not hasattr(os, "sched_setaffinity"):
    pytest.skip("this system does not let a process choose its cores", allow_module_level=True)


@pytest.mark.parametrize(
    ("cores", "processes", "threads", "shares"),
    [
        ([0, 1], 2, 1, [[0], [1]]),
        ([4, 5, 6, 7, 9], 2, 2, [[4, 5], [6, 7, 9]]),  # the cores allowed here, one left over
        ([0, 1, 2, 3], 3, 1, [[0], [1], [2, 3]]),
        ([0, 1, 2, 3], 2, 1, None),  # half the cores are free: another run may be on the first two
        ([0, 1], 4, 1, None),  # more processes than cores
        ([0, 1, 2, 3], 1, 4, None),
    ],
)
def test_processes_that_use_all_cores_share_them_out(cores, processes, threads, shares, monkeypatch):
    kept = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(cores))
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, own: kept.append(own))
    for rank in range(processes):
        place = Place(rank=8 + rank, world_size=16, local_rank=rank, local_world_size=processes)
        keep_to_own_cores(place, threads)
    assert kept == (shares or [])
