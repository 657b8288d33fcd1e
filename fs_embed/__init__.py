"""Prioritized embeddings: row-wise sharded tables whose communication overlaps with compute, bit for bit exact."""

__all__: list[str] = []
