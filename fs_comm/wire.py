"""What ranks say to each other about an operation: one fixed header, then data or text where the header says so."""

import struct
from dataclasses import dataclass
from enum import IntEnum

import torch

_FORMAT = struct.Struct("<4sBBHIQqqQ")
HEADER_BYTES = _FORMAT.size
_MAGIC = b"FSC1"


class Kind(IntEnum):
    DATA = 1  # an operation begins: the part for the receiver is here, or at an address, or comes another way
    DONE = 2  # the sender has taken the receiver's part, or the next slot of it
    FAILED = 3  # the sender has given the group up; the payload says why: a class of error, a line break, its text
    BYE = 4  # the sender leaves in good order
    FILLED = 5  # the sender has filled its next slot of shared memory for the receiver


class Op(IntEnum):
    ALL_GATHER = 1
    ALL_TO_ALL = 2


# Numbers that all versions of torch agree on.
_DTYPES = sorted((d for d in vars(torch).values() if isinstance(d, torch.dtype)), key=str)
DTYPE_NUMBER = {d: n for n, d in enumerate(dict.fromkeys(_DTYPES))}
DTYPE_NAME = {n: str(d).removeprefix("torch.") for d, n in DTYPE_NUMBER.items()}


@dataclass(frozen=True, slots=True)
class Header:
    kind: Kind
    sequence: int
    op: int = 0
    dtype: int = 0
    num_bytes: int = 0
    """What the sender has for the receiver."""
    expected: int = 0
    """What the sender thinks that the receiver has for it."""
    address: int = 0
    """Of the sender's memory that holds it."""
    payload: int = 0
    """Bytes that follow."""

    def pack(self) -> bytes:
        return _FORMAT.pack(
            _MAGIC,
            self.kind,
            self.op,
            self.dtype,
            self.payload,
            self.sequence,
            self.num_bytes,
            self.expected,
            self.address,
        )

    @classmethod
    def unpack(cls, data: bytes) -> "Header":
        magic, kind, op, dtype, payload, sequence, num_bytes, expected, address = _FORMAT.unpack(data)
        if magic != _MAGIC:
            raise ValueError(f"a message must begin with {_MAGIC!r}, got {magic!r}: another version at the other end?")
        return cls(Kind(kind), sequence, op, dtype, num_bytes, expected, address, payload)

    def operation(self) -> str:
        """As people call it: `all_to_all of float32`."""
        name = Op(self.op).name.lower() if self.op in Op._value2member_map_ else f"operation {self.op}"
        return f"{name} of {DTYPE_NAME.get(self.dtype, 'an unknown dtype')}"
