"""Why a request is where it is at one step: the scheduler's reason in sentences, every number read from the record.

For the inspector, so in whole sentences and without a limit; a caption has viz/words/caption.py. What was needed and
free when somebody lost its blocks is not a column of the record: the pool is replayed up to the event with which the
victim's blocks came back, and what the other lacked then is counted. Where the log does not reach back, the sentence
goes without these numbers. Nothing is guessed from later steps.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import numpy as np

from engine.plan import WaitReason
from engine.trace import WAIT_REASONS, Op, PoolState, StepTrace, Trace
from viz.select import last_works, selected
from viz.words.caption import ahead_of, finish_words, first_sample
from viz.words.catalogue import Words, cut, words


def why(trace: Trace, seq_id: int, step_id: int | None, language: str = "en", *, paused: bool = False) -> tuple[str, ...]:
    """Sentences about one request at one step (None: the newest). `paused`: the room is paused now, which no record says."""
    if seq_id not in trace.sequences:
        return ()
    t, at = words(language), trace.clamp(step_id)
    if at is None:
        return (_queued(trace, seq_id, t, paused),)
    now = trace.step(at)
    for tell in (_finished, _preempted, _works, _forked, _waits):
        said = tell(trace, now, seq_id, t)
        if said:
            return tuple(said)
    return (_absent(trace, now, seq_id, t, paused),)


def why_selected(
    trace: Trace, selection: str | None, step_id: int | None, language: str = "en", *, paused: bool = False
) -> tuple[str, ...]:
    """The same for a Mark id that speaks of one request: "seq:3", "token:3:12"; nothing for others."""
    ids = () if (selection or "").startswith("page:") else selected(trace, step_id, selection)
    return why(trace, ids[0], step_id, language, paused=paused) if len(ids) == 1 else ()


# ---- ended, queued, absent ----


def _finished(trace: Trace, now: StepTrace, seq_id: int, t: Words) -> list[str]:
    rows = trace.rows("finishes", 0, now.step_id)
    rows = rows[rows["seq_id"] == seq_id]
    if not len(rows):
        return []
    row = rows[-1]
    said = [t("why.finished", who=_name(trace, seq_id), step=int(row["step_id"]), how=finish_words(row, trace, t.language))]
    return said + ([t("why.gave_back", blocks=t("blocks", n=int(row["num_pages"])))] if row["num_pages"] else [])


def _queued(trace: Trace, seq_id: int, t: Words, paused: bool) -> str:
    return t("why.queued.paused" if paused else "why.queued", who=_name(trace, seq_id))


def _absent(trace: Trace, now: StepTrace, seq_id: int, t: Words, paused: bool) -> str:
    """Neither in the batch nor in the queue of this step: not there yet, or not recorded."""
    seen = []
    for table in ("works", "waits", "tokens", "finishes"):
        rows = getattr(trace, table)
        seen += rows["step_id"][rows["seq_id"] == seq_id][:1].tolist()
    if not seen:
        return _queued(trace, seq_id, t, paused)
    if min(seen) > now.step_id:
        return t("why.not_yet", who=_name(trace, seq_id), step=now.step_id, first=min(seen))
    return t("why.unknown", who=_name(trace, seq_id), step=now.step_id)


# ---- in the batch ----


def _works(trace: Trace, now: StepTrace, seq_id: int, t: Words) -> list[str]:
    rows = now.works[now.works["seq_id"] == seq_id]
    if not len(rows):
        return []
    who, work, info = _name(trace, seq_id), rows[0], trace.sequences[seq_id]
    if now.step["failed"] or now.error is not None:
        return [t("why.failed", who=who, step=now.step_id)]
    n, end, prompt = int(work["num_tokens"]), int(work["start"] + work["num_tokens"]), info.num_prompt_tokens
    got = {"who": who, "nth": t.ordinal(end - prompt + 1), "total": info.max_tokens}
    cached = t("tokens", n=int(work["num_cached"]))
    if work["num_recomputed"] and trace.config_at(now.step_id).get("mode") == "none":
        return [t("why.no_cache", **got, tokens=t("tokens", n=n))]
    if work["num_recomputed"] or work["resumed"]:
        total = prompt + len(trace.tokens_of(seq_id, now.step_id - 1)) if now.step_id else prompt
        said = [t("why.recompute", who=who, n=int(work["num_recomputed"]), done=end, total=max(total, end))]
        said += [t("why.recompute.kept", cached=cached)] if work["num_cached"] else []
        return said + _lost_before(trace, now.step_id, seq_id, t)
    if work["start"] >= prompt:
        return [t("why.decode", **got)]
    said = [t("why.prefill", who=who, first=int(work["start"]) + 1, last=end, total=prompt)]
    said += [t("why.hit", cached=cached)] if work["num_cached"] else []
    return said + ([t("why.got", **got)] if work["samples"] else [])


def _forked(trace: Trace, now: StepTrace, seq_id: int, t: Words) -> list[str]:
    """A sample that got its first token from the logits of the prompt that its first sample computed."""
    rows, info = now.tokens[now.tokens["seq_id"] == seq_id], trace.sequences[seq_id]
    if not len(rows):  # its WAIT row, if it has one, says that it waited until this token came
        return []
    nth = t.ordinal(int(rows["position"][-1]) - info.num_prompt_tokens + 1)
    return [t("why.forked", who=_name(trace, seq_id), parent=_name(trace, first_sample(trace, seq_id)), nth=nth, total=info.max_tokens)]


# ---- preempted ----


@dataclass(frozen=True, slots=True)
class Shortage:
    """Blocks that somebody needed when another lost its own, and how many were free at that moment."""

    needed: int
    free: int


def shortage(trace: Trace, now: StepTrace, row: np.void) -> Shortage | None:
    """Read from the log for one PREEMPT row; None where the log does not reach back or nobody needed any."""
    begin, events = _window(trace, now)
    at, cause = _given_back(events, row), int(row["for_seq_id"])
    if not row["has_cause"] or at is None:
        return None
    pages, size = trace.num_pages_at(now.step_id), trace.page_size_at(now.step_id)
    pool, asked = trace.pool_after(begin + at, pages), _asked(trace, now, cause)
    if asked is not None:
        start, end = asked
        needed = max(-(-end // size) - len(pool.tables.get(cause, ())), 0) + _is_shared(pool, cause, start // size)
    else:  # it has to wait for the victims' blocks, which a step in flight still uses: its WAIT row has the number
        wait, last = now.waits[now.waits["seq_id"] == cause], last_works(trace, now.step_id, (cause,)).get(cause)
        if not len(wait) or last is None or WAIT_REASONS[int(wait["reason"][0])] is not WaitReason.NO_FREE_PAGES:
            return None
        ends = [first + int(r["num_pages"]) for r in now.preempts if (first := _given_back(events, r)) is not None]
        index, after = int(last["start"] + last["num_tokens"]) // size, trace.pool_after(begin + max(ends), pages)
        needed = int(wait["needed"][0]) + _is_shared(pool, cause, index) - _is_shared(after, cause, index)
    return Shortage(needed, pool.num_free) if needed > pool.num_free else None


def _is_shared(pool: PoolState, seq_id: int, index: int) -> int:
    """1 where an entry of a block table is held by others too: a write needs a block for the copy."""
    table = pool.tables.get(seq_id, ())
    return int(index < len(table) and pool.ref_counts[table[index]] > 1)


def _window(trace: Trace, now: StepTrace) -> tuple[int, np.ndarray]:
    """(number of the first, EVENT rows) of this step and the one before: a plan made ahead logs its events early."""
    base, end = int(trace.meta.get("event_base", 0)), int(now.step["event_end"])
    at = bisect_left(trace.steps["step_id"], now.step_id)
    begin = max(int(trace.steps["event_end"][at - 2]) if at > 1 else base, base)
    return begin, trace.events[begin - base : max(end - base, 0)]


def _given_back(events: np.ndarray, row: np.void) -> int | None:
    """Where the run of RELEASE events begins with which a victim's blocks came back."""
    mine = np.flatnonzero((events["op"] == Op.RELEASE) & (events["owner"] == row["seq_id"]))
    n = int(row["num_pages"])
    return int(mine[-n]) if 0 < n <= len(mine) else None


