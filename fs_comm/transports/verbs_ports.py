"""Which RDMA ports this machine has, read from sysfs alone, and which of them a rank uses.

No binding is needed for this, so a machine without RDMA is told apart from a machine without a binding, and a device
that the kernel lists but this process may not open (a container without /dev/infiniband) is named as such.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

SYSFS = Path("/sys/class/infiniband")
UVERBS = Path("/dev/infiniband")

LinkLayer = Literal["Ethernet", "InfiniBand"]


@dataclass(frozen=True, kw_only=True)
class RdmaPort:
    """One port of one device; `unusable` says why it cannot carry our traffic, None where it can."""

    device: str
    number: int
    link_layer: LinkLayer
    unusable: str | None = None

    def __str__(self) -> str:
        return f"{self.device}:{self.number}"


def list_ports(sysfs: Path = SYSFS, uverbs: Path = UVERBS) -> list[RdmaPort]:
    """All ports of all devices in the order of their names; empty where the kernel knows no RDMA device."""
    if not sysfs.is_dir():
        return []
    found: list[RdmaPort] = []
    for device in sorted(sysfs.iterdir()):
        for port in sorted((device / "ports").glob("[0-9]*"), key=lambda p: int(p.name)):
            found.append(
                RdmaPort(
                    device=device.name,
                    number=int(port.name),
                    link_layer="InfiniBand" if _read(port / "link_layer") == "InfiniBand" else "Ethernet",
                    unusable=_why_unusable(device, port, uverbs),
                )
            )
    return found


def choose_port(ports: Sequence[RdmaPort], *, local_rank: int = 0, wanted: str | None = None) -> RdmaPort:
    """The port for a rank: the wanted one ("mlx5_0" or "mlx5_0:1"), else the usable ones dealt out by local rank.

    Raises:
        ValueError: there is no such port, or none that is usable; the text lists what there is and why not.
    """
    named = [p for p in ports if wanted in (None, p.device, str(p))]
    usable = [p for p in named if p.unusable is None]
    if usable:
        return usable[0 if wanted else local_rank % len(usable)]
    what = f"RDMA port {wanted!r}" if wanted else "a usable RDMA port"
    have = "; ".join(f"{p} ({p.unusable or 'usable'})" for p in ports) or "none"
    raise ValueError(f"{what} is needed, this machine has: {have}")


def wanted_port(environ: Mapping[str, str]) -> str | None:
    """The port that the user asked for in `FS_COMM_VERBS_DEVICE`."""
    return environ.get("FS_COMM_VERBS_DEVICE") or None


def _why_unusable(device: Path, port: Path, uverbs: Path) -> str | None:
    state = _read(port / "state")  # "4: ACTIVE"
    if not state.endswith("ACTIVE"):
        return f"its state is {state or 'unknown'!r}, not ACTIVE: is the link up?"
    kind = _read(device / "node_type")  # "1: CA", "4: RNIC"
    if not kind.startswith("1:"):
        return f"its node type is {kind or 'unknown'!r}: only a channel adapter can write with immediate data"
    if not uverbs.is_dir() or not any(uverbs.glob("uverbs*")):
        return f"{uverbs}/uverbs* is missing: load ib_uverbs, or give the container this device"
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
