"""Which GID, the address that peers reach a RoCE port at, out of the many that a port has.

A port's table holds one entry for each address of its network interface in each version of RoCE. Taking the wrong one
is the commonest fault of RDMA set-ups: packets go out and no answer comes. The order of preference is RoCE v2 over v1
(v1 does not leave its Ethernet segment), then IPv4, then IPv6 that can be routed; link-local addresses never, since
the interface that they belong to is not part of them. On InfiniBand, entry 0 is the port's own, and the one to use.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv6Address
from pathlib import Path

from fs_comm.transports.verbs_ports import SYSFS, LinkLayer, RdmaPort

ROCE_V2 = "RoCE v2"
INDEX_VARIABLE = "FS_COMM_VERBS_GID_INDEX"


@dataclass(frozen=True)
class GidEntry:
    """One row of a port's GID table; `kind` is the kernel's word: "RoCE v2" or "IB/RoCE v1"."""

    index: int
    address: IPv6Address
    kind: str
    netdev: str

    def __str__(self) -> str:
        shown = self.address.ipv4_mapped or self.address
        return f"{self.index}: {shown} ({', '.join(filter(None, (self.kind, self.netdev)))})"


def read_gid_table(port: RdmaPort, sysfs: Path = SYSFS) -> list[GidEntry]:
    """The entries in use, by index. An unused entry is all zeros, and reading its type fails."""
    folder = sysfs / port.device / "ports" / str(port.number)
    table: list[GidEntry] = []
    for row in sorted((folder / "gids").glob("[0-9]*"), key=lambda p: int(p.name)):
        try:
            text = row.read_text().strip()
            if not text.strip("0:"):
                continue  # of the hundreds of rows that a table may have, nearly all
            address = IPv6Address(text)
            kind = (folder / "gid_attrs" / "types" / row.name).read_text().strip()
        except (OSError, ValueError):
            continue
        table.append(GidEntry(int(row.name), address, kind, _netdev(folder, row.name)))
    return table


def choose_gid(table: Sequence[GidEntry], *, link_layer: LinkLayer, index: int | None = None) -> GidEntry:
    """The entry to use: the one at `index` where the user says so, else the best (see the module's text).

    Raises:
        ValueError: `index` is not in use, or no entry can be reached from another host; the text shows the table.
    """
    shown = "; ".join(map(str, table)) or "empty"
    if index is not None:
        for entry in table:
            if entry.index == index:
                return entry
        raise ValueError(f"GID index {index} is not in use on this port; its table: {shown}")
    if link_layer == "InfiniBand" and table:
        return table[0]
    ranked = sorted((rank, e.index, e) for e in table if (rank := _preference(e)) is not None)
    if not ranked:
        raise ValueError(
            "the port needs a GID that peers can reach (IPv4, or IPv6 other than link-local); "
            f"give its interface an address, or choose one by {INDEX_VARIABLE}; its table: {shown}"
        )
    return ranked[0][2]


def wanted_gid_index(environ: Mapping[str, str]) -> int | None:
    """The index that the user asked for in `FS_COMM_VERBS_GID_INDEX`; None where it is not set."""
    text = environ.get(INDEX_VARIABLE, "")
    if not text:
        return None
    if not text.isdecimal():
        raise ValueError(f"{INDEX_VARIABLE} must be the index of a row of the port's GID table, got {text!r}")
    return int(text)


def _preference(entry: GidEntry) -> tuple[int, int] | None:
    """Smaller is better; None for an address that another host cannot reach."""
    if entry.address.ipv4_mapped:
        if entry.address.ipv4_mapped.is_link_local:
            return None
        family = 0
    elif entry.address.is_link_local or entry.address.is_multicast:
        return None
    else:
        family = 1
    return (0 if entry.kind == ROCE_V2 else 1), family


def _netdev(folder: Path, index: str) -> str:
    try:
        return (folder / "gid_attrs" / "ndevs" / index).read_text().strip()
    except OSError:
        return ""
