"""Any global batch of a past run, rebuilt in one process from its plan journal and what the loaders gave."""

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any

import numpy as np

from fs_data import cost as costs
from fs_data import partition
from fs_data.column import Part, join
from fs_data.cost import CostModel
from fs_data.journal import Replay
from fs_data.local import Local, Measures, RowField, features_of, prepare, sums_of_candidates
from fs_data.partition import Partitioner
from fs_data.planner import Planner
from fs_data.schema import BatchSchema


def rebuild(
    journal: str | PathLike[str],
    step: int,
    batches: Sequence[Any],
    *,
    schema: BatchSchema | Mapping[str, Any] | None = None,
    partitioner: str | Partitioner = "few_moves",
    max_tokens: int | None = None,
    max_samples: int | None = None,
    cost: str | CostModel | None = None,
    measures: Measures | None = None,
    hosts: Sequence[int] = (),
) -> list[Any]:
    """What each rank trained on at `step`, by rank.

    Args:
        journal: The file that `BalancedDataLoader(..., journal=…)` wrote.
        step: Counts the batches of the run.
        batches: What each rank's loader gave for that step (its `batch` in the journal); None where it had ended.
        schema, partitioner, max_tokens, max_samples, cost, measures: As in the run. Runs with `defer` cannot be rebuilt
            step by step.
        hosts: The host of each rank, where there were several.

    Raises:
        Disagreement: The plan that follows from `batches` is not the one that the run had.
    """
    replay = Replay(journal)
    if len(batches) != replay.world_size or all(b is None for b in batches):
        raise ValueError(
            f"batches must be those of all {replay.world_size} ranks, with one at least, got {len(batches)}"
        )
    declared = schema if isinstance(schema, BatchSchema) else BatchSchema(schema)
    measures = measures or Measures()
    bound = declared.bind(next(b for b in batches if b is not None))
    nothing = Local(np.zeros((0, measures.width), np.int64))
    locals_ = [nothing if b is None else prepare(b, bound, measures) for b in batches]
    content = [sums_of_candidates(x.content_lengths, x.rows[:, RowField.CANDIDATES]) for x in locals_]
    features = features_of(
        [x.rows for x in locals_], np.concatenate(content, axis=1), has_groups=bound.group is not None
    )
    world_size = replay.world_size
    planner = Planner(
        partition.make(partitioner, max_tokens=max_tokens, max_samples=max_samples),
        costs.make(cost),
        world_size=world_size,
        host=np.asarray(hosts, np.int64),
        replay=replay,
    )
    unknown = np.full(world_size, -1)
    plan = planner.plan(step, features, unknown, np.zeros((world_size, 4), np.int64))
    rebuilt: list[Any] = []
    for rank, local in enumerate(locals_):
        sources = [(x.columns, plan.sent(peer, rank)) for peer, x in enumerate(locals_) if x.columns is not None]
        columns = [join(spec, [Part(c[i], index) for c, index in sources]) for i, spec in enumerate(bound.specs)]
        rebuilt.append(bound.join(columns, local.tree))
    return rebuilt
