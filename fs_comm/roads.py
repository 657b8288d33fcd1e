"""The roads of a group: all ranks tell what they can do, come to one plan, and open the roads together."""

import json
import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, Store

from fs_comm.errors import CommError, CommTimeout, Mismatch
from fs_comm.exchange import Road
from fs_comm.mesh import Mesh
from fs_comm.topology import Route, Site, needs_verbs, plan_route
from fs_comm.transports.gloo import GlooRoad
from fs_comm.transports.memory import Staging, allow_attach, read_from
from fs_comm.transports.shm_road import AttachRoad, StagedRoad
from fs_comm.transports.verbs import probe_verbs
from fs_comm.transports.verbs_road import VerbsRoad

ROADS = ("attach", "staged", "verbs", "gloo")
"""In the order in which they complete, on all ranks."""


def plan_routes(
    store: Store, mesh: Mesh, transports: Sequence[str], setup_s: float
) -> tuple[dict[int, Route], list[str]]:
    """Collective: this rank's route to each peer, and the roads that join any two ranks, in the order of `ROADS`.

    Raises:
        Mismatch: Ranks allow different transports.
        CommError: None of the transports joins some two ranks.
    """
    probe = torch.full((8,), mesh.rank, dtype=torch.uint8)
    allows = not is_forbidden("FS_COMM_ATTACH")
    if allows:
        allow_attach()
    terms = list(transports)
    told = tell_all(store, "terms", mesh, [terms, probe.data_ptr() if allows else 0], setup_s)
    for peer, (theirs, _) in enumerate(told):
        if theirs != terms:
            raise Mismatch(
                f"all ranks must allow the same transports: this rank {terms}, {mesh.name_of(peer)} {theirs}"
            )
    reads = [p for p, (_, address) in enumerate(told) if allows and address and _can_read(mesh, p, address)]
    availability = None
    if needs_verbs(mesh.hosts, transports):
        availability = probe_verbs(local_rank=_local_rank(mesh))
    mine = [reads, availability.reason if availability else "", availability.ok if availability else True]
    sites = [
        Site(host, reads, reason if ok else "", None if ok else reason)
        for host, (reads, reason, ok) in zip(mesh.hosts, tell_all(store, "can", mesh, mine, setup_s), strict=True)
    ]
    del probe  # until here the peers were reading it
    pairs = [(a, b) for a in range(mesh.size) for b in range(a)]
    plan = {pair: plan_route(sites, *pair, transports) for pair in pairs}  # all of them: all ranks raise, or none
    wanted = [road for road in ROADS if any(route.road == road for route in plan.values())]
    return {p: plan[max(p, mesh.rank), min(p, mesh.rank)] for p in range(mesh.size) if p != mesh.rank}, wanted


def open_roads(
    store: Store, mesh: Mesh, routes: Mapping[int, Route], wanted: Sequence[str], setup_s: float
) -> dict[str, Road]:
    """Collective: the roads `wanted`, in that order; also those that join others, since some are opened by all."""
    opened: dict[str, Road] = {}
    for road in wanted:
        peers = [p for p, route in routes.items() if route.road == road]
        if road == "attach":
            opened[road] = AttachRoad()
        elif road == "staged":
            sockets = {p: mesh.sockets[p] for p in peers}
            opened[road] = StagedRoad(Staging(mesh.rank, mesh.size, sockets, setup_s))
        elif road == "verbs" and peers:
            opened[road] = VerbsRoad(
                PrefixStore("verbs", store),
                mesh.rank,
                mesh.size,
                peers,
                local_rank=_local_rank(mesh),
                timeout_s=setup_s,
                name_of=mesh.name_of,
            )
        elif road == "gloo":
            opened[road] = GlooRoad(PrefixStore("gloo", store), mesh.rank, mesh.size, timeout_s=setup_s)
    return opened


def is_forbidden(name: str) -> bool:
    """Whether the environment says `name=0`.

    Raises:
        ValueError: It says what is neither 0 nor 1.
    """
    value = os.environ.get(name, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{name} must be 0, to forbid it, or 1, got {value!r}")
    return value == "0"


def tell_all(store: Store, key: str, mesh: Mesh, mine: Any, timeout_s: float) -> list[Any]:
    """Collective: what each rank tells, by rank; plain values."""
    store.set(f"{key}{mesh.rank}", json.dumps(mine))
    try:
        store.wait([f"{key}{r}" for r in range(mesh.size)], timedelta(seconds=timeout_s))
    except RuntimeError as error:
        missing = [r for r in range(mesh.size) if not store.check([f"{key}{r}"])]
        raise CommTimeout(
            f"waited {timeout_s:.0f} s for ranks {missing} of the new group, which got stuck, or ended, making it"
        ) from error
    return [json.loads(store.get(f"{key}{r}")) for r in range(mesh.size)]


def _can_read(mesh: Mesh, peer: int, address: int) -> bool:
    if peer == mesh.rank or mesh.hosts[peer] != mesh.host:
        return False
    found = torch.empty(8, dtype=torch.uint8)
    try:
        read_from(mesh.pids[peer], address, found)
    except (OSError, CommError):
        return False
    return bool((found == peer).all())


def _local_rank(mesh: Mesh) -> int:
    return mesh.hosts[: mesh.rank].count(mesh.host)
