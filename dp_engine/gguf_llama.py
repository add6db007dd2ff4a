"""A dense llama-family GGUF under Hugging Face's names. Free of torch."""

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from dp_engine.gguf_file import GgufError, GgufFile

ARCHITECTURE = "llama"
_WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROTATED = {"attn_q": "llama.attention.head_count", "attn_k": "llama.attention.head_count_kv"}
_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.weight")


class LlamaGguf(GgufFile):
    """`hf_names`: llama.cpp's name of every tensor -> Hugging Face's."""

    def __init__(self, path: Path) -> None:
        """Raises GgufError for another architecture, and for a tensor that a dense llama does not have."""
        super().__init__(path)
        if (architecture := self.fields.get("general.architecture")) != ARCHITECTURE:
            raise GgufError(f"{path} holds architecture {architecture!r}, wanted {ARCHITECTURE!r}")
        self.hf_names: Mapping[str, str] = {name: self._hf_name(name) for name in self.tensors}

    @property
    def num_layers(self) -> int:
        return int(self["llama.block_count"])

    @property
    def hidden_size(self) -> int:
        return int(self["llama.embedding_length"])

    @property
    def tied(self) -> bool:
        return "output.weight" not in self.tensors

    def load_for_hf(self, name: str) -> np.ndarray:
        """A tensor, by llama.cpp's name, as float32 with its rows in Hugging Face's order."""
        weight = self.load(name)
        block = _BLOCK.fullmatch(name)
        heads = _ROTATED.get(block[2]) if block else None
        return weight if heads is None else unpermute_rotary(weight, int(self[heads]))

    def _hf_name(self, name: str) -> str:
        block = _BLOCK.fullmatch(name)
        if block and block[2] in _IN_LAYER:
            return f"model.layers.{block[1]}.{_IN_LAYER[block[2]]}.weight"
        if name in _WHOLE:
            return _WHOLE[name]
        raise GgufError(f"{self.path} holds a tensor {name}, which is not supported in a dense llama model")


def unpermute_rotary(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo llama.cpp's row order of q and k (pairs interleaved) for rotate-half rotary. [heads * dim, in] both ways."""
    rows, columns = weight.shape
    half = rows // num_heads // 2
    return weight.reshape(num_heads, half, 2, columns).swapaxes(1, 2).reshape(rows, columns)
