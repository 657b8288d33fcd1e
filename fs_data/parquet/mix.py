"""How many rows of each source the next batch takes, so that all batches together keep the quotas. Pure."""

from collections.abc import Sequence


def shares(quotas: Sequence[float], yielded: Sequence[int], num_rows: int) -> list[int]:
    """Rows of each source among the next `num_rows`; their sum is `num_rows`.

    Rounding does not add up: what a source was short of in earlier batches, it gets in later ones.

    Args:
        quotas: Not negative; 0 takes none. Only their ratios count.
        yielded: Rows that each source gave so far; those of sources with quota 0 do not count.
    """
    if sum(q > 0 for q in quotas) == 1:
        return [num_rows if q else 0 for q in quotas]
    total = sum(quotas)
    so_far = sum(y for y, q in zip(yielded, quotas, strict=True) if q)
    due = [q / total * (so_far + num_rows) - y if q else 0.0 for q, y in zip(quotas, yielded, strict=True)]
    taken = [0] * len(quotas)
    for _ in range(num_rows):
        # The most overdue source, the first of equals.
        source = max(range(len(quotas)), key=lambda s: (due[s] - taken[s] if quotas[s] else -float("inf"), -s))
        taken[source] += 1
    return taken
