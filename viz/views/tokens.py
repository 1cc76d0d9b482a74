"""Tokens: what has each request written so far, how sure was the model of each token, and what else was likely?

Each live or recent request has a card: its state in words, its prompt muted, its own text in ink. The line under
a token is thicker the more probable it was; the newest token of a step is boxed. At the bottom stands the top-k
of the selected token. Long texts keep their newest lines.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

from engine.trace import FINISH_REASONS, Trace
from viz.lanes import queue
from viz.layout import ADVANCE, MAX_LABELS, Sheet, framed, message, text_em, too_small, visible
from viz.select import Token, identity, live_at, newest_tokens, prompt_len, selected, tail
from viz.theme import HUES
from viz.view import Ask, Badge, Frame, Mark, Paint, Raster, Series, View, ViewState
from viz.words.catalogue import words

WEIGHTS = (1.5, 3.0, 4.5, 6.0)  # px of the line under a token, by quarter of its probability
DRAFTS_WITHIN = 256  # steps
MAX_CARDS = 8


def figure(trace: Trace, state: ViewState) -> Frame:
    step, t = trace.clamp(state.step), words(state.language, WORDS)
    if too_small(state) or not _candidates(trace, state, step):
        return message(summary(trace, state), state, Badge("measured", t("tokens.badge")))
    return _Picture(trace, state, step).frame()


def _candidates(trace: Trace, state: ViewState, step: int) -> list[int]:
    """Who could be shown, most wanted first: selected, live, then those that ended last."""
    ended = trace.rows("finishes", trace.first_step or 0, step)["seq_id"][-MAX_CARDS:][::-1].tolist()
    waiting = set(queue(trace, step)["seq_id"].tolist())
    live = sorted(live_at(trace, step), key=lambda i: (i in waiting, i))
    return list(dict.fromkeys((*selected(trace, step, state.selection), *live, *ended)))


@dataclass(frozen=True, slots=True)
class Piece:
    """A token, or part of one, on a line: characters column … column + len(text)."""

    token: Token
    text: str
    column: float  # in em


def lines_of(tokens: tuple[Token, ...], columns: int) -> list[list[Piece]]:
    """Wrapped at tokens; a token longer than a line is cut into lines. Widths in em, so wide characters count."""
    room = columns * 0.6
    lines: list[list[Piece]] = [[]]
    at = 0.0
    for token in tokens:
        text = visible(token.text)
        if at and at + text_em(text) > room + 1e-6:
            lines.append([])
            at = 0.0
        if at == 0.0:
            text = text.lstrip() or text
        while text:
            part = text
            while text_em(part) > room - at + 1e-6 and len(part) > 1:
                part = part[: max(int(len(part) * (room - at) / text_em(part)), 1)]
            lines[-1].append(Piece(token, part, at))
            at += text_em(part)
            text = text[len(part) :]
            if text:
                lines.append([])
                at = 0.0
    return lines


class _Picture:
    """One frame while it is laid out: cards in one or two columns, the top-k line at the bottom."""

    def __init__(self, trace: Trace, state: ViewState, step: int) -> None:
        self.trace, self.state, self.step = trace, state, step
        self.t, self.sheet = words(state.language, WORDS), Sheet(state)
        self.who = identity(trace, step, state.selection)
        self.live = set(live_at(trace, step))
        self.works = {int(w["seq_id"]): w for w in trace.rows("works", step, step)}
        sheet = self.sheet
        found = _candidates(trace, state, step)
        self.line = round(sheet.font * 1.7)
        self.area = sheet.height - 8 - 2 * sheet.line - 10
        self.columns = 2 if len(found) > 2 and sheet.width >= 88 * sheet.advance else 1
        most = min(max(int(self.area / (3 * self.line)), 1) * self.columns, MAX_CARDS)
        self.hidden = max(len(found) - most, 0)
        self.shown = sorted(found[:most])
        self.finishes = trace.newest("finishes", self.shown, step)
        per_column = -(-len(self.shown) // self.columns)
        self.card_height = min(self.area / per_column, 7 * self.line)
        self.card_width = (sheet.width - 12 * (self.columns + 1)) / self.columns
        self.per_column = per_column
        recent = trace.rows("works", step - DRAFTS_WITHIN, step)
        recent = recent[recent["num_draft"] > 0]
        self.drafts = set(zip(recent["seq_id"].tolist(), recent["step_id"].tolist()))
        self.drafted: set[tuple[int, int]] = set()  # (seq_id, position) of what was guessed first and then accepted
        self.segments: list[list[tuple[float, float, float]]] = [[] for _ in WEIGHTS]
        self.marks: list[Mark] = []
        self.swatches: list[Raster] = []

    def frame(self) -> Frame:
        sheet, t = self.sheet, self.t
        texts = {seq_id: self._text(seq_id) for seq_id in self.shown}
        self._trim(texts)
        self._top_k(texts)
        for i, seq_id in enumerate(self.shown):
            column, row = divmod(i, self.per_column)
            self._card(seq_id, texts[seq_id], 12 + column * (self.card_width + 12), 8 + row * self.card_height)
        if self.hidden:
            sheet.put(t("tokens.more", n=self.hidden), 12, sheet.height - 8 - sheet.line * 1.5 - 4, "muted")
        legend = (
            Paint("muted", t("tokens.legend.prompt")),
            Paint("ink", t("tokens.legend.text")),
            framed("accent", t("tokens.legend.new")),
        )
        legend += (framed("good", t("tokens.legend.drafted")),) if self.drafted else ()
        return Frame(
            badges=(Badge("measured", t("tokens.badge")),), axes=sheet.axes(), rasters=tuple(self.swatches),
            series=tuple(self._underlines()), labels=tuple(sheet.labels), marks=tuple(self.marks), legend=legend,
        )  # fmt: skip

    def _trim(self, texts: dict[int, list[list[Piece]]]) -> None:
        """Drop oldest lines of the longest cards until the labels suffice."""
        needs = {seq_id: [len(_parts(line)) for line in lines] for seq_id, lines in texts.items()}
        spare = MAX_LABELS - 2 - len(texts)
        while sum(map(sum, needs.values())) > spare:
            longest = max(needs, key=lambda i: sum(needs[i]))
            needs[longest].pop(0)
            texts[longest].pop(0)

    def _text(self, seq_id: int) -> list[list[Piece]]:
        room = int((self.card_width - 24) / self.sheet.advance) - 1  # a column at the left is for "…"
        fits = max(int(self.card_height / self.line) - 1, 1)
        tokens = tail(self.trace, seq_id, self.step, fits * room // 4 + 8)
        for token, after in pairwise(tokens):  # the last of a step is the target's own
            if token.step_id == after.step_id and (seq_id, token.step_id) in self.drafts:
                self.drafted.add((seq_id, token.position))
        lines = lines_of(tokens, room)
        return lines[-fits:]

    # ---- a card ----

    def _card(self, seq_id: int, lines: list[list[Piece]], x: float, y: float) -> None:
        sheet = self.sheet
        name = self.trace.name(seq_id)
        middle = y + self.line / 2
        bar = np.array([[self.who.code(seq_id)]], np.uint8)
        bottom = y + self.card_height - 10
        self.swatches.append(Raster(f"card {seq_id}", bar, x, x + 6, y + 2, bottom, _SWATCHES))
        text = f"{name}  {self._state(seq_id)}"
        self.marks.append(Mark(f"seq:{seq_id}", x, x + self.card_width, y + 2, y + self.line, text, None))
        sheet.put(text, x + 16, middle, weight=700, room=self.card_width - 24)
        for i, line in enumerate(lines):
            parts = _parts(line)
            if not i and parts and not _is_beginning(line[0]):
                text, column, written = parts[0]
                parts[0] = ("…" + text, column - ADVANCE, written)
            self._line(seq_id, parts, line, x + 16 + sheet.advance, y + (i + 1.5) * self.line)

    def _line(self, seq_id: int, parts: list[tuple[str, float, bool]], pieces: list[Piece], x: float, y: float) -> None:
        sheet = self.sheet
        for text, column, written in parts:
            sheet.put(text, x + column * sheet.font, y, "ink" if written else "muted", mono=True)
        half, who, prompt = sheet.font * 0.62, self.trace.name(seq_id), prompt_len(self.trace, seq_id)
        for piece in pieces:
            token = piece.token
            if token.step_id is None:
                continue
            text = piece.text.lstrip() or piece.text
            x1 = x + (piece.column + text_em(piece.text)) * sheet.font
            x0 = x1 - text_em(text) * sheet.font
            p = token.probability
            level = min(int(p * len(WEIGHTS)), len(WEIGHTS) - 1)
            self.segments[level].append((x0 + 1, x1 - 1, y + half + 3))
            n = token.position - prompt + 1
            said = _says(who, n, token.text, p, self.state.language)
            was_drafted = (seq_id, token.position) in self.drafted
            said += f", {self.t('tokens.drafted')}" if was_drafted else ""
            mark = f"token:{seq_id}:{token.position}"
            outline = "good" if was_drafted else "accent" if token.step_id == self.step else None
            box = (x0 - 3, x1 + 3, y - self.line / 2 + 2, y + self.line / 2)
            self.marks.append(Mark(mark, *box, said, outline, self._options(token, 5)))

    def _state(self, seq_id: int) -> str:
        t, info, work = self.t, self.trace.sequences.get(seq_id), self.works.get(seq_id)
        total, prompt = (info.max_tokens, info.num_prompt_tokens) if info else (0, 0)
        got = _count(self.trace, seq_id, self.step)
        if seq_id in self.finishes:
            reason = FINISH_REASONS[int(self.finishes[seq_id]["reason"])].value
            reason = "room" if reason == "length" and got < total else reason
            key = "tokens.finished.now" if int(self.finishes[seq_id]["step_id"]) == self.step else "tokens.finished"
            return t(key, n=got, total=total, why=t(f"tokens.why.{reason}"))
        if self._has_gone(seq_id, got):
            return t("tokens.ended")
        if work is not None and got == 0:
            return t("tokens.prompt", done=int(work["start"]) + int(work["num_tokens"]), n=prompt)
        return t("tokens.running" if work is not None else "tokens.waiting", n=got, total=total)

    def _has_gone(self, seq_id: int, got: int) -> bool:
        """It ended in a step that a full ring has dropped: it was there before, and neither computes nor waits."""
        if seq_id in self.live:
            return False
        info, begin = self.trace.sequences.get(seq_id), int(self.trace.steps["start_us"][0])
        return got > 0 or bool(self.trace.newest("works", (seq_id,), self.step)) or (info is not None and info.arrival_us < begin)

    def _options(self, token: Token, most: int) -> str:
        texts = self.trace.token_texts
        found = [(texts.get(i) or self.trace.token_text(i), logprob) for i, logprob in token.top]
        at = next((i for i, (text, p) in enumerate(found) if text == token.text and abs(p - token.logprob) < 1e-3), len(found))
        shown = tuple(found[:most]) if at < most else (*found[: most - 1], (token.text, token.logprob))
        return _options(shown, min(at, len(shown) - 1), at > len(shown) - 1 and len(shown) > 1, self.state.language)

    def _underlines(self) -> list[Series]:
        made = []
        for quarter, (width, segments) in enumerate(zip(WEIGHTS, self.segments)):
            x = np.full((len(segments), 3), np.nan, np.float32)
            y = np.full((len(segments), 3), np.nan, np.float32)
            if segments:
                at = np.array(segments, np.float32)
                x[:, 0], x[:, 1], y[:, 0], y[:, 1] = at[:, 0], at[:, 1], at[:, 2], at[:, 2]
            made.append(Series(f"probability, quarter {quarter + 1}", x.ravel(), y.ravel(), "line", Paint("ink", alpha=0.75), width))
        return made

    # ---- the selected token ----

    def _top_k(self, texts: dict[int, list[list[Piece]]]) -> None:
        """One line: the selected token's alternatives; else those of the newest token of the first card."""
        chosen = self._chosen(texts)
        if chosen is None:
            return
        seq_id, token = chosen
        n = token.position - prompt_len(self.trace, seq_id) + 1
        for most in (5, 4, 3, 2, 1):
            text = self.t("tokens.top", who=self.trace.name(seq_id), n=n, options=self._options(token, most))
            if self.sheet.span(text) <= self.sheet.width - 24:
                break
        self.sheet.put(text, 12, self.sheet.height - 8 - self.sheet.line / 2, room=self.sheet.width - 24)

    def _chosen(self, texts: dict[int, list[list[Piece]]]) -> tuple[int, Token] | None:
        kind, _, rest = (self.state.selection or "").partition(":")
        wanted = selected(self.trace, self.step, self.state.selection)
        ids = [i for i in (*wanted, *self.works, *texts) if i in texts]
        for seq_id in ids:
            tokens = [p.token for line in texts[seq_id] for p in line if p.token.step_id is not None]
            if kind == "token" and seq_id in wanted:
                asked = rest.partition(":")[2]
                tokens = [x for x in tokens if str(x.position) == asked] or tokens
            if tokens:
                return seq_id, tokens[-1]
        return None


