"""transformers' own `generate` on the engine's checkpoint, as the ladder's first rungs: the one place that runs its models.

Everywhere else transformers supplies configs and tokenizers, and the forward pass is ours; a test of the imports holds
that. Its modelling code is imported when somebody climbs the ladder, in the process that has the device: a process of its
own would need a second CUDA context and would run beside the engine instead of alternating with it.

A call of `generate` cannot be taken in slices, so its streamer, which is called with each token once that is on the host,
notes the time and ends the call by an exception when it is late. Knows no rooms and no ladder.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from pathlib import Path

import torch


class Late(Exception):
    """The call took longer than it was given."""


class _Clock:
    """A streamer: when each token came, seconds of perf_counter."""

    def __init__(self, deadline: float) -> None:
        self.ids: list[int] = []
        self.times: list[float] = []
        self._deadline, self._has_prompt = deadline, False

    def put(self, value: torch.Tensor) -> None:
        """First the prompt, then token by token, on the host."""
        now = time.perf_counter()
        if not self._has_prompt:
            self._has_prompt = True
            return
        self.ids.append(int(value.reshape(-1)[0]))
        self.times.append(now)
        if now > self._deadline:
            raise Late

    def end(self) -> None:
        return


class TransformersPeer:
    """The same weights in transformers' model, with the same type on the same device. A second copy until close().

    Args:
        folder: an ordinary checkpoint folder.
    """

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
        from transformers import AutoModelForCausalLM  # seconds, and most never climb the ladder
        from transformers.utils import logging

        logging.disable_progress_bar()
        self.device = device
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True).to(device).eval()

    def generate(self, prompt: Sequence[int], new_tokens: int, cache: bool, deadline: float) -> tuple[list[int], list[float]]:
        """Greedy, exactly `new_tokens`, past every end of text.

        Args:
            deadline: perf_counter.
        Returns:
            (ids, perf_counter when the host had each).
        Raises:
            Late: it was over.
        """
        from transformers import GenerationConfig

        clock = _Clock(deadline)
        ids = torch.tensor([list(prompt)], device=self.device)
        # none of the checkpoint's own defaults: no sampling, no end of text
        self.model.generation_config = GenerationConfig(do_sample=False, max_new_tokens=new_tokens, use_cache=cache, pad_token_id=0)
        with torch.inference_mode():
            self.model.generate(ids, attention_mask=torch.ones_like(ids), streamer=clock)
        return clock.ids, clock.times

    def close(self) -> None:
        """Give the memory back."""
        self.model = None
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
