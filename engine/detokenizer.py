"""Ids to text, one at a time, for one sequence: no half characters, stop strings held back until they are decided.

Everything shown adds up to decode(prompt + all ids) without decode(prompt). A character that the prompt began and
the model finishes belongs to the answer; one that the prompt began and nobody finishes was the prompt's.

Three streams make text of tokens, as the tokenizer's decoder does (`Decoding`): bytes through an incremental UTF-8
decoder; pieces with byte tokens, whose runs are decided only at their end, since one bad byte spoils the whole run
in the `tokenizers` library; anything else by decoding the whole again. The first two cost about a microsecond a token.

Stop strings: the text ends before the earliest match in the text that the ids spell. Each stop has its own matcher
(Knuth–Morris–Pratt), so what may still become a match is known exactly: nothing more is held, nothing less.
A match waits while an earlier one of another stop may still come true. All of it goes by characters, so it does not
matter how many tokens a step brings.

Rejected: `tokenizers.DecodeStream` primed with the prompt (repeats the prompt when it ends inside a character), and
decoding a sliding window (loses the blank of a first piece).

Most tokens say the same wherever they stand: whole characters, after whole characters. For them a `Vocabulary` knows the
text, and many are spelled at once without their sequences (engine/steady.py says when).
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

import numpy as np

from engine.tokenizer import TextTokenizer, token_bytes


class Detokenizer:
    """One sequence's text.

    Args:
        prompt_ids: the prompt; decides only what its last characters become.
        stop: stop strings.
    """

    def __init__(self, tokenizer: TextTokenizer, prompt_ids: Sequence[int] = (), stop: Iterable[str] = ()) -> None:
        self.tokenizer = tokenizer
        self.stopped = False
        self.vocabulary = vocabulary_of(tokenizer)
        self._stream = _STREAMS[tokenizer.decoding.kind](tokenizer)
        self._shown: list[str] = []
        self._special = tokenizer.special_ids
        self._stops = StopMatcher(stop) if (stop := tuple(stop)) else None
        self._stream.prime(prompt_ids)

    def push(self, token_id: int) -> tuple[str, bool]:
        """The text that this token makes certain, and whether a stop string has ended the sequence."""
        if self.stopped:
            return "", True
        text = "" if token_id in self._special else self._stream.feed(token_id)
        if self._stops is not None:
            text, self.stopped = self._stops.feed(text)
        if text:
            self._shown.append(text)
        return text, self.stopped

    def flush(self) -> str:
        """The rest, when the sequence has ended. Sets `stopped` when a stop string was only waiting for certainty."""
        if self.stopped:
            return ""
        text = self._stream.finish()
        if self._stops is not None:
            text, self.stopped = self._stops.finish(text)
        if text:
            self._shown.append(text)
        return text

    @property
    def is_plain(self) -> bool:
        """The next token's text, where `vocabulary` has one, depends on nothing that came before, and nothing will depend
        on it: it need not be pushed."""
        return self._stops is None and self.vocabulary is not None and self._stream.is_clean

    @property
    def text(self) -> str:
        """Everything shown so far that was pushed."""
        if len(self._shown) > 1:
            self._shown = ["".join(self._shown)]
        return self._shown[0] if self._shown else ""


class Vocabulary:
    """Which tokens always say the same, and what. Learns a token when it is first met.

    Args:
        spell: id -> the text that it always has, None if that depends on its neighbours.
    """

    def __init__(self, size: int, spell: Callable[[int], str | None]) -> None:
        self._spell = spell
        self._kinds = np.zeros(size, np.int8)  # 0: not met yet, 1: plain, 2: not
        self._texts: dict[int, str] = {}
        self._bytes: dict[int, bytes] = {}

    def are_plain(self, token_ids: np.ndarray) -> np.ndarray:
        """bool, of the ids' shape."""
        try:
            kinds = self._kinds[token_ids]
        except IndexError:  # a model's head may be larger than the vocabulary
            self._kinds = np.pad(self._kinds, (0, int(token_ids.max()) + 1 - len(self._kinds)))
            kinds = self._kinds[token_ids]
        if not kinds.all():
            self._learn(np.unique(token_ids[kinds == 0]).tolist())
            kinds = self._kinds[token_ids]
        return kinds == 1

    def text(self, token_id: int) -> str:
        """Of a plain token."""
        return self._texts[token_id]

    def spell(self, token_ids: np.ndarray) -> list[bytes]:
        """UTF-8 of plain tokens."""
        return list(map(self._bytes.__getitem__, token_ids.tolist()))

    def _learn(self, token_ids: list[int]) -> None:
        for token_id in token_ids:
            text = self._spell(token_id)
            self._kinds[token_id] = 2 if text is None else 1
            if text is not None:
                self._texts[token_id], self._bytes[token_id] = text, text.encode("utf-8", "replace")