_SWATCHES = tuple(map(Paint, HUES))


def _is_beginning(piece: Piece) -> bool:
    return piece.token.position == 0 and visible(piece.token.text).lstrip().startswith(piece.text)


def _parts(pieces: list[Piece]) -> list[tuple[str, float, bool]]:
    """(text, column, generated?) of a line: neighbours of one kind are one label."""
    parts: list[tuple[str, float, bool]] = []
    for piece in pieces:
        written = piece.token.step_id is not None
        if parts and parts[-1][2] == written:
            parts[-1] = (parts[-1][0] + piece.text, parts[-1][1], written)
        else:
            parts.append((piece.text, piece.column, written))
    return parts


@lru_cache(maxsize=8192)  # the same tokens are drawn step after step
def _options(options: tuple[tuple[str, float], ...], chosen: int, leaves_out: bool, language: str) -> str:
    """ "“a” 45 %  ▸ “in” 20 %": likeliest first, the chosen one marked; "…" where likelier ones than it are left out."""
    t, said = words(language, WORDS), []
    for i, (text, logprob) in enumerate(options):
        option = t("tokens.option", text=visible(text).strip(), percent=_percent(math.exp(min(logprob, 0.0))))
        said.append(f"{'…  ' if leaves_out and i == chosen else ''}▸ {option}" if i == chosen else option)
    return "  ".join(said)


