"""One total order of samples for all partitioners: most expensive first, ties by global index."""

import numpy as np
from numpy.typing import NDArray

_DIGIT_BITS = 16  # numpy sorts 16-bit integers by radix: stable, and three passes beat one sort of int64


def most_expensive_first(cost: NDArray[np.int64]) -> NDArray[np.int64]:
    """`(N,)`: the samples from the highest `cost` (N,), which is at least 0, to the lowest."""
    if not len(cost):
        return np.zeros(0, np.int64)
    rest = cost.max() - cost
    num_bits = int(rest.max()).bit_length()
    order = np.argsort((rest & 0xFFFF).astype(np.uint16), kind="stable")
    for shift in range(_DIGIT_BITS, num_bits, _DIGIT_BITS):
        digit = ((rest >> shift) & 0xFFFF).astype(np.uint16)
        order = order[np.argsort(digit[order], kind="stable")]
    return order
