"""What a rank tells each peer so that it can be written to, and what both then agree on. Values only."""

import dataclasses
import json
from dataclasses import dataclass
from ipaddress import IPv6Address

from fs_comm.transports.verbs_binding import Path

PROTOCOL = 1


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """One end of a link, as its owner describes it to the peer."""

    protocol: int = PROTOCOL
    port: str  # "mlx5_0:1", for messages
    gid: str
    gid_index: int
    gid_kind: str
    link_layer: str
    lid: int
    mtu: int
    queue_pair: int
    packet_number: int
    address: int  # of the peer's receive slots, in its own process
    key: int
    slots: int
    slot_bytes: int

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Endpoint":
        """Refuses another protocol by name, before its fields are looked at."""
        fields = json.loads(text)
        if fields.get("protocol") != PROTOCOL:
            raise ValueError(
                f"peers must speak version {PROTOCOL} of the link protocol, got {fields.get('protocol')}: "
                "install the same version of this package on all hosts"
            )
        return cls(**fields)

    def __str__(self) -> str:
        address = IPv6Address(self.gid)
        return f"{self.port} GID {self.gid_index} ({address.ipv4_mapped or address}, {self.gid_kind})"


def path_between(mine: Endpoint, peers: Endpoint, *, port: int, ack_timeout: int, retries: int) -> Path:
    """The connection's parameters on my side.

    Raises:
        ValueError: the two ends cannot speak to each other: their link layers or versions of RoCE differ.
    """
    for what in ("link_layer", "gid_kind"):
        ours, theirs = getattr(mine, what), getattr(peers, what)
        if ours != theirs:
            raise ValueError(
                f"both ends of a link need the same {what}: {mine} has {ours!r}, the peer's {peers} has {theirs!r}"
            )
    return Path(
        port=port,
        peer_queue_pair=peers.queue_pair,
        peer_packet_number=peers.packet_number,
        packet_number=mine.packet_number,
        peer_gid=IPv6Address(peers.gid).packed,
        peer_lid=peers.lid,
        gid_index=mine.gid_index,
        routed=mine.link_layer != "InfiniBand",
        mtu=min(mine.mtu, peers.mtu),
        ack_timeout=ack_timeout,
        retries=retries,
    )


def slot_plan(
    num_peers: int, *, budget_bytes: int, max_message_bytes: int, slots: int, slot_bytes: int
) -> tuple[int, int]:
    """(slots, slot bytes) of each direction of each link, so that all links' staging stays within the budget.

    Smaller slots first, down to 64 KiB, then fewer, down to two: small messages cost more time each, but one slot alone
    could not be filled while the one before it travels. Ranks may come to different plans (other adapters, other
    numbers of peers): each link takes the smaller of its two ends'.
    """
    smallest = 64 << 10
    slot_bytes = min(slot_bytes, max_message_bytes)
    while 2 * num_peers * slots * slot_bytes > budget_bytes and slot_bytes > smallest:
        slot_bytes //= 2
    while 2 * num_peers * slots * slot_bytes > budget_bytes and slots > 2:
        slots -= 1
    if 2 * num_peers * slots * slot_bytes > budget_bytes:
        raise ValueError(
            f"verbs links to {num_peers} peers need at least {2 * num_peers * slots * slot_bytes} bytes of staging, "
            f"staging_bytes allows {budget_bytes}: raise it"
        )
    return slots, slot_bytes
