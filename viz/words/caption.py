"""The record in plain words: one sentence a step, why somebody waits, how somebody ended.

A caption has at most 110 characters and two facts; what matters more comes first: preempted, finished, joined,
then blocks, and only on a quiet step who got a token. Numbers come from the record alone. Recomputation after
a preemption is never called a prefix hit.
"""

from __future__ import annotations

import numpy as np

from engine.plan import WaitReason
from engine.request import FinishReason
from engine.trace import FINISH_REASONS, WAIT_REASONS, Op, StepTrace, Trace
from viz.layout import ADVANCE, text_em
from viz.select import admitted
from viz.words.catalogue import Words, cut, words

MAX_CAPTION = 110
MAX_FACTS = 2


def caption(trace: Trace, step_id: int | None, language: str = "en") -> str:
    """One sentence about a step (None: the newest)."""
    t = words(language)
    at = trace.clamp(step_id)
    if at is None:
        return t("caption.empty")
    now = trace.step(at)
    if now.step["failed"] or now.error is not None:
        return _failed(trace, now, t)
    facts: list[str] = []
    for tell in (_preempted, _finished, _joined, _blocks):
        facts += tell(trace, now, t)
    facts += _chunks(trace, now, t)
    if not facts:
        facts = _plain(trace, now, t)
    said = t("caption", step=at, facts=facts[0])
    for fact in facts[1:]:
        longer = t("caption", step=at, facts=t("caption.join", first=facts[0], second=fact))
        if _fits(longer):
            return longer
    return _cut(said)


def _failed(trace: Trace, now: StepTrace, t: Words) -> str:
    ids = now.error.seq_ids if now.error else now.works["seq_id"].tolist()
    key = "caption.failed" if len(ids) else "caption.failed.nobody"
    return _cut(t(key, step=now.step_id, who=_names(trace, ids, t)))


def _fits(text: str) -> bool:
    """The bar is as wide as MAX_CAPTION ordinary characters; kana and kanji are wider."""
    return len(text) <= MAX_CAPTION and text_em(text) <= MAX_CAPTION * ADVANCE + 1e-6


def _cut(text: str) -> str:
    return next((c for n in range(min(len(text), MAX_CAPTION), 0, -1) if _fits(c := cut(text, n))), text[:1])


# ---- facts, each most important first ----


def _preempted(trace: Trace, now: StepTrace, t: Words) -> list[str]:
    rows = now.preempts
    if len(rows) > 1 and len(set(rows["seq_id"].tolist())) > 1:
        blocks = t("blocks", n=int(rows["num_pages"].sum()))
        if rows["has_cause"].all():
            return [t("preempted.many", who=_names(trace, rows["seq_id"], t), blocks=blocks)]
        return [t("preempted.knob", who=_names(trace, rows["seq_id"], t), blocks=blocks)]
    facts = []
    for row in rows:
        who, blocks = _name(trace, row["seq_id"]), t("blocks", n=int(row["num_pages"]))
        key = "preempted.knob" if not row["has_cause"] else "preempted.self" if row["for_seq_id"] == row["seq_id"] else "preempted.for"
        facts.append(t(key, who=who, blocks=blocks, cause=_name(trace, row["for_seq_id"])))
    return facts


def _finished(trace: Trace, now: StepTrace, t: Words) -> list[str]:
    groups: dict[FinishReason, list[np.void]] = {}
    for row in now.finishes:
        reason = FINISH_REASONS[int(row["reason"])]
        groups.setdefault(FinishReason.LENGTH if reason is FinishReason.STOP else reason, []).append(row)
    facts = []
    for reason, rows in groups.items():
        who = _names(trace, [r["seq_id"] for r in rows], t)
        pages = sum(int(r["num_pages"]) for r in rows)
        freed = pages and _all_freed(trace, now, {int(r["seq_id"]) for r in rows})
        if reason is FinishReason.ERROR:
            key = "finished.error"
        else:
            key = "finished.abort" if reason is FinishReason.ABORT else "finished"
            key += ".plain" if not pages else (".freed" if key == "finished" else "") if freed else ".gave_back"
        facts.append(t(key, n=len(rows), who=who, blocks=t("blocks", n=pages)))
    return facts


def _all_freed(trace: Trace, now: StepTrace, seq_ids: set[int]) -> bool:
    """Whether nobody else holds a block that these gave back in this step."""
    events = step_events(trace, now)
    mine = (events["op"] == Op.RELEASE) & np.isin(events["owner"], list(seq_ids))
    return not trace.pool_at(now.step_id).ref_counts[events["page"][mine]].any()


