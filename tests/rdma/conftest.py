"""Which bindings there are to test. Everything in this folder needs RDMA devices, and is marked so."""

import os
from pathlib import Path

import pytest

from fs_comm.transports.verbs_binding import BindingName, NoBinding, load_binding
from fs_comm.transports.verbs_ports import list_ports

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.rdma)


@pytest.fixture(params=["ibverbs", "pyverbs"])
def bindings(request: pytest.FixtureRequest) -> list[str]:
    """The binding of all ranks: rank r takes entry r modulo the length."""
    return [loaded(request.param)]


@pytest.fixture(params=["ibverbs", "pyverbs", "mixed"])
def mixed_bindings(request: pytest.FixtureRequest) -> list[str]:
    """As `bindings`, and both in turn too."""
    names = ["ibverbs", "pyverbs"] if request.param == "mixed" else [request.param]
    return [loaded(name) for name in names]


@pytest.fixture
def any_binding() -> list[str]:
    """The binding that is taken by default, where a test is about something else."""
    return [loaded(None)]


def loaded(name: BindingName | None) -> str:
    try:
        return load_binding(name).name  # here, so that the forks find it imported
    except NoBinding as error:
        pytest.skip(str(error))


@pytest.fixture
def two_ports() -> list[str]:
    usable = [str(port) for port in list_ports() if port.unusable is None]
    if len(usable) < 2:
        pytest.skip(f"needs two usable RDMA ports, this machine has {usable}")
    return usable[:2]


@pytest.fixture
def guest() -> None:
    """For tests that change the machine's network: only in the guest, which is thrown away afterwards."""
    if os.environ.get("RDMA_GUEST") != "1":
        pytest.skip("changes network settings, so it runs only where RDMA_GUEST=1 says that this is a guest")
