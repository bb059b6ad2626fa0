"""The tokenizer of a GGUF file, rebuilt with ``tokenizers``, and the chat template of SmolLM2."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jax_kvcanary.serving.weights import open_gguf, require, smollm2_path

_SPECIAL = 3  # token type of control tokens in GGUF
_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


class Tokenizer:
    """Byte-level BPE with the special tokens of a GGUF file.

    Raises:
      ImportError: without the packages ``gguf`` and ``tokenizers``.
    """

    def __init__(self, path: Path | str) -> None:
        fields = open_gguf(path).fields
        vocabulary = fields["tokenizer.ggml.tokens"].contents()
        types = fields["tokenizer.ggml.token_type"].contents()
        self.eos_token_id = int(fields["tokenizer.ggml.eos_token_id"].contents())
        self._tokenizer = _build(vocabulary, fields["tokenizer.ggml.merges"].contents())
        special = [text for text, kind in zip(vocabulary, types, strict=True) if kind == _SPECIAL]
        self._tokenizer.add_special_tokens(special)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text; special tokens in it count as such."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of token ids, special tokens left out."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=True)

    def chat(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        """Token ids of a conversation of (role, text) pairs, up to where the assistant begins to speak."""
        turns = list(messages)
        if not turns or turns[0][0] != "system":
            turns.insert(0, ("system", _SYSTEM))
        text = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns)
        return self.encode(f"{text}<|im_start|>assistant\n")


def smollm2_tokenizer() -> Tokenizer:
    """The tokenizer of SmolLM2-135M-Instruct."""
    return Tokenizer(smollm2_path())


def _build(vocabulary: Sequence[str], merges: Sequence[str]) -> Any:
    tokenizers = require("tokenizers")
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={text: i for i, text in enumerate(vocabulary)}, merges=pairs))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [tokenizers.pre_tokenizers.Digits(individual_digits=True), tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return tokenizer
