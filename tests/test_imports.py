"""Importing the packages needs torch, numpy and pyarrow, does nothing, and shows what `__all__` says."""

import importlib
import subprocess
import sys

import pytest

PACKAGES = ["fs_comm", "fs_data", "fs_embed", "fs_kernels"]
_ONLY = """
import sys

class Missing:
    optional = {"torchrec", "torchdata", "triton", "numba", "duckdb", "typer", "rich", "tensordict", "pyverbs",
                "ibverbs", "fbgemm_gpu", "lightning", "accelerate", "matplotlib", "s3fs", "aiohttp", "pandas", "scipy"}
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.optional:
            raise ModuleNotFoundError(f"{name} is not installed here", name=name)

sys.meta_path.insert(0, Missing())
import fs_data, fs_embed, fs_comm, fs_kernels
import logging, threading
assert threading.active_count() == 1, threading.enumerate()
assert not logging.getLogger().handlers
"""


def test_torch_numpy_and_pyarrow_are_enough() -> None:
    done = subprocess.run([sys.executable, "-c", _ONLY], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", PACKAGES)
def test_all_lists_what_there_is(name: str) -> None:
    package = importlib.import_module(name)
    assert package.__all__ == sorted(package.__all__, key=lambda n: (not n.isupper(), n))
    assert all(hasattr(package, public) for public in package.__all__)
