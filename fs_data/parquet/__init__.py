"""Histories in parquet files, dealt to ranks and workers, resumed exactly."""

from fs_data.parquet.board import ParquetStats
from fs_data.parquet.dataset import ParquetUIHDataset
from fs_data.parquet.errors import ParquetError

__all__ = ["ParquetError", "ParquetStats", "ParquetUIHDataset"]
