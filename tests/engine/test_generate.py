"""The command line without a page: what it prints, and that bad input is one sentence and exit code 2, never a traceback."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.browser import app, chromium, page
from engine import recording
from engine.generate import main, print_results, result_of
from engine.recording import load
from engine.trace import TABLES, Trace
from tests.factories import make_trace
from viz.registry import load_views

ROOT = Path(__file__).resolve().parents[2]
CLASS_NAME = re.compile(r"\b[A-Za-z]+(Error|Exception|Warning|Interrupt)\b|Traceback|\bNone\b")


def check_sentence(said: str) -> None:
    """What a newcomer can read: whole sentences, no word of Python."""
    assert said.endswith("."), said
    assert not CLASS_NAME.search(said), said
    assert "\n" not in said and len(said) < 600, said


def refusal(capsys, *args: str) -> str:
    """The sentence of a refused run."""
    assert main([*args]) == 2
    out, said = capsys.readouterr()
    assert out == ""
    assert said.startswith("error: ") and said.endswith("\n")
    check_sentence(said[7:-1])
    return said[7:-1]


def run(*args: str, **options: object) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "engine.generate", *args]
    return subprocess.run(command, cwd=ROOT, timeout=120, **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options})


def damaged(folder: Path, to: Path, **files: bytes | None) -> str:
    """A copy of a checkpoint with some files replaced or, for None, gone."""
    shutil.copytree(folder, to)
    for name, content in files.items():
        path = to / name.replace("__", ".")
        path.unlink() if content is None else path.write_bytes(content)
    return str(to)


def test_json_is_one_object_with_an_entry_a_sample(tiny_llama, capsys):
    prompts = ["alpha", "naïve ☃ text"]
    args = [f"--prompt={p}" for p in prompts]
    assert main(["--model", str(tiny_llama), *args, "--n", "2", "--max-tokens", "7", "--ignore-eos", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["requests"]
    assert [r["prompt"] for r in found["requests"]] == ["alpha", "alpha", "naïve ☃ text", "naïve ☃ text"]
    for entry in found["requests"]:
        assert set(entry) == {"prompt", "token_ids", "text", "finish_reason"}
        assert len(entry["token_ids"]) == 7 and entry["finish_reason"] == "length" and isinstance(entry["text"], str)


def test_without_json_each_answer_has_its_heading(tiny_llama, capsys):
    assert main(["--model", str(tiny_llama), "--prompt", "alpha", "--max-tokens", "3", "--ignore-eos"]) == 0
    assert capsys.readouterr().out.startswith("--- 'alpha' (length, 3 tokens)\n")


def test_prompts_from_a_file_and_a_stop_string(tiny_llama, tmp_path, capsys):
    file = tmp_path / "prompts.json"
    file.write_text('["one", "two"]', encoding="utf-8")
    common = ["--model", str(tiny_llama), "--max-tokens", "40", "--ignore-eos", "--json"]
    assert main([*common, "--prompts-file", str(file)]) == 0
    free = json.loads(capsys.readouterr().out)["requests"]
    assert [r["prompt"] for r in free] == ["one", "two"]
    stop = next(c for c in free[0]["text"][2:] if c.isascii() and c.isprintable())
    assert main([*common, "--prompt", "one", "--stop", stop]) == 0
    stopped = json.loads(capsys.readouterr().out)["requests"][0]
    assert stopped["finish_reason"] == "stop"
    assert free[0]["text"].startswith(stopped["text"]) and stop not in stopped["text"]


@pytest.mark.parametrize(
    "args, words",
    [
        (["--prompt", ""], "empty"),
        (["--prompt", " \n\t"], "empty"),
        ([], "--prompt"),
        (["--prompt", "x" * 5000], "5,000 tokens"),
        (["--prompt", "x" * 200, "--pages", "4"], "the whole cache has 4"),
        (["--prompt", "x" * 10_000_000], "10,000,000 characters"),
        (["--prompt", "a\udcff"], "not valid Unicode"),
        (["--prompt", "a", "--stop", "a\udcff"], "The stop string is not valid Unicode"),
        (["--prompt", "a", "--stop", ""], "stop"),
        (["--prompt", "a", "--max-tokens", "0"], "max_tokens"),
        (["--prompt", "a", "--max-tokens", "-3"], "max_tokens"),
        (["--prompt", "a", "--max-tokens", str(2**31)], "max_tokens"),
        (["--prompt", "a", "--temperature", "-1"], "temperature"),
        (["--prompt", "a", "--temperature", "nan"], "temperature"),
        (["--prompt", "a", "--top-k", "0"], "top_k"),
        (["--prompt", "a", "--top-p", "2"], "top_p"),
        (["--prompt", "a", "--n", "65"], "n must be"),
        (["--prompt", "a", "--seed", "-1"], "seed"),
        (["--prompt", "a", "--pages", "0"], "num_pages"),
        (["--prompt", "a", "--pages", str(10**12)], "free memory"),
        (["--prompt", "a", "--knob", "speed=3"], "There are: batching"),
        (["--prompt", "a", "--knob", "num_pages=--5"], "num_pages"),
        (["--prompt", "a", "--knob", "num_pages=²"], "num_pages"),
        (["--prompt", "a", "--knob", "mode=slow"], "paged, contiguous, none"),
        (["--prompt", "a", "--prompts-file", "/no/such/file"], "No such file"),
    ],
    ids=lambda value: "-".join(a[:14] for a in value[-2:]) if isinstance(value, list) else None,
)
def test_bad_input_is_one_sentence(tiny_llama, capsys, args, words):
    assert words in refusal(capsys, "--model", str(tiny_llama), "--max-tokens", "3", *args)


@pytest.mark.parametrize(
    "content, words",
    [(b'["a\xff"]', "UTF-8"), (b"[" * 100_000, "not JSON"), (b'"a"', "list of strings"), (b"[1]", "list of strings"),
     (b'["\\ud800"]', "Unicode"),
     (json.dumps(["x y " * 6000]).encode(), "24,000 tokens"), (json.dumps(["a", "x" * 10_000_000]).encode(), "10,000,000 characters")],
    ids=["bytes", "nested", "text", "numbers", "surrogate", "long", "10 MB"],
)  # fmt: skip
def test_a_bad_file_of_prompts_is_one_sentence(tiny_llama, tmp_path, capsys, content, words):
    file = tmp_path / "prompts.json"
    file.write_bytes(content)
    assert words in refusal(capsys, "--model", str(tiny_llama), "--prompts-file", str(file))


def test_an_unknown_model_is_one_sentence_with_advice(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for model in (str(tmp_path / "nothing"), "a b/c d", "nobody/nothing", "x" * 10_000, str(Path(__file__))):
        said = refusal(capsys, "--model", model, "--prompt", "a")
        assert "was not found" in said and "leave --model out" in said


@pytest.mark.parametrize(
    "files, words",
    [
        ({"model__safetensors": None}, "is missing"),
        ({"model__safetensors": os.urandom(5000)}, "safetensors"),
        ({"model__safetensors": b""}, "cut off"),
        ({"config__json": b'{"a":'}, "not valid JSON"),
        ({"config__json": b'{"architectures": ["FooForCausalLM"], "model_type": "foo"}'}, "FooForCausalLM"),
        ({"config__json": None}, "config.json is missing"),
        ({"tokenizer__json": b'{"a": 1}'}, "tokenizer.json"),
    ],
    ids=["none", "noise", "empty", "json", "family", "no config", "tokenizer"],
)
def test_a_corrupt_checkpoint_is_one_sentence_that_names_the_file(tiny_llama, tmp_path, capsys, files, words):
    said = refusal(capsys, "--model", damaged(tiny_llama, tmp_path / "copy", **files), "--prompt", "a")
    assert words in said and "--model" in said


def test_a_cut_off_checkpoint_is_one_sentence(tiny_llama, tmp_path, capsys):
    whole = (tiny_llama / "model.safetensors").read_bytes()
    for share in (0.1, 0.5, 0.999):
        folder = damaged(tiny_llama, tmp_path / str(share), model__safetensors=whole[: int(len(whole) * share)])
        assert "cut off" in refusal(capsys, "--model", folder, "--prompt", "a")


def test_a_device_that_is_not_there_is_one_sentence(tiny_llama, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    said = refusal(capsys, "--model", str(tiny_llama), "--prompt", "a", "--device", "cuda", "--knob", "num_pages=8")
    assert "--device cpu" in said


def test_one_bad_prompt_of_several_stops_all_before_any_runs(tiny_llama, capsys):
    assert "empty" in refusal(capsys, "--model", str(tiny_llama), "--prompt", "good", "--prompt", "", "--json")


# ---- recordings and disks ----


def test_a_recording_needs_a_folder_and_is_refused_before_the_model_loads(tmp_path, capsys):
    for target in (tmp_path / "no" / "such" / "x.glass", tmp_path):
        assert "folder" in refusal(capsys, "--model", "/no/model", "--prompt", "a", "--save", str(target))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES], ids=["full", "read-only", "forbidden"])
def test_a_disk_that_takes_no_recording_does_not_take_the_answer(tiny_llama, tmp_path, capsys, monkeypatch, code):
    def refuse(*args):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(recording.os, "fsync", refuse)
    assert main(["--model", str(tiny_llama), "--prompt", "a", "--max-tokens", "3", "--json", "--save", str(tmp_path / "x.glass")]) == 2
    out, said = capsys.readouterr()
    assert len(json.loads(out)["requests"]) == 1
    check_sentence(said.removeprefix("error: ").rstrip("\n"))
    assert os.strerror(code) in said
    assert list(tmp_path.iterdir()) == []  # no half of a file stays behind


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_answers_that_cannot_be_written_are_said(tiny_llama):
    with open("/dev/full", "wb") as full:
        done = run("--model", str(tiny_llama), "--prompt", "a", "--max-tokens", "3", "--json", stdout=full)
    assert done.returncode == 2
    assert done.stderr.decode() == f"error: The answer could not be written: {os.strerror(errno.ENOSPC)}.\n"


def test_the_program_itself_refuses_bytes_that_are_no_text_without_a_traceback(tiny_llama):
    done = run("--model", str(tiny_llama), "--prompt", b"a\xff")
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr == b"error: The prompt is not valid Unicode at character 1.\n"


def test_a_sample_whose_end_the_record_has_lost_is_printed_without_a_reason(capsys):
    whole = make_trace()
    trace = Trace({name: getattr(whole, name) for name in TABLES if name != "finishes"}, whole.sequences, meta=whole.meta)
    result = result_of(trace, 1, "hello")
    assert result["finish_reason"] is None and len(result["token_ids"]) == 12
    print_results([result], as_json=False)
    assert capsys.readouterr().out.startswith("--- 'hello' (not recorded, 12 tokens)")
    print_results([result], as_json=True)
    assert json.loads(capsys.readouterr().out)["requests"][0]["finish_reason"] is None


def test_a_terminal_without_unicode_gets_valid_json(tiny_llama):
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = run("--model", str(tiny_llama), "--prompt", "naïve", "--max-tokens", "9", "--json", env=ascii_only)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.decode("ascii"))["requests"][0]["prompt"] == "naïve"


@pytest.mark.skipif(chromium() is None, reason="needs Chromium")
def test_a_saved_run_shows_every_view(tiny_llama, tmp_path, capsys):
    file = tmp_path / "run.glass"
    prompts = [f"--prompt={w * 30}" for w in ("alpha ", "beta ", "gamma ")]
    knobs = ["--knob", "num_pages=40", "--knob", "max_num_batched_tokens=64"]
    assert main(["--model", str(tiny_llama), *prompts, "--max-tokens", "24", "--n", "2", *knobs, "--save", str(file)]) == 0
    trace = load(file)
    assert len(trace) > 20 and trace.meta["source"] == "recording"
    with app(["--recording", str(file)]) as address, page(address) as opened:
        problems = []
        opened.on("pageerror", lambda error: problems.append(str(error)))
        assert opened.evaluate("glass.stage.catalogue.map((v) => v.name)") == list(load_views())
        assert opened.evaluate("glass.stage.status.live") is False
        for name in load_views():
            opened.evaluate("(name) => { glass.stage.max = 0; glass.stage.setView(glass.stage.panels[0], name); }", name)
            opened.wait_for_function("(name) => glass.stage.models.get(name)?.figure", arg=name, timeout=10_000)
            opened.wait_for_timeout(300)
            bad = opened.locator(".glass-note.glass-bad:visible, .glass-notice:visible")
            assert [bad.nth(i).text_content() for i in range(bad.count())] == []
        assert problems == []