@lru_cache(maxsize=8)
def vocabulary_of(tokenizer: TextTokenizer) -> Vocabulary | None:
    """None where a token's text is only known from the whole."""
    spell = {"bytes": _plain_bytes, "pieces": _plain_piece}.get(tokenizer.decoding.kind)
    if spell is None:
        return None

    def text(token_id: int) -> str | None:
        return "" if token_id in tokenizer.special_ids else spell(tokenizer, token_id)

    return Vocabulary(tokenizer.vocab_size, text)


def _plain_bytes(tokenizer: TextTokenizer, token_id: int) -> str | None:
    try:
        return tokenizer.bytes_of(token_id).decode("utf-8")
    except UnicodeDecodeError:
        return None


def _plain_piece(tokenizer: TextTokenizer, token_id: int) -> str | None:
    token = tokenizer.token(token_id)
    if token is None:
        return ""
    return token.replace(tokenizer.decoding.mark, " ") if token_bytes(token, tokenizer.decoding) is None else None


class StopMatcher:
    """Passes text on, except for what may be the beginning of a stop string."""

    def __init__(self, stops: Iterable[str]) -> None:
        self.stops = [(stop, _failures(stop)) for stop in dict.fromkeys(stops) if stop]
        self.states = [0] * len(self.stops)  # characters of each stop that the text ends with
        self.held = ""
        self.position = 0  # of the first held character
        self.match: int | None = None  # where the earliest match begins

    def feed(self, text: str) -> tuple[str, bool]:
        """Text that cannot be part of a stop string, and whether the earliest match is certain."""
        at = self.position + len(self.held)
        self.held += text
        for char in text:
            at += 1
            for index, (stop, failures) in enumerate(self.stops):
                state = self.states[index]
                while state and stop[state] != char:
                    state = failures[state]
                if stop[state] == char:
                    state += 1
                if state == len(stop):
                    self.match = min(at - state, at if self.match is None else self.match)
                    state = failures[state]
                self.states[index] = state
            if self.match is not None and self._earliest(at) >= self.match:
                return self._release(self.match), True
        safe = self._earliest(at)
        return self._release(safe if self.match is None else min(safe, self.match)), False

    def _earliest(self, at: int) -> int:
        """Where the earliest stop string that is still possible begins."""
        return at - max(self.states, default=0)

    def _release(self, until: int) -> str:
        count = until - self.position
        out, self.held = self.held[:count], self.held[count:]
        self.position = until
        return out

    def finish(self, text: str) -> tuple[str, bool]:
        """What is left: up to a match that was waiting, else everything."""
        out, certain = self.feed(text)
        if certain or self.match is not None:
            return out + (self._release(self.match) if not certain else ""), True
        return out + self._release(self.position + len(self.held)), False


def _failures(stop: str) -> list[int]:
    """failures[n]: the longest proper prefix of `stop` that ends its first n characters."""
    table, state = [0, 0], 0
    for char in stop[1:]:
        while state and stop[state] != char:
            state = table[state]
        if stop[state] == char:
            state += 1
        table.append(state)
    return table


