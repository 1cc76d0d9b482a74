"""Text to ids and back, exactly as transformers' AutoTokenizer does it on the same folder.

The Rust tokenizer does the work. Its file is read directly when tokenizer_config.json adds nothing to it; otherwise
transformers loads the folder once and its backend is taken, since class-specific rules (added BOS, prefix blanks,
rebuilt pre-tokenizers) live there. Chat templates are rendered by transformers, imported when the first one is.

Also knows how the decoder makes text of tokens (`Decoding`), which the incremental detokeniser needs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path

from tokenizers import Tokenizer

from engine.errors import EngineError

PLAIN_CLASSES = frozenset({"PreTrainedTokenizerFast", "TokenizersBackend"})
PLAIN_KEYS = frozenset({
    "tokenizer_class", "bos_token", "eos_token", "unk_token", "pad_token", "chat_template", "clean_up_tokenization_spaces",
    "model_max_length", "model_input_names", "padding_side", "truncation_side", "backend", "is_local", "local_files_only",
})  # settings that change no id


@dataclass(frozen=True, slots=True)
class Decoding:
    """How a tokenizer's decoder makes text.

    Args:
        kind: "bytes": tokens spell bytes, the text is their UTF-8; "pieces": tokens are text with a mark for the
            blank, and byte tokens <0x41>; "other": anything else, decoded as a whole.
        mark: the character that stands for a blank.
        fallback: byte tokens are joined.
        strip: blanks removed from the start of the whole text.
        bare_first: the first token loses its marks.
    """

    kind: str
    mark: str = ""
    fallback: bool = False
    strip: int = 0
    bare_first: bool = False


class TextTokenizer:
    """One model's tokenizer.

    Args:
        backend: the Rust tokenizer.
        folder: for the chat template, rendered by transformers; None has none.
    """

    def __init__(self, backend: Tokenizer, folder: Path | None = None) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.folder = folder
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.special_ids = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
        self.decoding = find_decoding(backend)
        self._pieces: dict[int, str] = {}
        self._tokens: dict[int, str | None] = {}
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def load(cls, folder: Path) -> TextTokenizer:
        """From a checkpoint folder.

        Raises:
            EngineError: "bad_checkpoint" when there is no tokenizer that can be read.
        """
        settings = _settings(folder)
        try:
            if (folder / "tokenizer.json").is_file() and _adds_nothing(settings):
                return cls(Tokenizer.from_file(str(folder / "tokenizer.json")), folder)
            return cls(_auto(folder).backend_tokenizer, folder)
        except Exception as error:  # the Rust side raises bare Exception, transformers many kinds
            reason = "is missing" if not (folder / "tokenizer.json").is_file() else "cannot be read"
            raise EngineError(
                "bad_checkpoint", f"The checkpoint is not usable: tokenizer.json {reason}.", file="tokenizer.json", reason=reason
            ) from error

    def encode(self, text: str, special: bool = True) -> tuple[int, ...]:
        """Ids of a prompt. `special` adds what the tokenizer adds by itself (BOS).

        Raises:
            EngineError: "bad_text" for text that is not valid Unicode.
        """
        check_text(text)
        return tuple(self.backend.encode(text, add_special_tokens=special).ids)

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Text of ids."""
        return self.backend.decode(list(ids), skip_special_tokens=skip_special)

    def chat(self, messages: Sequence[Mapping[str, str]]) -> tuple[str, tuple[int, ...]]:
        """A conversation as the model's template writes it, up to where the answer begins, and its ids.

        Raises:
            EngineError: "no_chat_template", or "bad_text" when the template refuses the messages.
        """
        if not self.has_chat_template:
            raise EngineError("no_chat_template", "This model has no chat template; send plain text instead.")
        for message in messages:
            check_text(str(message.get("content", "")))
        try:
            text = self._templates.apply_chat_template([dict(m) for m in messages], tokenize=False, add_generation_prompt=True)
        except Exception as error:  # templates raise through jinja
            reason = str(error)[:200]
            raise EngineError("bad_text", f"The chat template refused these messages: {reason}", reason=reason) from error
        return text, self.encode(text, special=False)

    @cached_property
    def has_chat_template(self) -> bool:
        if self.folder is None:
            return False
        return bool(_settings(self.folder).get("chat_template")) or any(
            (self.folder / name).exists() for name in ("chat_template.jinja", "chat_template.json", "additional_chat_templates")
        )

    @cached_property
    def _templates(self):
        return _auto(self.folder)

    def token(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it; None outside the vocabulary."""
        if token_id not in self._tokens:
            self._tokens[token_id] = self.backend.id_to_token(token_id) if token_id >= 0 else None
        return self._tokens[token_id]

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes that a token of a byte-level tokenizer spells."""
        found = self._bytes.get(token_id)
        if found is None:
            token = self.token(token_id)
            found = self._bytes[token_id] = b"" if token is None else token_bytes(token, self.decoding) or b""
        return found

    def piece(self, token_id: int) -> str:
        """One token for display: its text, with bytes that are no whole characters as ⟨E2 82⟩."""
        found = self._pieces.get(token_id)
        if found is None:
            found = self._pieces[token_id] = self._display(token_id)
        return found

    def _display(self, token_id: int) -> str:
        token = self.token(token_id)
        if token is None:
            return f"⟨{token_id}?⟩"
        if token_id in self.special_ids:
            return token
        raw = token_bytes(token, self.decoding)
        if raw is None and self.decoding.kind == "other":  # the vocabulary spells it in an alphabet that only its decoder knows
            return self.backend.decode([token_id], skip_special_tokens=False) or token
        return show_bytes(raw) if raw is not None else token.replace(self.decoding.mark or "▁", " ")


def check_text(text: str, what: str = "The text") -> None:
    """
    Raises:
        EngineError: "bad_text" for lone surrogates, which no tokenizer takes. Bytes of a command line that are no UTF-8
            arrive as such.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise EngineError("bad_text", f"{what} is not valid Unicode at character {error.start}.", position=error.start) from None


def _auto(folder: Path):
    """transformers' tokenizer of a folder. Code that a checkpoint brings is never run."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)


def _settings(folder: Path) -> dict:
    try:
        found = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError):
        raise EngineError(
            "bad_checkpoint", "The checkpoint is not usable: tokenizer_config.json is not valid JSON.", file="tokenizer_config.json"
        ) from None
    return found if isinstance(found, dict) else {}


