"""AllGather and AllToAll that use no streaming multiprocessor: copy engine, host transport, copy engine."""

__all__: list[str] = []
