"""One self-contained HTML page about a file of histories: lengths, sparsity, stragglers and collisions."""

from fs_data.report.page import page

__all__ = ["page"]