@lru_cache(maxsize=8192)
def _says(who: str, n: int, text: str, p: float, language: str) -> str:
    return words(language, WORDS)("tokens.mark", who=who, n=n, text=visible(text), percent=_percent(p))


def _percent(p: float) -> str:
    return "<1 %" if 0 < p < 0.01 else f"{100 * p:.0f} %"


def _count(trace: Trace, seq_id: int, step: int) -> int:
    """Tokens it had been given by a step; the newest row's position says so."""
    rows = newest_tokens(trace, seq_id, step, 1)
    return int(rows["position"][-1]) - prompt_len(trace, seq_id) + 1 if len(rows) else 0


def summary(trace: Trace, state: ViewState) -> str:
    step, t = trace.clamp(state.step), words(state.language, WORDS)
    parts = []
    for seq_id in sorted(live_at(trace, step))[:8]:
        rows = newest_tokens(trace, seq_id, step, 1)
        info, who = trace.sequences.get(seq_id), trace.name(seq_id)
        if len(rows):
            text = visible(trace.token_text(int(rows["token_id"][-1]))).strip()
            total = info.max_tokens if info else 0
            parts.append(t("tokens.summary.part", who=who, n=_count(trace, seq_id, step), total=total, text=text))
        else:
            parts.append(t("tokens.summary.none", who=who))
    return t("tokens.summary", parts="; ".join(parts) or t("tokens.none"))


