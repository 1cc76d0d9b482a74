"""pack(): every number of a Record lands in its column."""

from __future__ import annotations

import numpy as np

from engine.plan import (
    Clocks,
    Committed,
    Finished,
    Preempted,
    Sampled,
    StepError,
    StepPlan,
    StepResult,
    TextPiece,
    Waiting,
    WaitReason,
    Work,
)  # fmt: skip
from engine.recorder import Record, Recorder, pack
from engine.request import FinishReason
from engine.trace import FINISH_REASONS, TABLES, WAIT_REASONS, Op, TensorSample


def make_record(step: int = 7, **changes: object) -> Record:
    works = (Work(1, 2, 30, 4, 8, 3, True, (), 0), Work(5, 1, 12, 1, 0, 0, False, (5, 6), 0))
    plan = StepPlan(
        step, "main", works, (Waiting(9, WaitReason.NO_FREE_PAGES, 4, 1),), (Preempted(8, 5, 3, 11), Preempted(4, None, 2, 7)),
        ((3, 4),), 64, 6,
    )  # fmt: skip
    result = StepResult(step, (Sampled(5, 77, -0.5, (77, 3), (-0.5, -1.5)), Sampled(6, 78, -0.7)), 8, 11, 12)
    committed = Committed(step, ((5, 77),), (Finished(6, FinishReason.STOP, 3),), (TextPiece(5, "é🙂"), TextPiece(1, "x")), 13)
    parts = {
        "plan": plan, "result": result, "committed": committed, "clocks": Clocks(100, 1, 2, 3, 4, 5, 109),
        "events": [(Op.ALLOC, 1, 5, 0), (Op.FREE, 2, 0, 0)], "event_end": 40, "config": 2, "record_us": 14,
    } | changes  # fmt: skip
    return Record(**parts)


def rows(table: np.ndarray) -> list[tuple]:
    return [tuple(v.tolist() if isinstance(v, np.ndarray) else v for v in row.tolist()) for row in table]


def test_every_number_lands_in_its_column():
    tables = pack([make_record()], 50)
    assert set(tables) == set(TABLES) and all(tables[name].dtype == TABLES[name] for name in TABLES)
    assert rows(tables["steps"]) == [(7, 100, 1, 2, 3, 4, 5, 64, 6, 40, 2, 7, 0, 0, 8, 109, 11, 12, 13, 14)]
    assert rows(tables["works"]) == [(7, 1, 2, 30, 4, 8, 3, 0, 1, 0), (7, 5, 1, 12, 1, 0, 0, 0, 0, 1)]
    assert rows(tables["waits"]) == [(7, 9, WAIT_REASONS.index(WaitReason.NO_FREE_PAGES), 4, 1)]
    assert rows(tables["preempts"]) == [(7, 8, 1, 5, 3, 11), (7, 4, 0, 0, 2, 7)]
    assert rows(tables["finishes"]) == [(7, 6, FINISH_REASONS.index(FinishReason.STOP), 3)]
    assert rows(tables["events"]) == [(1, 1, 5, 0), (4, 2, 0, 0)]
    (token,) = tables["tokens"]  # sequence 6 had ended: its token was dropped
    assert token.tolist()[:4] == (7, 5, 13, 77) and token["num_top"] == 2 and token["logprob"] == np.float32(-0.5)
    assert token["top_ids"].tolist() == [77, 3, 0, 0, 0] and token["top_logprobs"].tolist() == [-0.5, -1.5, 0, 0, 0]
    assert rows(tables["texts"]) == [(7, 5, 50, 6), (7, 1, 56, 1)]
    assert tables["text_bytes"].tobytes().decode() == "é🙂x"


def test_a_keyframe_begins_with_a_mark():
    tables = pack([make_record(keyframe=(40, [(Op.ALLOC, 3, 1, 0)]))], 0)
    assert rows(tables["keyframes"]) == [(40, 0, 0, 0, 0), (40, 1, 3, 1, 0)]


def test_flags_say_probed_and_failed():
    sample = TensorSample(7, "hidden", 0, np.zeros(3, np.float32))
    tables = pack([make_record(samples=(sample,), probed=True), make_record(8, error=StepError("step_failed", "No.", (1,)))], 0)
    assert tables["steps"]["probed"].tolist() == [1, 0] and tables["steps"]["failed"].tolist() == [0, 1]


def test_draining_takes_everything_once():
    recorder = Recorder()
    recorder.append(make_record(0, samples=(TensorSample(0, "hidden", 0, np.zeros(3, np.float32)),)))
    recorder.append(make_record(1, error=StepError("step_failed", "No.", (1, 5))))
    recorder.config({"page_size": 4})
    recorder.artifact("a")
    first, second = recorder.drain(), recorder.drain()
    assert first.tables["steps"]["step_id"].tolist() == [0, 1] and second.is_empty
    assert first.artifacts[0] == "a" and len(first.artifacts) == 2 and first.configs == ({"page_size": 4},)
    assert [(e.step_id, e.seq_ids) for e in first.errors] == [(1, (1, 5))]
    recorder.append(make_record(2))
    assert recorder.drain().tables["texts"]["offset"].tolist() == [14, 20], "offsets go on where the last drain ended"


def test_nothing_packs_to_empty_tables_of_the_right_types():
    assert all(len(table) == 0 and table.dtype == TABLES[name] for name, table in pack([], 0).items())
