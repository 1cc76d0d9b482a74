"""Kernels: what this device can do at most, how near a kernel comes, why not in Python, and what operations of a step wait for.

Numbers are those of the views that show them: clocks where something ran, formulas for bytes and FLOPs. Nothing here
depends on how fast the device is, but for the operation that takes longest.
"""

from __future__ import annotations

from collections.abc import Mapping

from engine.artifacts import Ceilings, KernelRun, of_kind
from engine.trace import Trace
from viz.chapter import Beat, Chapter, Predict, Said, TryThis
from viz.measured import brief, ceilings, positive, ridge, times
from viz.moments import all_write, begun, computed, deep_chunk, going_on, names, reading, writing
from viz.theme import rate
from viz.view import ViewState
from viz.views.roofline import COMPUTE, LAUNCH, MEMORY, Measured, Operation, measured

KERNEL, CASE = "rms_norm", "t8192_d4096"
RISES = 1.2  # times as many FLOP a byte: more tokens share what is read
GROWS = 1.5  # times as many FLOP

# ---- one kernel ----


def _newest(trace: Trace) -> KernelRun:
    return [run for run in of_kind(trace, KernelRun) if run.name == KERNEL and run.case == CASE][-1]


def _ours_us(run: KernelRun) -> float:
    """The kernel's time, replayed in a graph where that is shorter; 0.0 where it did not run."""
    return min((us for us in (positive(run.kernel_us), positive(run.graph_us)) if us), default=0.0)


def _limits(trace: Trace, step: int) -> Mapping[str, object]:
    top = of_kind(trace, Ceilings)[-1]
    flops, moved = rate(top.matmul_tflops * 1e12, "FLOP/s"), rate(top.copy_gbps * 1e9, "B/s")
    return {"copy": moved, "matmul": flops, "ridge": f"{ridge(top):.2g}" if ridge(top) < 10 else f"{ridge(top):,.0f}"}


def _page(trace: Trace, step: int) -> Mapping[str, object]:
    run = _newest(trace)
    ours, top = _ours_us(run), ceilings(trace, run.device)
    us = ours or positive(run.torch_us)
    per_s = positive(run.bytes) / us * 1e6 if us else 0.0
    said = {"time": brief(us), "speed": rate(per_s, "B/s"), "name": KERNEL}
    share = Said(f"{_OWN}share", {"share": f"{100 * per_s / (top.copy_gbps * 1e9):.0f} %"}) if top is not None else Said(f"{_OWN}no_share")
    return {"what": Said(f"{_OWN}{'ours' if ours else 'torch'}", said), "share": share}


def _loop(trace: Trace, step: int) -> Mapping[str, object]:
    run = _newest(trace)
    each, count = positive(run.loop_us), int(positive(run.loop_iterations))
    ours = _ours_us(run)
    us = ours or positive(run.torch_us)
    whose = Said(f"{_OWN}whose.{'kernel' if ours else 'torch'}", {"time": brief(us)})
    return {"each": brief(each), "n": count, "whole": brief(each * count), "times": times(each * count / us), "whose": whose}


# ---- operations of a step ----


def _at(trace: Trace, step: int) -> Measured:
    return measured(trace, ViewState(step=step))


def _marks(found: list[Operation] | tuple[Operation, ...]) -> frozenset[str]:
    """A point (where it has one) and a line of the list each."""
    return frozenset(f"row:{op.name}" for op in found) | frozenset(f"op:{op.name}" for op in found if op.drawn)


def _both(trace: Trace, asked: int, decided: int) -> list[tuple[Operation, Operation]]:
    """Operations of the profile that was asked about, with the same ones in the profile that decides."""
    after = {op.name: op for op in _at(trace, decided).ops}
    return [(op, after[op.name]) for op in _at(trace, asked).ops if op.name in after]


def _alone(trace: Trace, step: int) -> bool:
    """One writes, alone, and goes on."""
    return len(computed(trace, step)) == len(writing(trace, step)) == len(going_on(trace, step)) == 1


def _work(of: Measured) -> Mapping[str, object]:
    """Of a profiled step: its longest operation, and how many operations wait for what."""
    counts = {"launch": of.of(LAUNCH), "memory": of.of(MEMORY), "compute": of.of(COMPUTE)}
    return {"op": of.ops[0].name, "time": brief(of.ops[0].device_us), "total": len(of.ops), "tokens": _tokens(of), **counts}


def _tokens(of: Measured) -> int:
    return int(positive(of.profile.prefill_tokens) + positive(of.profile.decode_tokens))


def _bytes_a_token(of: Measured) -> float:
    return sum(op.bytes for op in of.ops) / max(_tokens(of), 1)


def _decode(trace: Trace, step: int) -> Mapping[str, object]:
    of = _at(trace, step)
    return _work(of) | {"moved": rate(_bytes_a_token(of), "B")}


def _more_write(trace: Trace, asked: int, step: int) -> bool:
    """Three or more write and go on, and nobody reads."""
    return all_write(trace, step) and len(going_on(trace, step)) >= 3


def _risen(trace: Trace, asked: int, decided: int) -> frozenset[str]:
    return _marks([op for op, later in _both(trace, asked, decided) if later.intensity >= RISES * op.intensity > 0])


def _shared_by(trace: Trace, asked: int, decided: int) -> Mapping[str, object]:
    before, after = _at(trace, asked), _at(trace, decided)
    said = {"n": _tokens(after), "moved0": rate(_bytes_a_token(before), "B"), "moved1": rate(_bytes_a_token(after), "B")}
    rises = [op for op, later in _both(trace, asked, decided) if later.intensity >= RISES * op.intensity > 0]
    return said | {"what": max(rises, key=lambda op: op.bytes).name}