# ---- asks ----


def _first_card(trace: Trace, state: ViewState) -> int:
    return min(_candidates(trace, state, trace.clamp(state.step)))


def _how_many(trace: Trace, state: ViewState) -> str:
    return str(_count(trace, _first_card(trace, state), trace.clamp(state.step)))


def _ended(trace: Trace, state: ViewState) -> str:
    step = trace.clamp(state.step)
    rows = trace.rows("finishes", step, step)
    if len(rows) > 1:
        return ""  # a question about one
    return trace.name(int(rows["seq_id"][0])) if len(rows) else "none"


def _newest(trace: Trace, state: ViewState) -> str:
    """ "" for what is no word: a part of one, a line end, a sign."""
    rows = newest_tokens(trace, _first_card(trace, state), trace.clamp(state.step), 1)
    if not len(rows):
        return "none"
    text = visible(trace.token_text(int(rows["token_id"][-1])))
    return text.strip() if text.startswith(" ") and text.strip().isalnum() else ""


def _limit(trace: Trace, state: ViewState) -> str:
    info = trace.sequences.get(_first_card(trace, state))
    return str(info.max_tokens) if info else "0"


def _new_tokens(trace: Trace, state: ViewState) -> str:
    step = trace.clamp(state.step)
    return str(len(trace.rows("tokens", step, step)))


