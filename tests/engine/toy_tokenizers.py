"""Small tokenizers of the kinds that checkpoints bring, built in memory."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from engine.tokenizer import ALPHABET, TextTokenizer

BYTE_CHARS = {byte: char for char, byte in ALPHABET.items()}
SPECIALS = ("<|end|>", "<|user|>", "<|bot|>")
TEMPLATE = "{% for m in messages %}<|user|>{{ m['content'] }}<|end|>{% endfor %}{% if add_generation_prompt %}<|bot|>{% endif %}"


def byte_level(added: tuple[str, ...] = ()) -> Tokenizer:
    """Every byte is a token (id = byte), some merges above, then special tokens."""
    vocab = {BYTE_CHARS[byte]: byte for byte in range(256)}
    merges = [("Ġ", "b"), ("a", "l"), ("al", "p"), ("Ġb", "e"), ("D", "E")]
    for left, right in merges:
        vocab.setdefault(left + right, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    if added:
        tokenizer.add_tokens([AddedToken(text, normalized=False) for text in added])
    return tokenizer


def pieces(metaspace: bool = False, strip: bool = True) -> Tokenizer:
    """SentencePiece style: <s> 0, </s> 1, byte tokens from 2, then pieces. `metaspace`: the older decoder."""
    words = ("▁", "▁Hello", "▁world", "a", "b", "▁a", "▁▁", "é", "!", "▁beta", "▁gamma")
    vocab = {"<s>": 0, "</s>": 1, **{f"<0x{byte:02X}>": 2 + byte for byte in range(256)}}
    for word in words:
        vocab[word] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("▁", "a")], byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    end = [decoders.Strip(content=" ", left=1)] if strip else []
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *end]
    tokenizer.decoder = decoders.Metaspace() if metaspace else decoders.Sequence(steps)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in ("<s>", "</s>")])
    return tokenizer


def word_piece() -> Tokenizer:
    """A decoder of another kind."""
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "un": 1, "##do": 2, "it": 3, "!": 4, "é": 5}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def text_tokenizer(backend: Tokenizer) -> TextTokenizer:
    return TextTokenizer(backend)


def save_folder(folder: Path, backend: Tokenizer | None = None, **settings) -> Path:
    """tokenizer.json and tokenizer_config.json in an existing folder."""
    (backend or byte_level()).save(str(folder / "tokenizer.json"))
    known = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps({**known, **settings}), encoding="utf-8")
    return folder
