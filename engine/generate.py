"""The engine without a page: `python -m engine.generate --model M --prompt P [--prompt P2 …]`.

Prompts run together, as they would on the page. Refusals are one sentence on stderr and exit code 2.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from dataclasses import replace

from engine.config import KNOBS, CacheConfig, EngineConfig, ModelSource, SchedulerConfig, with_knob
from engine.errors import EngineError
from engine.recording import save
from engine.request import SamplingParams
from engine.session import Session
from engine.tokenizer import check_text
from engine.trace import FINISH_REASONS, Trace
from engine.workloads import WORKLOADS


def main(argv: list[str] | None = None) -> int:
    """Exit code: 0, or 2 with a sentence."""
    args = parser().parse_args(argv)
    try:
        results, trace = generate(args)
        print_results(results, args.json)
        if args.save:  # last: a full disk does not take the answers with it
            save(trace, args.save)
    except EngineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m engine.generate", description=__doc__.splitlines()[0])
    p.add_argument("--model", help="checkpoint folder or Hub id; without it SmolLM2-135M-Instruct")
    p.add_argument("--prompt", action="append", help="may be given several times; all run together")
    p.add_argument("--prompts-file", help='a JSON list of prompts ("-": standard input)')
    p.add_argument("--preset", choices=sorted(WORKLOADS), help="one of the page's presets instead of prompts")
    p.add_argument("--max-tokens", type=int, default=64)
    p.add_argument("--temperature", type=float, default=0.0)
    p.add_argument("--top-k", type=int)
    p.add_argument("--top-p", type=float, default=1.0)
    p.add_argument("--seed", type=int)
    p.add_argument("--n", type=int, default=1, help="samples of each prompt")
    p.add_argument("--stop", action="append", default=[], help="stop string; may be given several times")
    p.add_argument("--ignore-eos", action="store_true")
    p.add_argument("--chat", action="store_true", help="put each prompt into the model's chat template")
    p.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    p.add_argument("--dtype", default="auto", choices=("auto", "float32", "float16", "bfloat16"))
    p.add_argument("--backend", default="auto", choices=("auto", "torch", "triton"))
    p.add_argument("--own-process", action="store_true", help="run the core in a process of its own")
    p.add_argument("--pages", type=int, help="pages of the KV cache")
    p.add_argument("--knob", action="append", default=[], metavar="NAME=VALUE", help="any engine knob, e.g. prefix_caching=false")
    p.add_argument("--nvtx", action="store_true", help="name stages and operations for Nsight Systems")
    p.add_argument("--save", metavar="FILE", help="write a recording of the run")
    p.add_argument("--json", action="store_true", help="print one JSON object")
    return p


def generate(args: argparse.Namespace) -> tuple[list[dict[str, object]], Trace]:
    """One result a sample (prompt, token_ids, text, finish_reason), and the run. Raises EngineError on any refusal."""
    prompts = [] if args.preset else read_prompts(args)
    for text in args.stop:
        check_text(text, "The stop string")
    stop = tuple(args.stop)
    sampling = SamplingParams(args.max_tokens, args.temperature, args.top_k, args.top_p, args.seed, args.n, stop, (), args.ignore_eos)
    check_folder(args.save)
    config = config_from(args)
    config = replace(config, scheduler=replace(config.scheduler, max_num_seqs=max(config.scheduler.max_num_seqs, len(prompts) * args.n)))
    for knob in args.knob:
        config = with_knob(config, *parse_knob(knob))
    session = Session(config, own_process=True if args.own_process else None).start()
    try:
        session.wait_ready(progress=progress_line() if sys.stderr.isatty() else None)
        if args.preset:
            return preset_results(session, args)
        made = [session.prompt(text, sampling, chat=args.chat) for text in prompts]  # refuse before any runs
        handles = [session.add_ids(p.prompt, p.token_ids, sampling) for p in made]
        session.wait([i for h in handles for i in h.seq_ids], timeout=24 * 3600)
        trace = session.trace()
        return [result_of(trace, i, text) for text, handle in zip(prompts, handles, strict=True) for i in handle.seq_ids], trace
    finally:
        session.close()


def preset_results(session: Session, args: argparse.Namespace) -> tuple[list[dict[str, object]], Trace]:
    """Run a preset as the page does: its own prompts, knobs and arrivals."""
    session.run_workload(WORKLOADS[args.preset])
    session.wait_idle()
    trace = session.trace()
    return [result_of(trace, info.seq_id, info.prompt) for info in trace.sequences.values()], trace


def result_of(trace: Trace, seq_id: int, prompt: str) -> dict[str, object]:
    """What the command line says of one sample. finish_reason None: the run was too long for its record, which has lost the
    beginning, and this sample with it."""
    ended = trace.finishes[trace.finishes["seq_id"] == seq_id]
    return {
        "prompt": prompt,
        "token_ids": trace.tokens_of(seq_id)["token_id"].tolist(),
        "text": trace.text_of(seq_id),
        "finish_reason": FINISH_REASONS[ended["reason"][-1]].value if len(ended) else None,
    }


def config_from(args: argparse.Namespace) -> EngineConfig:
    """The part of the configuration that the page's and the command line's options share."""
    return EngineConfig(
        source=ModelSource(args.model, args.device, args.dtype, args.backend),
        cache=CacheConfig(num_pages=args.pages),
        scheduler=SchedulerConfig(),
        nvtx=args.nvtx,
    )


def read_prompts(args: argparse.Namespace) -> list[str]:
    prompts = list(args.prompt or ())
    for text in prompts:
        check_text(text, "The prompt")
    if args.prompts_file:
        try:
            data = sys.stdin.buffer.read() if args.prompts_file == "-" else _read_file(args.prompts_file)
            listed = json.loads(data.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise EngineError("bad_text", f"{args.prompts_file} is not valid UTF-8 (byte {error.start}).") from None
        except (ValueError, RecursionError):
            raise EngineError("bad_prompts", f"{args.prompts_file} is not JSON; a list of strings is needed.") from None
        if not isinstance(listed, list) or not all(isinstance(p, str) for p in listed):
            raise EngineError("bad_prompts", f"{args.prompts_file} must hold a JSON list of strings.")
        prompts += listed
    if not prompts:
        raise EngineError("prompt_empty", 'There is nothing to answer. Give at least one --prompt "…".')
    return prompts


def _read_file(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise EngineError("bad_prompts", f"{path} could not be read: {error.strerror}.") from None


def check_folder(save_to: str | None) -> None:
    """Refuse a recording that has nowhere to go before the model is loaded."""
    folder = os.path.dirname(save_to or "") or "."
    if not os.path.isdir(folder):
        raise EngineError("recording_not_saved", f"The recording cannot be saved: there is no folder {folder}. Make it first.")
    if save_to and os.path.isdir(save_to):
        raise EngineError("recording_not_saved", f"The recording cannot be saved: {save_to} is a folder. Give the name of a file.")


def parse_knob(text: str) -> tuple[str, object]:
    name, _, value = text.partition("=")
    if name not in KNOBS:
        raise EngineError("unknown_knob", f"There is no knob called {name!r}. There are: {', '.join(sorted(KNOBS))}.", name=name[:80])
    words = {"true": True, "false": False}
    return name, words.get(value.lower(), int(value) if re.fullmatch(r"-?[0-9]{1,18}", value) else value)


def progress_line():
    """Writes loading progress to stderr, one line that is overwritten."""

    def show(progress) -> None:
        done = int(progress.fraction * 24)
        print(f"\r[{'#' * done}{'.' * (24 - done)}] {progress.text[:70]:<70}", end="" if progress.fraction < 1 else "\n", file=sys.stderr)

    return show


def print_results(results: list[dict[str, object]], as_json: bool) -> None:
    """Raises EngineError "not_written" when whoever reads has gone or the disk is full."""
    encoding = sys.stdout.encoding or "ascii"
    if as_json:
        text = json.dumps({"requests": results}, ensure_ascii=encoding.lower() != "utf-8", allow_nan=False) + "\n"
    else:
        blocks = (
            f"--- {r['prompt'][:60]!r} ({r['finish_reason'] or 'not recorded'}, {len(r['token_ids'])} tokens)\n{r['text']}\n\n"
            for r in results
        )
        text = "".join(blocks).encode(encoding, "backslashreplace").decode(encoding)
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python tries once more when it exits
        raise EngineError("not_written", f"The answer could not be written: {error.strerror}.") from None


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    raise SystemExit(main())