WORDS = {
    "tokens.prompt": "reading its prompt: {done:,} of {n:,}",
    "tokens.running": "{n:,} of {total:,} tokens",
    "tokens.waiting": "waits, {n:,} of {total:,} tokens",
    "tokens.finished": "finished: {n:,} of {total:,} tokens, {why}",
    "tokens.finished.now": "finished now: {n:,} of {total:,} tokens, {why}",
    "tokens.ended": "has ended; how is no longer recorded",
    "tokens.why.stop": "wrote its end",
    "tokens.why.length": "at its limit",
    "tokens.why.room": "out of room",
    "tokens.why.abort": "was stopped",
    "tokens.why.error": "ended with an error",
    "tokens.more": ("+{n:,} more request", "+{n:,} more requests"),
    "tokens.top": "{who}'s token {n:,}: {options}",
    "tokens.option": "“{text}” {percent}",
    "tokens.mark": "{who}'s token {n:,}: “{text}” {percent}",
    "tokens.legend.prompt": "prompt",
    "tokens.legend.text": "generated; thicker underline = more probable",
    "tokens.legend.new": "new in this step",
    "tokens.legend.drafted": "drafted and accepted",
    "tokens.drafted": "drafted and accepted",
    "tokens.none": "no token yet",
    "tokens.badge": "probabilities of the raw logits, temperature 1",
    "tokens.summary": "{parts}.",
    "tokens.summary.part": "{who} has {n:,} of {total:,} tokens, the newest is “{text}”",
    "tokens.summary.none": "{who} has no token yet",
}


VIEW = View(
    name="tokens",
    title="Tokens",
    question="What has each request written so far, and how sure was the model of each token?",
    figure=figure,
    summary=summary,
    words=WORDS,
    asks=(
        Ask("How many tokens has the first request shown generated?", _how_many),
        Ask("How many tokens may the first request shown generate at most?", _limit),
        Ask("What is the newest word of the first request shown?", _newest),
        Ask("How many requests got a new token in this step?", _new_tokens),
        Ask("Which request finished in this step (none if nobody did)?", _ended),
    ),
    order=40,
)
