"""Fixtures of the server tests. Servers use every core, so these and the other folder's run on one worker."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoints import write_mixtral
from tests.serve.server import Server


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.xdist_group("servers"))


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random fp32 Mixtral with a tokenizer and a chat template."""
    return write_mixtral(tmp_path_factory.mktemp("checkpoint") / "tiny", with_tokenizer=True)


@pytest.fixture(scope="session")
def server(checkpoint: Path) -> Iterator[Server]:
    """Two ranks, shared by the tests that leave it as they found it."""
    with Server("--model", str(checkpoint)) as server:
        yield server
