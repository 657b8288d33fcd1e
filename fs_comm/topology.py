"""Which road joins which two ranks: numbers and names only, so every rank comes to the same plan by itself."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from fs_comm.errors import CommError

TRANSPORTS = ("shm", "verbs", "gloo")


@dataclass(frozen=True)
class Route:
    """Between two ranks, both ways."""

    transport: str
    """One of `TRANSPORTS`."""
    road: str
    """`"attach"` or `"staged"` of shm; else the transport."""
    reason: str
    """Why it serves, and why nothing preferred to it does."""


@dataclass(frozen=True)
class Site:
    """What a rank says of itself when the group is made."""

    host: str
    """Equal where ranks share memory and Unix sockets."""
    reads: Collection[int] = ()
    """Ranks whose memory it could read."""
    verbs: str = ""
    """What of its RDMA devices it would use."""
    no_verbs: str | None = None
    """Why it can use none; None where it can."""


def plan_route(sites: Sequence[Site], a: int, b: int, transports: Sequence[str]) -> Route:
    """The first of `transports` that serves ranks a and b, the same for (b, a).

    Raises:
        CommError: None does.
    """
    a, b = sorted((a, b))
    same_host = sites[a].host == sites[b].host
    why_not: list[str] = []
    for transport in transports:
        road, reason = transport, ""
        if transport == "shm" and same_host:
            attach = b in sites[a].reads and a in sites[b].reads
            road = "attach" if attach else "staged"
            reason = "one host" if attach else "one host, whose kernel does not let the two read each other's memory"
        elif transport == "shm":
            why_not.append("shm: they are on several hosts")
            continue
        elif transport == "verbs":
            refusals = [f"rank {r} of the group: {sites[r].no_verbs}" for r in (a, b) if sites[r].no_verbs is not None]
            if refusals:
                why_not.append(f"verbs: {'; '.join(refusals)}")
                continue
            reason = f"{sites[a].verbs} and {sites[b].verbs}"
        return Route(transport, road, "; ".join(filter(None, [reason, *why_not])))
    raise CommError(
        f"no transport of {list(transports)} serves ranks {a} and {b} of the group: "
        f"{'; '.join(why_not) or 'none is named'}"
    )


def needs_verbs(hosts: Sequence[str], transports: Sequence[str]) -> bool:
    """Whether any two ranks come to ask for verbs, so that all look for devices."""
    if "verbs" not in transports:
        return False
    before = transports[: transports.index("verbs")]
    if "gloo" in before or len(hosts) < 2:
        return False
    return "shm" not in before or len(set(hosts)) > 1


def summary(names: Collection[str], order: Sequence[str]) -> str:
    """Such as `shm+gloo`; `none` where there is no peer."""
    return "+".join(name for name in order if name in names) or "none"
