"""Flags that cannot work are refused by name, before anything starts."""

import math

import pytest

from examples.settings import Settings


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"log_every": 0}, "--log-every must be at least 1, got 0"),
        ({"checkpoint_every": -1}, "--checkpoint-every must be at least 0, got -1"),
        ({"num_items": 0}, "--num-items must be at least 1, got 0"),
        ({"dim": 0}, "--dim must be at least 1, got 0"),
        ({"dim": 8, "heads": 3}, "--dim must be a multiple of --heads, got 8 and 3"),
        ({"seed": -1}, "--seed must be at least 0, got -1"),
        ({"embedding_lr": -1.0}, "--embedding-lr must be a number above 0, got -1.0"),
        ({"lr": math.nan}, "--lr must be a number above 0, got nan"),
        ({"timeout_s": 0.0}, "--timeout-s must be a number above 0, got 0.0"),
        ({"dropout": 1.0}, "--dropout must be from 0 to below 1, got 1.0"),
        ({"max_length": 1, "evaluate": True}, "--evaluate needs a --max-length of at least 2, got 1"),
    ],
)
def test_a_flag_that_cannot_work_is_named(flags: dict[str, float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Settings(**{"data": "x", "num_items": 5, **flags})  # pyright: ignore[reportArgumentType]
