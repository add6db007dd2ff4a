"""What tests share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

USE_EVERY_CORE = tuple(Path(__file__).parent / folder for folder in ("serve", "cluster"))


@pytest.hookimpl(tryfirst=True)  # before the marks are read
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Servers and clusters use every core: their tests run on one worker, one after the other."""
    for item in items:
        if any(folder in item.path.parents for folder in USE_EVERY_CORE):
            item.add_marker(pytest.mark.xdist_group("servers"))


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random fp32 Mixtral with a tokenizer and a chat template."""
    from tests.checkpoints import write_mixtral  # imports transformers

    target = tmp_path_factory.mktemp("checkpoint") / "tiny"
    return write_mixtral(target, with_tokenizer=True, max_position_embeddings=4096)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """As on the ranks: with more, matrix products are cut differently and end in other last bits."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
