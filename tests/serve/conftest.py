"""The server that most tests ask."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serve.server import Server


@pytest.fixture(scope="session")
def server(checkpoint: Path) -> Iterator[Server]:
    """Two ranks, shared by the tests that leave it as they found it."""
    with Server("--model", str(checkpoint)) as server:
        yield server