def _asked(trace: Trace, now: StepTrace, seq_id: int) -> tuple[int, int] | None:
    """Which tokens [start, end) somebody was to compute who needed blocks for them: its work, or, where it lost its
    own blocks in the end, what was ready and fitted; None where a budget that others shared leaves that open."""
    work = now.works[now.works["seq_id"] == seq_id]
    if len(work):
        return int(work["start"][0]), int(work["start"][0] + work["num_tokens"][0])
    own, info = now.preempts[now.preempts["seq_id"] == seq_id], trace.sequences.get(seq_id)
    if not len(own) or info is None:
        return None
    start = int(own["num_tokens"][0])
    known = info.num_prompt_tokens + (len(trace.tokens_of(seq_id, now.step_id - 1)) if now.step_id else 0)
    ready, left = max(known - start, 1), int(now.step["token_budget"]) - int(now.works["num_tokens"].sum())
    if ready <= 1 or (ready <= left and len(now.preempts) == 1):
        return start, start + ready
    whole = not trace.config_at(now.step_id).get("chunked_prefill", True)
    return (start, start + (ready if whole else left)) if len(now.preempts) == 1 and left > 0 else None


def _preempted(trace: Trace, now: StepTrace, seq_id: int, t: Words) -> list[str]:
    rows = now.preempts[now.preempts["seq_id"] == seq_id]
    if not len(rows):
        return []
    row, who = rows[-1], _name(trace, seq_id)
    fields = {"who": who, "step": now.step_id, "cause": _name(trace, row["for_seq_id"]), "rank": _rank(trace, now, row, t)}
    short = shortage(trace, now, row)
    if short is not None:
        fields |= {"blocks": t("blocks", n=short.needed), "free": _was_free(short.free, t)}
    if not row["has_cause"]:
        said = t("why.preempted.knob", who=who, step=now.step_id, knobs=_knobs(trace, now.step_id, t))
    elif row["for_seq_id"] == seq_id:
        said = t("why.preempted.self", **fields) if short else t("why.preempted.self.plain", who=who, step=now.step_id)
    else:
        said = t("why.preempted" if short else "why.preempted.plain", **fields)
    lost = "why.lost.cached" if trace.config_at(now.step_id).get("prefix_caching") and row["has_cause"] else "why.lost"
    return [said, t(lost, blocks=t("blocks", n=int(row["num_pages"])), tokens=t("tokens", n=int(row["num_tokens"])))]


