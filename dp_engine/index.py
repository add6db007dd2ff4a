"""Which files make up a checkpoint, and which tensor lies in which of them."""

import json
from pathlib import Path

from dp_engine.shards import CheckpointError, SafetensorsShard, Shard

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
GGUF = "model.gguf"


def open_shards(model_dir: Path) -> tuple[dict[str, Shard], dict[str, str]]:
    """The shards by file name, and tensor name -> file name: from the index, or from the single file without one."""
    index, single, gguf = (model_dir / name for name in (INDEX, SINGLE, GGUF))
    if not index.is_file():
        if not single.is_file() and not gguf.is_file():
            raise CheckpointError(f"model directory {model_dir} has neither {INDEX} nor {SINGLE} nor {GGUF}")
        shard: Shard = SafetensorsShard(single) if single.is_file() else _gguf_shard(gguf)
        return {shard.path.name: shard}, dict.fromkeys(shard.tensors, shard.path.name)
    files = _weight_map(index)
    shards: dict[str, Shard] = {name: SafetensorsShard(model_dir / name) for name in sorted(set(files.values()))}
    for name, file in files.items():
        if name not in shards[file].tensors:
            raise CheckpointError(f"{model_dir / file}: tensor {name} is missing, although {INDEX} places it there")
    return shards, files


def _gguf_shard(path: Path) -> Shard:
    from dp_engine.gguf_shard import GgufShard  # imports what nothing else needs

    return GgufShard(path)


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor name -> file name."""
    try:
        files = json.loads(index.read_bytes())["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{index} is no safetensors index: {type(error).__name__}: {error}") from None
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise CheckpointError(f"{index}: weight_map must map tensors to files")
    for name, file in files.items():
        if Path(file).name != file:
            raise CheckpointError(f"{index}: tensor {name} is placed in {file!r}, outside the model directory")
    return files
