"""A small but real tokenizer for tests: byte-level BPE with special tokens and a chat template."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

BOS, END, START = "<|endoftext|>", "<|im_end|>", "<|im_start|>"  # ids 0, 1, 2; END closes an answer

CORPUS = [
    "The capital of France is Paris. The capital of Germany is Berlin. The capital of Italy is Rome.",
    "Every rank votes before every step, and tokens travel to the ranks that own their experts.",
    "system user assistant tool hello world, how are you today? I am fine, thank you very much!",
    "Größe, Übermut, naïve café, здравствуй мир, 你好世界, 🙂🚀 and 0123456789.",
]

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'developer', 'user', 'assistant', 'tool'] %}"
    "{{ raise_exception('unknown role ' + message['role']) }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def write_tokenizer(directory: Path, vocab_size: int = 320) -> int:
    """Write tokenizer.json, tokenizer_config.json and a chat template; return the number of tokens (<= vocab_size).

    `vocab_size` is at least 259: 256 bytes and the special tokens. The eos token is `<|im_end|>`, id 1.
    """
    if vocab_size < 259:
        raise ValueError(f"vocab_size {vocab_size} is too small for 256 bytes and 3 special tokens")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True) for token in (BOS, END, START)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": END,
        "pad_token": BOS,
        "unk_token": BOS,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
    return tokenizer.get_vocab_size()
