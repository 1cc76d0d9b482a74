"""Trained heads as files: one safetensors file a head, with its card inside; the same card lies beside it for people.

A head fits one target: family shape, vocabulary and, where both know it, the tokenizer's fingerprint are in the card and
checked before a tensor is read. Another model's head would draft nonsense that verification refuses at full price.

Does not know what the tensors mean. Rejected: a folder with config.json (two files that can be mixed up), pickles.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from engine.errors import EngineError
from engine.models.decoder import Layer
from engine.models.loading import LoadedModel
from engine.models.weights import read_header
from engine.ops import Ops
from engine.speculative.base import Target, check_vocabulary
from engine.tokenizer import TextTokenizer

FORMAT = 1
CARD = "glass_drafter"  # the key in the file's metadata
LIMIT = 16 * 2**20  # bytes of a head that ships
FOLDER = Path(__file__).resolve().parents[2] / "assets" / "drafters"


def bad_head(file: str, reason: str) -> EngineError:
    return EngineError("bad_drafter", f"The draft head {file} is not usable: {reason}.", file=file, reason=reason)


def fingerprint(tokenizer: TextTokenizer) -> str:
    """Of a vocabulary: what each id stands for."""
    pairs = sorted((i, token) for token, i in tokenizer.backend.get_vocab(with_added_tokens=True).items())
    return hashlib.sha256(json.dumps(pairs).encode()).hexdigest()[:16]


def target_of(loaded: LoadedModel, ops: Ops) -> Target:
    """A loaded model as the one that verifies."""
    name = "".join(c if c.isalnum() or c in "-_." else "_" for c in loaded.folder.name)
    return Target(loaded.model, ops, fingerprint(loaded.tokenizer), name)


def shape_of(target: Target) -> dict[str, object]:
    """What must be equal for a head to fit."""
    config = target.config
    names = ("family", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "vocab_size")
    return {name: getattr(config, name) for name in names}


@dataclass(frozen=True)
class Head:
    """A head's card and tensors, the latter in the target's type on its device."""

    card: Mapping
    tensors: dict[str, torch.Tensor]
    file: str

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """A tensor of that shape.

        Raises:
            EngineError: "bad_drafter".
        """
        found = self.tensors.get(name)
        if found is None:
            raise bad_head(self.file, f"the tensor {name} is missing")
        if tuple(found.shape) != shape:
            raise bad_head(self.file, f"{name} has the shape {list(found.shape)}, and {list(shape)} is needed")
        return found

    def layer(self, at: str, target: Target) -> Layer:
        """A decoder layer of the target's shape, without biases."""
        config = target.config
        hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
        heads = config.num_heads + 2 * config.num_kv_heads
        return Layer(
            input_norm=self.take(f"{at}input_norm", hidden), qkv=self.take(f"{at}qkv", heads * dim, hidden), qkv_bias=None,
            o=self.take(f"{at}o", hidden, config.num_heads * dim), o_bias=None, post_norm=self.take(f"{at}post_norm", hidden),
            gate_up=self.take(f"{at}gate_up", 2 * inner, hidden), gate_up_bias=None,
            down=self.take(f"{at}down", hidden, inner), down_bias=None,
        )  # fmt: skip

    @property
    def parameters(self) -> int:
        return sum(t.numel() for t in self.tensors.values())


def default_head(method: str, target: Target) -> Path:
    """Where the head that ships for this model would lie."""
    return FOLDER / f"{method}-{target.name}.safetensors"


def load_head(source: str | None, method: str, target: Target) -> Head:
    """A head of one of train's methods for this target.

    Raises:
        EngineError: "bad_drafter" or "draft_vocabulary".
    """
    path = default_head(method, target) if source is None else Path(source).expanduser()
    if not path.is_file():
        raise bad_head(path.name, "there is no such file; make one with python -m engine.speculative.train")
    card = read_card(path)
    if card.get("method") != method:
        raise bad_head(path.name, f"it was trained as {str(card.get('method'))[:40]}, not as {method}")
    theirs = card.get("target") if isinstance(card.get("target"), Mapping) else {}
    size = theirs.get("vocab_size")
    check_vocabulary(path.name, (size if isinstance(size, int) else 0, str(card.get("vocabulary") or "")), target)
    for name, value in shape_of(target).items():
        if theirs.get(name) != value:
            raise bad_head(path.name, f"it was trained for a model with {name} {str(theirs.get(name))[:40]}, and this one has {value}")
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name).to(device=target.device, dtype=target.dtype) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise bad_head(path.name, f"it cannot be read ({type(error).__name__})") from None
    return Head(card, tensors, path.name)


def read_card(path: Path) -> dict:
    """The card in a head's file, sizes checked first."""
    try:
        read_header(path)
        with safe_open(path, framework="pt") as file:
            card = json.loads((file.metadata() or {}).get(CARD, "null"))
    except EngineError as error:
        raise bad_head(path.name, str(error.fields.get("reason", "it cannot be read"))) from None
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise bad_head(path.name, f"it cannot be read ({type(error).__name__})") from None
    if not isinstance(card, dict):
        raise bad_head(path.name, "it has no card; it is no head of this engine")
    if card.get("format") != FORMAT:
        raise bad_head(path.name, f"its format {str(card.get('format'))[:20]} is not {FORMAT}")
    return card


def save_head(path: Path, card: Mapping, tensors: Mapping[str, torch.Tensor]) -> int:
    """Write a head and the card beside it (.json); the file's size. bfloat16 halves what ships.

    Raises:
        EngineError: "bad_drafter" if it is larger than LIMIT.
    """
    stored = {name: t.detach().to("cpu", torch.bfloat16).contiguous() for name, t in tensors.items()}
    size = sum(t.nbytes for t in stored.values())
    if size > LIMIT:
        raise bad_head(path.name, f"it has {size / 2**20:.1f} MiB, and at most {LIMIT / 2**20:.0f} are shipped")
    card = {"format": FORMAT, **card}
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    save_file(stored, part, metadata={CARD: json.dumps(card)})
    part.replace(path)
    path.with_suffix(".json").write_text(json.dumps(card, indent=1) + "\n", encoding="utf-8")
    return path.stat().st_size