def _adds_nothing(settings: Mapping) -> bool:
    return settings.get("tokenizer_class") in PLAIN_CLASSES and set(settings) <= PLAIN_KEYS


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable ones stand for themselves, the others for U+0100 and on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return {**{chr(b): b for b in printable}, **{chr(0x100 + i): b for i, b in enumerate(hidden)}}


ALPHABET = _byte_alphabet()


def token_bytes(token: str, decoding: Decoding) -> bytes | None:
    """The bytes that a token spells; None when it is text."""
    if decoding.kind == "bytes":
        try:
            return bytes([ALPHABET[char] for char in token])
        except KeyError:
            return token.encode("utf-8")  # an added token that is not spelled in the alphabet
    if decoding.fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            return None
    return None


def show_bytes(raw: bytes) -> str:
    """UTF-8 as text, each stretch of anything else as ⟨hex⟩."""
    return "".join(
        part if good else f"⟨{part.encode('utf-8', 'surrogateescape').hex(' ').upper()}⟩"
        for good, part in _stretches(raw.decode("utf-8", "surrogateescape"))
    )


def _stretches(text: str) -> Iterable[tuple[bool, str]]:
    """(is text, stretch) of a string whose undecodable bytes are surrogates."""
    for good, chars in groupby(text, key=lambda char: not "\udc80" <= char <= "\udcff"):
        yield good, "".join(chars)


def find_decoding(backend: Tokenizer) -> Decoding:
    """What the tokenizer's decoder does, from its own description."""
    steps = _steps(backend.decoder)
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return Decoding("bytes")
    mark, fallback, strip, bare = "", False, 0, False
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": " "} if not mark and len(old) == 1:
                mark = old
            case {"type": "Metaspace", "replacement": str(old)} if not mark:
                mark, bare = old, step.get("prepend_scheme", "always") != "never"
            case {"type": "ByteFallback"} if not fallback:
                fallback = True
            case {"type": "Fuse"}:
                pass
            case {"type": "Strip", "content": " ", "start": int(start), "stop": 0} if "Fuse" in kinds and step is steps[-1]:
                strip = start
            case _:
                return Decoding("other")
    return Decoding("pieces", mark, fallback, strip, bare) if mark else Decoding("other")


def _steps(decoder) -> list[dict]:
    if decoder is None:
        return [{"type": "none"}]
    state = json.loads(decoder.__getstate__())
    return state["decoders"] if state.get("type") == "Sequence" else [state]
