"""Data-loader-centric balancing of sequence batches across ranks, and parquet histories to feed it."""

__all__: list[str] = []
