"""Values as bytes: how wide they are, and the widest words that they can be moved in."""

import torch
from torch import Tensor

_WORDS = {16: torch.complex128, 8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def value_bytes(x: Tensor) -> int:
    """The size of one value of `x` `(N, ...)`, also where N is 0."""
    size = x.element_size()
    for n in x.shape[1:]:
        size *= n
    return size


def narrowest_word(*tensors: Tensor) -> int:
    """The widest of 16, 8, 4, 2 and 1 bytes that all values, and the addresses where they lie, are multiples of."""
    bits = 16
    for x in tensors:
        bits |= x.data_ptr() | value_bytes(x)
    return bits & -bits


def dense(x: Tensor) -> Tensor:
    """`x` as its bytes tell it: contiguous, and with no conjugate or negative still to be taken."""
    return x.resolve_conj().resolve_neg().contiguous()


def as_words(x: Tensor, num_bytes: int) -> Tensor:
    """The contiguous `x` as flat words of so many bytes, which only copies may touch."""
    # A single element may have any stride, and only a stride of 1 can be seen as bytes.
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8).view(_WORDS[num_bytes])
