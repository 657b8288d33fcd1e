"""Data-loader-centric balancing of sequence batches across ranks, and parquet histories to feed it."""

from fs_data.jagged import JaggedColumn

__all__ = ["JaggedColumn"]
