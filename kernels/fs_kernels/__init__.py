"""Operations on jagged tensors: a torch reference each, and a Triton kernel beside it."""

__all__: list[str] = []
