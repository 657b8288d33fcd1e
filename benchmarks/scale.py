"""Balancing at sizes that no test machine has, SIMULATED: `python -m benchmarks.scale --ranks 64 4096 --json`.

Real here: the plans, of synthetic global batches (lognormal lengths of median 3,500 and σ 0.9, clipped at 21,000), and
the time that planning took on this machine's processor. Simulated: what a rank computes, which is the quadratic cost of
its samples scaled to `--mean-step-ms`, with `--jitter` of its own; and the network, by α-β links: a message takes α
seconds and its bytes over β. Ranks of one host share memory, others go through a network card of their own.

    stage 1, ring AllGather of 40 bytes a sample    (R − 1)·(α + 40·B/β)
    stage 3, AllToAll of the samples that move      busiest rank: peers·α + bytes/β, sends and receives side by side
    step                                            the slowest rank's compute; others wait
    exchange                                        stage 1, plan and stage 3: hidden while it is shorter than a step
"""

import argparse
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.partition import make_world
from benchmarks.report import Row, publish, row
from fs_data import RuntimeInfo, WorldBatch
from fs_data.partition import make, report

VARIANTS = {"as dealt": make("identity"), "fbs": make("fbs"), "lpt": make("lpt"), "few_moves": make("few_moves")}
_ROW_BYTES = 40  # a sample's numbers in stage 1
UNITS = {
    "straggler_share": "1", "step_ms": "ms", "exchange_ms": "ms", "plan_ms": "ms", "network_ms": "ms",
    "bytes_moved_share": "1", "between_hosts_share": "1",
}  # fmt: skip


@dataclass(frozen=True)
class Link:
    """An α-β link."""

    alpha_s: float
    """Of a message."""
    beta_bytes_s: float

    def seconds(self, messages: NDArray[np.int64], num_bytes: NDArray[np.int64]) -> NDArray[np.float64]:
        return messages * self.alpha_s + num_bytes / self.beta_bytes_s


@dataclass(frozen=True)
class Cluster:
    ranks_a_host: int
    network: Link
    memory: Link

    def gather_s(self, ranks: int, bytes_a_rank: int) -> float:
        """A ring's slowest link is the network where there is more than one host."""
        link = self.network if ranks > self.ranks_a_host else self.memory
        return (ranks - 1) * (link.alpha_s + bytes_a_rank / link.beta_bytes_s)

    def shuffle_s(self, world: WorldBatch, destination: NDArray[np.int64]) -> tuple[float, int]:
        """Of the busiest rank; and the bytes that leave their host."""
        moves = np.flatnonzero(world.rank != destination)
        source, target, num_bytes = world.rank[moves], destination[moves], world.num_bytes[moves]
        across = source // self.ranks_a_host != target // self.ranks_a_host
        slowest = 0.0
        for mine in (source, target):  # sends and receives overlap
            seconds = np.zeros(world.world_size)
            for link, those in ((self.network, across), (self.memory, ~across)):
                pairs = np.unique(source[those] * world.world_size + target[those])
                peers = np.bincount(
                    pairs // world.world_size if mine is source else pairs % world.world_size,
                    minlength=world.world_size,
                )
                amount = np.zeros(world.world_size, np.int64)
                np.add.at(amount, mine[those], num_bytes[those])
                seconds += link.seconds(peers, amount)
            slowest = max(slowest, float(seconds.max()))
        return slowest, int(num_bytes[across].sum())


def simulate(options: argparse.Namespace, ranks: int, cluster: Cluster) -> list[Row]:
    figures: dict[str, dict[str, list[float]]] = {name: {m: [] for m in UNITS} for name in VARIANTS}
    runtime = RuntimeInfo(host=np.arange(ranks) // cluster.ranks_a_host)
    for seed in range(options.seeds):
        world = make_world("lognormal", ranks, options.batch, seed)
        # The same ranks are slow for every variant of a step.
        jitter = np.random.default_rng((seed, 1)).normal(1, options.jitter, ranks).clip(0.5, 2)
        for name, partition in VARIANTS.items():
            partition(world, runtime)  # warm
            start = time.perf_counter()
            destination = partition(world, runtime)
            plan_s = time.perf_counter() - start if name != "as dealt" else 0.0
            load = np.zeros(ranks, np.int64)
            np.add.at(load, destination, world.cost)
            compute_ms = load / load.mean() * options.mean_step_ms * jitter
            shuffle_s, across = cluster.shuffle_s(world, destination)
            gather_s = cluster.gather_s(ranks, _ROW_BYTES * options.batch) if name != "as dealt" else 0.0
            of = figures[name]
            of["straggler_share"].append(1 - float(compute_ms.mean() / compute_ms.max()))
            of["step_ms"].append(float(compute_ms.max()))
            of["plan_ms"].append(1000 * plan_s)
            of["network_ms"].append(1000 * (gather_s + shuffle_s))
            of["exchange_ms"].append(1000 * (gather_s + plan_s + shuffle_s))
            of["bytes_moved_share"].append(report(world, destination).bytes_moved_share)
            of["between_hosts_share"].append(across / int(world.num_bytes.sum()))
    return [row(name, ranks, m, UNITS[m], of[m]) for name, of in figures.items() for m in UNITS]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 256, 1024, 4096])
    parser.add_argument("--batch", type=int, default=128, help="samples a rank")
    parser.add_argument("--seeds", type=int, default=5, help="global batches")
    parser.add_argument("--mean-step-ms", type=float, default=300.0, help="compute of a rank with the mean cost")
    parser.add_argument("--jitter", type=float, default=0.01, help="standard deviation of a rank's own pace")
    parser.add_argument("--alpha-us", type=float, default=10.0, help="of a message between hosts")
    parser.add_argument("--beta-gb-s", type=float, default=25.0, help="of a rank's network card")
    parser.add_argument("--ranks-a-host", type=int, default=8)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    cluster = Cluster(
        options.ranks_a_host,
        Link(options.alpha_us * 1e-6, options.beta_gb_s * 1e9),
        Link(2e-6, 2 * options.beta_gb_s * 1e9),
    )
    print("SIMULATED compute and network; plans and planning times are real. Seeds vary the samples.\n")
    rows = [r for ranks in options.ranks for r in simulate(options, ranks, cluster)]
    figures: dict[str, Any] = {"simulated": True, "mean_step_ms": options.mean_step_ms, "jitter": options.jitter}
    for ranks in options.ranks:
        figures[str(ranks)] = {
            name: {r.metric: r.p50 for r in rows if r.variant == name and r.x == ranks} for name in VARIANTS
        }
    publish("scale", rows, figures, as_json=options.json)


if __name__ == "__main__":
    main()