class ByteStream:
    """Tokens spell bytes; the text is their UTF-8 with one � for each maximal broken part, as in Rust."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self.tokenizer = tokenizer
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.owed = ""  # the prompt ended inside a character that is not decided yet: what it is if nobody finishes it

    def prime(self, prompt_ids: Sequence[int]) -> None:
        tail = b""
        for token_id in reversed(prompt_ids):
            if token_id not in self.tokenizer.special_ids:
                tail = self.tokenizer.bytes_of(token_id) + tail
            if len(tail) >= 4:  # no character is longer, and what lies before cannot matter
                break
        self.decoder.decode(tail)
        self.owed = self.decoder.getstate()[0].decode("utf-8", "replace")

    @property
    def is_clean(self) -> bool:
        """No character is begun, the prompt's included."""
        return not self.owed and not self.decoder.getstate()[0]

    def feed(self, token_id: int) -> str:
        return self._settle(self.decoder.decode(self.tokenizer.bytes_of(token_id)))

    def finish(self) -> str:
        return self._settle(self.decoder.decode(b"", True))

    def _settle(self, text: str) -> str:
        if self.owed and text:
            owed, self.owed = self.owed, ""
            return text.removeprefix(owed)  # nobody finished it: that � (two, where half a surrogate was begun) is the prompt's
        return text


class PieceStream:
    """Tokens are text with a mark for blanks; byte tokens are held until their run ends."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self.tokenizer = tokenizer
        self.run = bytearray()
        self.strip = tokenizer.decoding.strip
        self.first = True  # no token yet: marks are dropped from it where the decoder says so
        self.prompt_bytes = 0  # bytes of the run that the prompt brought

    def prime(self, prompt_ids: Sequence[int]) -> None:
        for token_id in prompt_ids:
            if token_id not in self.tokenizer.special_ids:
                self.feed(token_id)
        self.prompt_bytes = len(self.run)

    @property
    def is_clean(self) -> bool:
        """No run of byte tokens is begun, and the rules of the text's beginning are behind."""
        return not self.run and not self.strip and not self.first

    def feed(self, token_id: int) -> str:
        token = self.tokenizer.token(token_id)
        if token is None:
            return ""
        first, self.first = self.first, False
        raw = token_bytes(token, self.tokenizer.decoding)
        if raw is not None:
            self.run += raw
            return ""
        decoding = self.tokenizer.decoding
        text = token.replace(decoding.mark, "" if first and decoding.bare_first else " ")
        return self._strip(self._end_run() + text)

    def finish(self) -> str:
        return self._strip(self._end_run())

    def _end_run(self) -> str:
        if not self.run:
            return ""
        run, prompts, self.run, self.prompt_bytes = bytes(self.run), self.prompt_bytes, bytearray(), 0
        shown = _shown_run(run, prompts) if prompts else ""
        self._strip(shown)  # the prompt's part of the run counts: what follows it is no longer the beginning
        return _run_text(run).removeprefix(shown)

    def _strip(self, text: str) -> str:
        while self.strip and text:
            if text[0] != " ":
                self.strip = 0
                break
            text, self.strip = text[1:], self.strip - 1
        return text


def _run_text(run: bytes) -> str:
    try:
        return run.decode("utf-8")
    except UnicodeDecodeError:
        return "\ufffd" * len(run)


def _shown_run(run: bytes, count: int) -> str:
    """The part of a run's text that the prompt's first `count` bytes account for."""
    if "\ufffd" * len(run) == _run_text(run):
        return "\ufffd" * count
    return run[:count].decode("utf-8", "ignore")


class WholeStream:
    """For decoders of other kinds: decode everything again, and show what can no longer change."""

    is_clean = False

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self.tokenizer = tokenizer
        self.ids: list[int] = []
        self.prompt = self.shown = ""

    def prime(self, prompt_ids: Sequence[int]) -> None:
        self.ids = list(prompt_ids)
        self.prompt = self.tokenizer.decode(self.ids)
        self.shown = self.prompt.rstrip("\ufffd")

    def feed(self, token_id: int) -> str:
        self.ids.append(token_id)
        return self._new(self.tokenizer.decode(self.ids).rstrip("\ufffd"))

    def finish(self) -> str:
        return self._new(self.tokenizer.decode(self.ids))

    def _new(self, text: str) -> str:
        if len(self.shown) < len(self.prompt) and text.startswith(self.prompt):
            self.shown = self.prompt  # nobody finished the prompt's last character
        if not text.startswith(self.shown):
            return ""
        out, self.shown = text[len(self.shown) :], text
        return out


_STREAMS = {"bytes": ByteStream, "pieces": PieceStream, "other": WholeStream}
