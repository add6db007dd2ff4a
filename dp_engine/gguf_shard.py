"""A GGUF as a file of tensors under Hugging Face's names, dequantised when they are lent."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from dp_engine.gguf_file import GgufError
from dp_engine.gguf_llama import LlamaGguf
from dp_engine.shards import CheckpointError, Stored


class GgufShard:
    """Stored types are named `GGUF Q4_1` and so on."""

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError unless the file is a whole GGUF of a dense llama."""
        self.path = path
        try:
            self._gguf = LlamaGguf(path)
        except GgufError as error:
            raise CheckpointError(str(error)) from None
        self.header = self._gguf.header
        self._source = {theirs: ours for ours, theirs in self._gguf.hf_names.items()}
        self.tensors: Mapping[str, Stored] = {
            name: Stored(f"GGUF {tensor.kind.name}", tensor.shape, tensor.begin, tensor.end)
            for name, tensor in ((name, self._gguf.tensors[source]) for name, source in self._source.items())
        }

    def lend(self, name: str, index: int | None = None) -> Tensor:
        """In float32, rows of q and k in Hugging Face's order."""
        tensor = torch.from_numpy(self._gguf.load_for_hf(self._source[name]))
        return tensor if index is None else tensor[index]

    def take_back(self, name: str, index: int | None = None) -> None:
        """It was a copy."""

    def will_need(self, name: str, index: int | None = None) -> None:
        """Dequantising takes longer than reading."""