def _joined(trace: Trace, now: StepTrace, t: Words) -> list[str]:
    """Who was admitted: its first work, at position num_cached, or a sample that starts on a shared prompt."""
    works = now.works
    joined = admitted(works)
    back = works[works["resumed"] > 0]
    hits = [w for w in joined if w["num_cached"] > 0]
    fresh = [w for w in joined if w["num_cached"] == 0 and w["start"] == 0]
    facts = []
    for w in hits:
        cached = t("tokens", n=int(w["num_cached"]))
        facts.append(t("joined.hit", who=_name(trace, w["seq_id"]), cached=cached, n=int(w["num_tokens"])))
    if len(fresh) > 1:
        facts.append(t("joined.many", who=_names(trace, [w["seq_id"] for w in fresh], t), n=sum(int(w["num_tokens"]) for w in fresh)))
    elif fresh:
        facts.append(_joined_alone(trace, fresh[0], t))
    for w in back:
        key = "joined.resumed.kept" if w["num_cached"] else "joined.resumed"
        cached, total = t("tokens", n=int(w["num_cached"])), int(w["num_tokens"] + w["num_cached"])
        who = _name(trace, w["seq_id"])
        facts.append(t(key, who=who, n=int(w["num_recomputed"]), total=max(total, _known(trace, w, now)), cached=cached))
    return facts + _forked(trace, now, t)


def _joined_alone(trace: Trace, work: np.void, t: Words) -> str:
    seq_id, n = int(work["seq_id"]), int(work["num_tokens"])
    info = trace.sequences.get(seq_id)
    total = info.num_prompt_tokens if info else n
    return t("joined.part" if n < total else "joined.whole", who=_name(trace, seq_id), n=min(n, total), total=total)


def _known(trace: Trace, work: np.void, now: StepTrace) -> int:
    """Tokens that the sequence had before this step: what a recomputation repeats."""
    info = trace.sequences.get(int(work["seq_id"]))
    rows = trace.tokens_of(int(work["seq_id"]), now.step_id - 1) if trace.first_step != now.step_id else ()
    return (info.num_prompt_tokens if info else 0) + len(rows)


def _forked(trace: Trace, now: StepTrace, t: Words) -> list[str]:
    """Samples that began in this step by sharing the prompt of their first sample."""
    worked = set(now.works["seq_id"].tolist())
    events = step_events(trace, now)
    shared = dict.fromkeys(events["owner"][events["op"] == Op.SHARE].tolist())
    forks = [i for i in shared if i not in worked and i in trace.sequences and trace.sequences[i].sample > 0]
    if not forks:
        return []
    parent = next((i for i in trace.sequences if trace.sequences[i].request_id == trace.sequences[forks[0]].request_id), forks[0])
    return [t("joined.forked", n=len(forks), who=_names(trace, forks, t), parent=_name(trace, parent))]


def _blocks(trace: Trace, now: StepTrace, t: Words) -> list[str]:
    """Copies on write, then new blocks of those that were running before."""
    events = step_events(trace, now)
    copies = events[events["op"] == Op.COPY]
    facts = [t("block.copy", who=_name(trace, e["owner"]), page=int(e["page"])) for e in copies]
    works = now.works
    joined = set(works["seq_id"][(works["start"] == works["num_cached"]) | (works["resumed"] > 0)].tolist())
    copied = set(copies["owner"].tolist())
    taken: dict[int, int] = {}
    for owner in events["owner"][events["op"] == Op.ALLOC].tolist():
        if owner not in joined and owner not in copied:
            taken[owner] = taken.get(owner, 0) + 1
    if len(taken) > 1:
        facts.append(t("block.new.many", who=_names(trace, taken, t), n=sum(taken.values())))
    elif taken:
        facts += [t("block.new", who=_name(trace, owner), n=n) for owner, n in taken.items()]
    return facts


def _chunks(trace: Trace, now: StepTrace, t: Words) -> list[str]:
    """Prompts (or recomputations) that went on from an earlier step."""
    facts = []
    works = now.works
    for w in works[(works["samples"] == 0) & (works["start"] != works["num_cached"]) & (works["resumed"] == 0)]:
        info = trace.sequences.get(int(w["seq_id"]))
        key = "plain.recompute" if w["num_recomputed"] else "plain.chunk"
        total = info.num_prompt_tokens if info else 0
        facts.append(t(key, who=_name(trace, w["seq_id"]), n=int(w["num_tokens"]), done=int(w["start"] + w["num_tokens"]), total=total))
    return facts


def _plain(trace: Trace, now: StepTrace, t: Words) -> list[str]:
    facts = []
    got = list(dict.fromkeys(now.tokens["seq_id"].tolist()))
    if got:
        facts.append(t("plain.token" if len(got) == 1 else "plain.token.many", who=_names(trace, got, t)))
    if not facts and len(now.waits):
        waits = now.waits["seq_id"]
        facts.append(t("caption.only_waiting", n=len(waits), who=_names(trace, waits, t)))
    return facts or [t("caption.nothing")]