def _rank(trace: Trace, now: StepTrace, row: np.void, t: Words) -> str:
    """Why this one and not another: the lowest rank of those that run gives way."""
    mine, cause = trace.sequences.get(int(row["seq_id"])), trace.sequences.get(int(row["for_seq_id"]))
    who = _name(trace, row["seq_id"])
    if trace.config_at(now.step_id).get("policy") == "priority" and mine and cause and mine.priority > cause.priority:
        return t("why.rank.priority", who=who, priority=mine.priority)
    return t("why.rank.last", who=who)


def _knobs(trace: Trace, step: int, t: Words) -> str:
    """Which knobs differ from the step before."""
    new, old = trace.config_at(step), trace.config_at(step - 1) if len(trace.rows("steps", step - 1, step - 1)) else {}
    changed = [k for k in new if k in old and new[k] != old[k]]
    said = [t("why.knob", name=t(f"knob.{k}") if t.has(f"knob.{k}") else k, old=old[k], new=new[k]) for k in changed]
    return t("list.comma").join(said) or t("why.knob.unknown")


def _lost_before(trace: Trace, step: int, seq_id: int, t: Words) -> list[str]:
    """The preemption that somebody who waits, or computes again, came from."""
    rows = trace.rows("preempts", 0, step - 1)
    rows = rows[rows["seq_id"] == seq_id]
    if not len(rows):
        return []
    row = rows[-1]
    key = "why.since.knob" if not row["has_cause"] else "why.since.self" if row["for_seq_id"] == seq_id else "why.since"
    fields = {"cause": _name(trace, row["for_seq_id"])} if key == "why.since" else {}
    return [t(key, step=int(row["step_id"]), tokens=t("tokens", n=int(row["num_tokens"])), **fields)]


# ---- waiting ----


def _waits(trace: Trace, now: StepTrace, seq_id: int, t: Words) -> list[str]:
    rows = now.waits[now.waits["seq_id"] == seq_id]
    if not len(rows):
        return []
    said = _reason(trace, now, rows[-1], t)
    ran = last_works(trace, now.step_id, (seq_id,)).get(seq_id)
    lost = trace.rows("preempts", int(ran["step_id"]) if ran is not None else 0, now.step_id - 1)["seq_id"]
    return said + (_lost_before(trace, now.step_id, seq_id, t) if seq_id in lost else [])


