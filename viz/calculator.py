"""How large a KV cache is: the talk's formula with numbers that a reader changes. Pure; knows no page.

    bytes = 2 × batch × layers × sequence × kv_heads × head_dim × bytes a number

2: one K and one V. `calculator` is the whole form as plain data; viz/stage/client/calculator.js draws it and computes
again in the browser while a reader types, by the same formula and the same rounding (a test compares the two).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

from viz.words.catalogue import Template, words

LIMITS = {"batch": 65_536, "layers": 1_024, "sequence": 16_777_216, "kv_heads": 1_024, "head_dim": 4_096, "bytes": 4}
BYTES = {"4": 4, "2": 2, "1": 1, "0.5": 0.5}  # fp32, fp16 or bf16, fp8 or int8, fp4 or int4
UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The factors of the formula, in its order. The defaults are the talk's: 192 GiB."""

    batch: int = 16
    layers: int = 96
    sequence: int = 32_768
    kv_heads: int = 8
    head_dim: int = 128
    bytes: float = 2

    @property
    def num_bytes(self) -> float:
        return 2 * self.batch * self.layers * self.sequence * self.kv_heads * self.head_dim * self.bytes


def size(num_bytes: float) -> str:
    """ "192 GiB": three digits, halves up."""
    value, unit = float(num_bytes), 0
    while value >= 1024 and unit < len(UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{digits(value)} {UNITS[unit]}"


def digits(value: float) -> str:
    """Three significant digits, halves up, without zeros at the end; as the browser does it."""
    places = 0 if value >= 100 else 1 if value >= 10 else 2
    scaled = math.floor(value * 10**places + 0.5)
    whole, rest = divmod(scaled, 10**places)
    return f"{whole:,}" + (f".{rest:0{places}d}".rstrip("0").rstrip(".") if places else "")


def ratio(num_bytes: float, memory: float) -> str:
    """ "1.4": how many times the memory; "0.02" where it is little."""
    value = num_bytes / memory
    scaled = math.floor(value * (10 if value >= 1 else 100) + 0.5)
    return f"{scaled // 10:,}.{scaled % 10}" if value >= 1 else f"{scaled / 100:.2f}"


def of_model(meta: Mapping[str, object]) -> CacheShape | None:
    """The cache of a full batch of the longest sequences of the model that a record tells of; None if it does not."""
    model = meta.get("model")
    names = ("layers", "max_model_len", "kv_heads", "head_dim")
    found = [model.get(name) for name in names] if isinstance(model, Mapping) else []
    if not found or not all(isinstance(n, int) and n > 0 for n in found):
        return None
    layers, sequence, kv_heads, head_dim = found
    a_token, configs = meta.get("kv_bytes_per_token"), meta.get("configs") or ({},)
    width = a_token / (2 * layers * kv_heads * head_dim) if isinstance(a_token, int) else 2
    batch = configs[-1].get("max_num_seqs", 1) if isinstance(configs[-1], Mapping) else 1
    return CacheShape(batch, layers, sequence, kv_heads, head_dim, width if width in BYTES.values() else 2)


def calculator(meta: Mapping[str, object], language: str = "en") -> dict[str, object]:
    """The form: its fields with their limits, what it opens with, presets, this device's memory, its words."""
    t, model = words(language, WORDS), of_model(meta)
    shapes = {"talk": CacheShape(), **({"model": model} if model else {})}
    name = meta["model"]["name"] if model and meta["model"].get("name") else ""
    memory = meta.get("device_memory_bytes")
    return {
        "title": t("calc.title"),
        "formula": t("calc.formula"),
        "fields": [
            {"name": f.name, "label": t(f"calc.field.{f.name}"), "min": 0.5 if f.name == "bytes" else 1, "max": LIMITS[f.name]}
            for f in fields(CacheShape)
        ],
        "widths": [{"value": value, "label": t(f"calc.bytes.{text}")} for text, value in BYTES.items()],
        "values": asdict(CacheShape()),
        "presets": [{"name": key, "label": t(f"calc.preset.{key}", name=name), "values": asdict(s)} for key, s in shapes.items()],
        "device": str(meta.get("device") or ""),
        "memory": memory if isinstance(memory, int) and memory > 0 else None,
        "words": {key: t(f"calc.{key}", **_BLANKS) for key in ("result", "ratio", "no_memory")},
    }


_BLANKS = {name: f"{{{name}}}" for name in ("product", "size", "ratio", "device", "memory")}  # templates stay templates


def result(shape: CacheShape, form: Mapping[str, object]) -> tuple[str, str]:
    """The two sentences under the form, as the browser says them."""
    said, factors = form["words"], [2, *asdict(shape).values()]
    product = " × ".join(f"{n:,.0f}" if n >= 1 else f"{n:g}" for n in factors)
    total = said["result"].format(product=product, size=size(shape.num_bytes))
    if not form["memory"]:
        return total, said["no_memory"]
    fields_ = {"ratio": ratio(shape.num_bytes, form["memory"]), "device": form["device"], "memory": size(form["memory"])}
    return total, said["ratio"].format(size=size(shape.num_bytes), **fields_)


WORDS: dict[str, Template] = {
    "calc.title": "How large is a KV cache?",
    "calc.formula": "2 × batch × layers × sequence × KV heads × head_dim × bytes",
    "calc.field.batch": "batch",
    "calc.field.layers": "layers",
    "calc.field.sequence": "sequence (tokens)",
    "calc.field.kv_heads": "KV heads",
    "calc.field.head_dim": "head_dim",
    "calc.field.bytes": "number format",
    "calc.bytes.4": "fp32, 4 bytes",
    "calc.bytes.2": "fp16, 2 bytes",
    "calc.bytes.1": "fp8, 1 byte",
    "calc.bytes.0.5": "fp4, ½ byte",
    "calc.preset.talk": "The talk's numbers",
    "calc.preset.model": "This model: {name}",
    "calc.result": "{product} = {size}",
    "calc.ratio": "{size} = {ratio} × the memory of this device ({device}, {memory})",
    "calc.no_memory": "The memory of this device is not recorded.",
}
