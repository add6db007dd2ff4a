"""Small random checkpoints, written by `transformers` itself."""

import json
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, MixtralConfig, MixtralForCausalLM, PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_SPECIAL = ("<|start|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")


def write_mixtral(
    directory: Path,
    *,
    vocab_size: int = 320,
    hidden: int = 64,
    intermediate: int = 96,
    layers: int = 2,
    experts: int = 8,
    topk: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    tie: bool = False,
    with_tokenizer: bool = False,
    max_position_embeddings: int = 512,
    layout: Literal["per-expert", "fused"] = "per-expert",
    max_shard_size: str = "5GB",
    **config: Any,
) -> Path:
    """Write a Mixtral checkpoint and return `directory`. The same arguments give the same weights.

    Weights are larger than a fresh model's: routing is uneven, and the best token is far from the second. `layout`
    fused names tensors as transformers 5 does in memory. A tokenizer needs a vocab_size of at least 261.
    """
    torch.manual_seed(seed)
    settings = MixtralConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_local_experts=experts,
        num_experts_per_tok=topk,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim or hidden // heads,
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=tie,
        bos_token_id=0,
        eos_token_id=1,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        dtype=dtype,
        **config,
    )
    model = MixtralForCausalLM(settings)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.uniform_(0.5, 1.5)
            else:
                weight.normal_(std=_std(name, weight.shape[-1]))
    model.to(dtype)
    model.generation_config = GenerationConfig(bos_token_id=0, eos_token_id=1)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    if layout == "fused":
        state = {name: tensor for name, tensor in model.state_dict().items() if not (tie and name == "lm_head.weight")}
        save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
    if with_tokenizer:
        write_tokenizer(directory, vocab_size)
    return directory


def _std(name: str, inputs: int) -> float:
    """Strong enough that every part of the model shows in the logits."""
    gain = {"gate.weight": 2.0, "embed_tokens.weight": inputs**0.5, "lm_head.weight": 3.0}
    return next((value for part, value in gain.items() if name.endswith(part)), 1.2) * inputs**-0.5


def write_tokenizer(directory: Path, vocab_size: int) -> None:
    """A real byte-level BPE tokenizer (any text goes through it unharmed) with a chat template; id 1 ends a turn."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(_SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([json.dumps(CHAT_TEMPLATE)] + ["the capital of France is Paris"] * 8, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=_SPECIAL[0], eos_token=_SPECIAL[1], chat_template=CHAT_TEMPLATE
    )
    fast.save_pretrained(directory)