def _reason(trace: Trace, now: StepTrace, wait: np.void, t: Words) -> list[str]:
    """One or two sentences for a WAIT row."""
    seq_id, needed, available = int(wait["seq_id"]), int(wait["needed"]), int(wait["available"])
    who, code = _name(trace, seq_id), int(wait["reason"])
    reason = WAIT_REASONS[code] if code < len(WAIT_REASONS) else None
    if reason is WaitReason.TOKEN_BUDGET:
        return _no_budget(trace, now, who, needed, available, t)
    if reason is WaitReason.NO_FREE_PAGES:
        return [_no_blocks(trace, now, wait, t)]
    if reason is WaitReason.MAX_SEQS:
        return [t("why.wait.max_seqs", who=who, n=int(now.step["max_num_seqs"]), holders=_running(trace, now, t))]
    if reason is WaitReason.SIBLING_PROMPT:
        parent = first_sample(trace, seq_id)
        work = last_works(trace, now.step_id, (parent,)).get(parent)
        done = min(int(work["start"] + work["num_tokens"]), needed) if work is not None else 0
        return [t("why.wait.sibling_prompt", who=who, parent=_name(trace, parent), done=done, total=needed)]
    if reason is WaitReason.STATIC_BATCH:
        return [t("why.wait.static_batch", who=who, n=available, holders=_running(trace, now, t))]
    if reason in (WaitReason.QUEUE_ORDER, WaitReason.PREEMPTION):
        said = [_behind(trace, now, seq_id, t)] if reason is WaitReason.QUEUE_ORDER else []
        victims = t.names(trace.name(int(i)) for i in now.preempts["seq_id"])
        said = said or [t("why.wait.preemption", who=who, victim=victims or t("nobody"))]
        return [*said, t("why.would_need", blocks=t("blocks", n=needed), free=_is_free(available, t))]
    key = f"why.wait.{reason.value}" if reason is not None else "why.wait.unknown"
    return [t(key if t.has(key) else "why.wait.unknown", who=who)]


def _no_budget(trace: Trace, now: StepTrace, who: str, needed: int, left: int, t: Words) -> list[str]:
    need, budget = t("tokens", n=needed), int(now.step["token_budget"])
    if left <= 0:
        holders = t.names((trace.name(int(i)) for i in now.works["seq_id"]), 6) or t("nobody")
        return [t("why.wait.token_budget.none", who=who, need=need, budget=budget, holders=holders)]
    said = [t("why.wait.token_budget", who=who, need=need, left=left, budget=budget)]
    return said if trace.config_at(now.step_id).get("chunked_prefill", True) else [*said, t("why.wait.no_chunks")]


def _no_blocks(trace: Trace, now: StepTrace, wait: np.void, t: Words) -> str:
    seq_id, needed, available = int(wait["seq_id"]), int(wait["needed"]), int(wait["available"])
    info, config, size = trace.sequences[seq_id], trace.config_at(now.step_id), trace.page_size_at(now.step_id)
    who, blocks, free = _name(trace, seq_id), t("blocks", n=needed), _is_free(available, t)
    if trace.pool_at(now.step_id).tables.get(seq_id):
        return t("why.wait.no_free_pages.settle", who=who, blocks=blocks, free=free)
    if config.get("mode") == "contiguous":
        most = t("tokens", n=min(info.num_prompt_tokens + info.max_tokens, needed * size))
        return t("why.wait.no_free_pages.run", who=who, tokens=most, blocks=blocks, available=available)
    known = info.num_prompt_tokens + (len(trace.tokens_of(seq_id, now.step_id - 1)) if now.step_id else 0)
    shared, tokens = -(-known // size) - needed, t("tokens", n=known)
    if shared > 0:
        return t("why.wait.no_free_pages.shared", who=who, blocks=blocks, tokens=tokens, shared=shared, free=free)
    return t("why.wait.no_free_pages", who=who, blocks=blocks, tokens=tokens, free=free)


def _behind(trace: Trace, now: StepTrace, seq_id: int, t: Words) -> str:
    first = ahead_of(trace, now.step_id, seq_id)
    return t("why.wait.queue_order", who=_name(trace, seq_id), first=_name(trace, first))


def _running(trace: Trace, now: StepTrace, t: Words) -> str:
    """Who holds a slot: those that computed, and those that hold blocks and wait in their slot."""
    holders = trace.pool_at(now.step_id).tables
    ids = [*now.works["seq_id"].tolist(), *(i for i in now.waits["seq_id"].tolist() if i in holders)]
    return t.names((trace.name(i) for i in dict.fromkeys(ids)), 8) or t("nobody")


# ---- parts ----


def _is_free(n: int, t: Words) -> str:
    return t("wait.free", n=n) if n > 0 else t("wait.free.none")


def _was_free(n: int, t: Words) -> str:
    return t("why.free", n=n) if n > 0 else t("why.free.none")


def _name(trace: Trace, seq_id: int) -> str:
    return cut(trace.name(int(seq_id)), 12)
