"""Which parts of a checkpoint a rank takes; and that ranks together load every expert once, unchanged."""

import hashlib
import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dp_engine.checkpoint import SINGLE, Checkpoint
from dp_engine.owned import num_bytes, owned_parts, taking_order
from dp_engine.shards import Stored
from ep.placement import ExpertPlacement, Placements
from tests.unit.test_fp8 import CONFIG, quantized

EXPERTS, ROWS, COLUMNS, LAYERS = 5, 6, 10, 2
PARTS = ("gate_proj", "down_proj")


def stored(*names: str, shape: tuple[int, ...] = (4, 2)) -> dict[str, Stored]:
    return {name: Stored("U8", shape, 8 * at, 8 * at + 8) for at, name in enumerate(names)}


def test_names_decide_what_is_owned() -> None:
    own = [
        "model.embed_tokens.weight",
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.3.mlp.shared_experts.w.weight",
    ]
    tensors = stored(
        *own,
        "model.layers.3.mlp.experts.0.w1.weight",
        "model.layers.3.block_sparse_moe.experts.3.w1.weight",
        "model.layers.12.mlp.experts.gate_up_proj",
        "model.layers.13.mlp.experts.0.w1.weight",
        "model.layers.13.eh_proj.weight",
    )
    layers = (ExpertPlacement(4, (1, 3), (3, 0, 1, 2)), ExpertPlacement(4, (2, 4), (1, 3, 0, 1, 2, 3)))
    parts = owned_parts(tensors, Placements(layers), 0)
    assert parts == dict.fromkeys(own, (None,)) | {
        "model.layers.3.block_sparse_moe.experts.3.w1.weight": (None,),
        "model.layers.12.mlp.experts.gate_up_proj": (1, 3),
    }
    assert num_bytes(tensors, parts) == 4 * 8 + 2 * 2
    assert owned_parts(stored(*own), Placements(()), 0) == dict.fromkeys(own, (None,))
    empty = Placements((ExpertPlacement(1, (0, 1), (0,)),))
    assert owned_parts(stored("a.layers.0.mlp.experts.0.w", "a.layers.0.mlp.experts.w"), empty, 0) == {}


def test_tensors_are_read_ahead_as_decoders_take_them() -> None:
    names = ["lm_head.weight", "model.layers.10.a", "model.layers.2.a", "model.embed_tokens.weight"]
    assert sorted(names, key=taking_order) == names[::-1]


def write(folder: Path, layout: str) -> dict[tuple[int, str, int], torch.Tensor]:
    """A checkpoint of experts alone, and what each of them has to be once it is loaded."""
    tensors, expected = {}, {}
    for layer in range(LAYERS):
        for number, part in enumerate(PARTS):
            weight, scale, meant = quantized(EXPERTS, ROWS, COLUMNS, seed=2 * layer + number)
            base = f"model.layers.{layer}.mlp.experts"
            for expert in range(EXPERTS):
                value = meant[expert] if "fp8" in layout else weight.float()[expert]
                expected[layer, part, expert] = value.bfloat16()
                tensors[f"{base}.{expert}.{part}.weight"] = weight[expert].clone()
                tensors[f"{base}.{expert}.{part}.weight_scale_inv"] = scale[expert].clone()
            tensors |= {f"{base}.{part}": weight, f"{base}.{part}_scale_inv": scale}
    fused = {name: tensor for name, tensor in tensors.items() if ".weight" not in name}
    chosen = fused if "fused" in layout else {name: tensors[name] for name in tensors if name not in fused}
    if "fp8" not in layout:
        chosen = {name: tensor.bfloat16() for name, tensor in chosen.items() if "_scale_inv" not in name}
    save_file(chosen, folder / SINGLE)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return expected


@pytest.mark.parametrize("layout", ["per-expert", "fused", "per-expert fp8", "fused fp8"])
def test_ranks_together_load_every_expert_once(tmp_path: Path, layout: str) -> None:
    """By checksum, from the placement to the bytes in memory; and the bytes that were promised are those taken."""
    expected = write(tmp_path, layout)
    for world_size in (1, 3, 7):
        placements = Placements.contiguous(LAYERS, EXPERTS, world_size)
        loaded: Counter[tuple[int, str, int, str]] = Counter()
        for rank in range(world_size):
            words: list[tuple[int, int]] = []
            checkpoint = Checkpoint(tmp_path, lambda done, total, words=words: words.append((done, total)))
            checkpoint.expect(placements, rank)
            for layer, placement in enumerate(placements.layers):
                for expert in placement.local_experts(rank):
                    for part in PARTS:
                        tensor = take(checkpoint, layout, layer, part, expert)
                        loaded[layer, part, expert, checksum(tensor)] += 1
            assert words[0][0] == 0
            assert words[-1][0] == words[-1][1] == words[0][1]
        assert loaded == Counter((*key, checksum(value)) for key, value in expected.items())


def take(checkpoint: Checkpoint, layout: str, layer: int, part: str, expert: int) -> torch.Tensor:
    base, shape = f"model.layers.{layer}.mlp.experts", (ROWS, COLUMNS)
    if "fused" in layout:
        return checkpoint.take_part(f"{base}.{part}", expert, (EXPERTS, *shape), torch.bfloat16)
    return checkpoint.take(f"{base}.{expert}.{part}.weight", shape, torch.bfloat16)


def checksum(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy()).hexdigest()
