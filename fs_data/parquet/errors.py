"""What can be wrong with a file, said with the place: file, row group, column, row."""


class ParquetError(ValueError):
    """A file that cannot be read as histories, or that changed under a saved state."""