def _reading(trace: Trace, step: int) -> Mapping[str, object]:
    return _work(_at(trace, step))


def _reads_on(trace: Trace, step: int) -> bool:
    """A prompt's first chunk beside others that write; several steps full of it are left."""
    left = set(reading(trace, step, left=4 * _budget(trace, step))["seq_id"].tolist())
    return len(writing(trace, step)) > 0 and bool(left & set(begun(trace, step)["seq_id"].tolist()))


def _budget(trace: Trace, step: int) -> int:
    return int(trace.step(step).step["token_budget"])


def _far_on(trace: Trace, asked: int, step: int) -> bool:
    """The next chunk is a whole one, and stands on several of its size."""
    return deep_chunk(trace, step, left=_budget(trace, step)) is not None


def _grown(trace: Trace, asked: int, decided: int) -> frozenset[str]:
    return _marks([op for op, later in _both(trace, asked, decided) if later.flops >= GROWS * op.flops > 0])


def _why_grown(trace: Trace, asked: int, decided: int) -> Mapping[str, object]:
    grown = [(op, later) for op, later in _both(trace, asked, decided) if later.flops >= GROWS * op.flops > 0]
    op, later = grown[0]
    return {"what": tuple(op.name for op, _ in grown), "flops0": rate(op.flops, "FLOP"), "flops1": rate(later.flops, "FLOP")}


def _verdicts(trace: Trace, step: int) -> Mapping[str, object]:
    of = _at(trace, step)
    return _work(of) | {"who": names(trace, writing(trace, step)["seq_id"])}


_OWN = "chapter.kernels."

WORDS = {
    f"{_OWN}title": "Kernels and their ceilings",
    f"{_OWN}question": "How fast can this device be, and what does each operation of a step wait for?",
    f"{_OWN}limits": "This device copies at most {copy} and multiplies at most {matmul}. Below {ridge} FLOP a byte memory is the limit.",
    f"{_OWN}page": "One kernel: {what} {share}",
    f"{_OWN}ours": "{name} took {time}: it moved {speed}.",
    f"{_OWN}torch": "{name}, without a GPU, took {time} as torch operations and moved {speed}.",
    f"{_OWN}share": "That is {share} of the copy ceiling.",
    f"{_OWN}no_share": "The ceilings of that device were not measured.",
    f"{_OWN}loop": "As a Python loop a row takes {each}, all {n:,} rows {whole}: {times} as long as {whose}.",
    f"{_OWN}whose.kernel": "our kernel ({time})",
    f"{_OWN}whose.torch": "torch ({time})",
    f"{_OWN}decode": "One token needs every weight: the step moves {moved} for it. {op} takes longest, {time}.",
    f"{_OWN}decode.ask": "Soon three write at once. Click an operation that will then do more FLOP for each byte: it moves right.",
    f"{_OWN}decode.reveal": (
        "{what} and all that read weights: {n:,} token shares one reading. A token costs {moved1} instead of {moved0}.",
        "{what} and all that read weights: {n:,} tokens share one reading. A token costs {moved1} instead of {moved0}.",
    ),
    f"{_OWN}prefill": (
        "{tokens:,} token in one step, most of a prompt: {compute:,} of {total:,} operations wait for arithmetic, {memory:,} for memory.",
        "{tokens:,} tokens in one step, most of a prompt: {compute:,} of {total:,} operations wait for arithmetic, {memory:,} for memory.",
    ),
    f"{_OWN}prefill.ask": "A later chunk has as many tokens, on a longer text. Click the operation that will have more work to do.",
    f"{_OWN}prefill.reveal": "Only {what}: {flops0} became {flops1}. All others work for each token alone, however long its text is.",
    f"{_OWN}prefill.try": "Set max_num_batched_tokens to 256: a chunk has more tokens, and the matmuls move right.",
    f"{_OWN}verdicts": (
        "{who} decode. Of {total:,} operations {launch:,} wait for their launch, {memory:,} for memory, {compute:,} for arithmetic."
    ),
}

CHAPTER = Chapter(
    name="kernels",
    order=70,
    preset="shared",
    beats=(
        Beat(f"{_OWN}limits", ("roofline",), preset="shared", fields=_limits, job=("ceilings", {})),
        Beat(
            f"{_OWN}page", ("kernel_page",), select=lambda trace, step: f"kernel:{KERNEL}", fields=_page,
            job=("kernel", {"name": KERNEL, "case": CASE}),
        ),
        Beat(
            f"{_OWN}loop", ("kernel_page",), select=lambda trace, step: f"kernel:{KERNEL}:loop", fields=_loop,
            job=("kernel", {"name": KERNEL, "case": CASE}),
        ),
        Beat(
            f"{_OWN}decode", ("roofline",), until=_alone, fields=_decode, job=("profile", {}),
            predict=Predict(
                f"{_OWN}decode.ask", ("op", "row"), _risen, f"{_OWN}decode.reveal", until=_more_write, found=_shared_by,
                job=("profile", {}),
            ),
        ),
        Beat(
            f"{_OWN}prefill", ("roofline",), preset="long", until=_reads_on, fields=_reading, job=("profile", {}),
            predict=Predict(
                f"{_OWN}prefill.ask", ("op", "row"), _grown, f"{_OWN}prefill.reveal",
                until=_far_on, found=_why_grown, job=("profile", {}),
            ),
            try_this=TryThis(f"{_OWN}prefill.try", "max_num_batched_tokens", 256),
        ),
        Beat(
            f"{_OWN}verdicts", ("roofline",),
            until=all_write, fields=_verdicts, job=("profile", {}),
        ),
    ),
    words=WORDS,
)  # fmt: skip