# ---- waiting and ending ----


def reason_words(wait: np.void, trace: Trace, language: str = "en") -> str:
    """ "E waits: needs 3 blocks, 1 is free". `wait` is a WAIT row."""
    t = words(language)
    return t("wait", who=_name(trace, wait["seq_id"]), why=why_words(wait, trace, language))


def why_words(wait: np.void, trace: Trace, language: str = "en") -> str:
    """The reason alone, with its numbers."""
    t = words(language)
    step, seq_id = int(wait["step_id"]), int(wait["seq_id"])
    needed, available = int(wait["needed"]), int(wait["available"])
    code = int(wait["reason"])
    reason = WAIT_REASONS[code] if code < len(WAIT_REASONS) else None
    steps = trace.rows("steps", step, step)
    if reason is WaitReason.TOKEN_BUDGET:
        if available <= 0 and len(steps):
            return t("wait.token_budget.none", budget=int(steps["token_budget"][0]))
        return t("wait.token_budget", need=t("tokens", n=needed), left=f"{available:,}")
    if reason is WaitReason.NO_FREE_PAGES:
        need = t("blocks", n=needed)
        if trace.config_at(step).get("mode") == "contiguous":
            return t("wait.no_free_pages.run", need=need, available=available)
        return t("wait.no_free_pages", need=need, free=t("wait.free", n=available) if available > 0 else t("wait.free.none"))
    if reason is WaitReason.MAX_SEQS:
        return t("wait.max_seqs", n=int(steps["max_num_seqs"][0]) if len(steps) else needed)
    if reason is WaitReason.SIBLING_PROMPT:
        return t("wait.sibling_prompt", parent=_name(trace, first_sample(trace, seq_id)), n=needed)
    if reason is WaitReason.STATIC_BATCH:
        return t("wait.static_batch", n=available)
    if reason is WaitReason.QUEUE_ORDER:
        return t("wait.queue_order", first=_name(trace, ahead_of(trace, step, seq_id)))
    if reason is WaitReason.PREEMPTION:
        victims = trace.rows("preempts", step, step)["seq_id"]
        if seq_id in victims:
            return t("wait.preemption.self")
        return t("wait.preemption", victim=_names(trace, victims, t))
    key = f"wait.{reason.value}" if reason is not None else "wait.unknown"
    return t(key) if t.has(key) else t("wait.unknown")


def first_sample(trace: Trace, seq_id: int) -> int:
    info = trace.sequences.get(seq_id)
    if info is None:
        return seq_id
    return next((i for i in range(seq_id - info.sample, seq_id) if i in trace.sequences), seq_id)


def ahead_of(trace: Trace, step: int, seq_id: int) -> int:
    """The first in the queue: it waits for something of its own, and nobody overtakes it."""
    for row in trace.rows("waits", step, step):
        if WAIT_REASONS[int(row["reason"])] in (WaitReason.NO_FREE_PAGES, WaitReason.TOKEN_BUDGET) and row["seq_id"] != seq_id:
            return int(row["seq_id"])
    return seq_id


def finish_words(finish: np.void, trace: Trace, language: str = "en") -> str:
    """How somebody ended: "reached its limit of 10 tokens". `finish` is a FINISH row."""
    t = words(language)
    reason = FINISH_REASONS[int(finish["reason"])]
    if reason is not FinishReason.LENGTH:
        return t(f"finish.{reason.value}")
    info = trace.sequences.get(int(finish["seq_id"]))
    last = trace.rows("tokens", int(finish["step_id"]), int(finish["step_id"]))
    last = last[last["seq_id"] == finish["seq_id"]]
    got = int(last["position"][-1]) - info.num_prompt_tokens + 1 if info and len(last) else info.max_tokens if info else 0
    return t("finish.length.room" if info and got < info.max_tokens else "finish.length", n=got)


# ---- parts ----


def step_events(trace: Trace, now: StepTrace) -> np.ndarray:
    """EVENT rows of one step; empty where the step before is not in the trace."""
    at = int(np.searchsorted(trace.steps["step_id"], now.step_id))
    base, end = int(trace.meta.get("event_base", 0)), int(now.step["event_end"])
    if at > 0 and int(trace.steps["step_id"][at - 1]) == now.step_id - 1:
        begin = int(trace.steps["event_end"][at - 1])
    elif at == 0 and base == 0:
        begin = 0
    else:
        return trace.events[:0]
    return trace.events[max(begin - base, 0) : max(end - base, 0)]


def _name(trace: Trace, seq_id: int) -> str:
    return cut(trace.name(int(seq_id)), 12)


def _names(trace: Trace, seq_ids, t: Words) -> str:
    return t.names([trace.name(int(i)) for i in seq_ids])
