"""Tokenizer files of a checkpoint (tokenizer.json, tokenizer_config.json) from the metadata of a GGUF."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from dp_engine.gguf_file import GgufError

CONTROL = 3  # llama.cpp's token type of special tokens
PRE_TOKENIZERS = {"smollm"}


def build_tokenizer(fields: dict[str, Any]) -> Tokenizer:
    """Byte-level BPE as SmolLM defines it: digits one by one, then GPT-2's split. Other kinds: GgufError."""
    model, pre = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
    if model != "gpt2" or pre not in PRE_TOKENIZERS:
        raise GgufError(f"the GGUF's tokenizer is {model}/{pre}, wanted gpt2/{'|'.join(sorted(PRE_TOKENIZERS))}")
    vocab = {token: index for index, token in enumerate(fields["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, fuse_unk=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in special_tokens(fields)]
    )
    return tokenizer


def special_tokens(fields: dict[str, Any]) -> list[str]:
    """Tokens that are markup and never text, in id order."""
    typed = zip(fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"], strict=True)
    return [token for token, kind in typed if kind == CONTROL]


def tokenizer_config(fields: dict[str, Any]) -> dict[str, Any]:
    """tokenizer_config.json. The generic fast class: named ones may rebuild the pre-tokenizer and lose the digits."""
    tokens = fields["tokenizer.ggml.tokens"]
    named = {
        "bos_token": "tokenizer.ggml.bos_token_id",
        "eos_token": "tokenizer.ggml.eos_token_id",
        "unk_token": "tokenizer.ggml.unknown_token_id",
        "pad_token": "tokenizer.ggml.padding_token_id",
    }
    named_specials = {name: tokens[fields[key]] for name, key in named.items() if key in fields}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": fields["llama.context_length"],
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        **named_specials,
        "additional_special_tokens": [
            token for token in special_tokens(fields) if token not in named_specials.values()
        ],
        **({"chat_template": fields["tokenizer.chat_template"]} if "tokenizer.chat_template" in fields else {}),
    }


def write_tokenizer(fields: dict[str, Any], target: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json into `target`."""
    build_tokenizer(fields).save(str(target / "tokenizer.json"))
    config = json.dumps(tokenizer_config(fields), indent=2, ensure_ascii=False)
    (target / "tokenizer_config.json").write_text(config + "\n")
