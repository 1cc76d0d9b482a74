"""Rotary embeddings: from a config.json to the cos and sin tables, one row a position.

The frequencies of the scaled kinds come from transformers (ROPE_INIT_FUNCTIONS), which is where their rules
are kept; the plain kind is one line here, so that the default model starts without importing transformers.

A table has one row a position, so it can hold only kinds whose angle depends on the position alone:
- "dynamic" changes its base once a sequence grows past max_position_embeddings. The table, and the engine,
  end there, so within them it is exactly the plain kind.
- "longrope" picks one of two sets for *all* positions by how long the sequence is at that moment; keys already
  kept would need another rotation. Accepted when the model's length never leaves the short set, else refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace

import torch

from engine.config import RopeConfig
from engine.models.parse import broken, refuse

NEEDED = {  # kind → numbers that it must state
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("original_max_position_embeddings",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "longrope": ("original_max_position_embeddings",),
}
_NUMBERS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings", "attention_factor", "beta_fast",
            "beta_slow", "mscale", "mscale_all_dim")
_DEFAULT_THETA = 10_000.0


def parse_rope(config: Mapping, head_dim: int, max_positions: int) -> RopeConfig:
    """The rope part of a config.json, in its old form (rope_theta, rope_scaling) or new (rope_parameters).

    Raises:
        EngineError: "unsupported_model" for a kind not done here, by name; "bad_checkpoint" for numbers that
            are missing or are none.
    """
    stated = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(stated, Mapping):
        raise broken("the rope settings are not a table of names and values")
    params = dict(stated)
    kind = params.pop("rope_type", None) or params.get("type") or "default"
    params.pop("type", None)
    theta = params.pop("rope_theta", None) or config.get("rope_theta") or _DEFAULT_THETA
    if kind not in NEEDED:
        raise refuse(f"the rope kind {str(kind)[:40]}")
    partial = params.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise refuse(f"a partial rotary embedding ({str(partial)[:40]} of each head)")
    if kind in ("llama3", "yarn", "longrope"):  # transformers lets the outer value win
        outer = config.get("original_max_position_embeddings")
        params["original_max_position_embeddings"] = outer or params.get("original_max_position_embeddings") or max_positions
    _check_numbers(kind, params, theta, head_dim)
    if kind == "longrope" and max_positions > params["original_max_position_embeddings"]:
        raise refuse("the rope kind longrope past its original length (cached keys would change as a sequence grows)")
    return RopeConfig(theta=float(theta), dim=head_dim, kind=kind, params=params)


def _check_numbers(kind: str, params: dict, theta: object, head_dim: int) -> None:
    for name in NEEDED[kind]:
        if params.get(name) is None:
            raise broken(f"the rope kind {kind} needs {name}")
    for name, value in (("rope_theta", theta), *((n, params.get(n)) for n in _NUMBERS)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf")):
            raise broken(f"the rope setting {name} must be a number, got {str(value)[:40]}")
    if params.get("factor") == 0 or theta == 0:
        raise broken("a rope factor and rope_theta must be above 0")
    for name in ("short_factor", "long_factor") if kind == "longrope" else ():
        if not isinstance(params.get(name), list) or len(params[name]) != head_dim // 2:
            raise broken(f"the rope kind longrope needs {head_dim // 2} numbers in {name}")


def inverse_frequencies(rope: RopeConfig, max_positions: int) -> tuple[torch.Tensor, float]:
    """fp32 [dim / 2] angles a position, and what cos and sin are multiplied with."""
    if rope.kind == "default":
        return 1.0 / (rope.theta ** (torch.arange(0, rope.dim, 2, dtype=torch.float32) / rope.dim)), 1.0
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    stated = {"rope_type": rope.kind, "rope_theta": rope.theta, "factor": None, **rope.params}
    config = SimpleNamespace(
        rope_parameters=stated, head_dim=rope.dim, hidden_size=rope.dim, num_attention_heads=1,
        max_position_embeddings=max_positions, standardize_rope_params=lambda: None,
    )
    frequencies, scale = ROPE_INIT_FUNCTIONS[rope.kind](config, torch.device("cpu"))
    return frequencies.float(), float(scale)


def rope_tables(rope: RopeConfig, max_positions: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, fp32 [max_positions, dim / 2] each."""
    frequencies, scale = inverse_frequencies(rope, max_positions)
    angles = torch.arange(max_positions, dtype=torch.float32)[:, None] * frequencies
    return (angles.cos() * scale).to(device), (angles.sin() * scale).to(device)
