"""One message as bytes: u32 header length, a strict JSON header, raw little-endian arrays.

Layout: `u32 n | n bytes of UTF-8 JSON, padded with blanks to a multiple of 4 | arrays`, each array padded with
zeros to a multiple of 4 so that the browser can look at it in place. `header["arrays"]` lists
`[dtype, rows, cols]` or `[dtype, length]`; offsets follow from the order. Deterministic.

Only uint8 and float32 travel. JSON is strict (NaN raises): a series' gaps live in its float32 array.
Parts of a header that many viewers share are serialised once and travel as `Json`. Rejected: base64 in JSON
(a third larger, and two copies), msgpack and protobuf (a library in the page for three types).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

_TYPES = {"u1": np.dtype("u1"), "f4": np.dtype("<f4")}
MAX_HEADER = 1 << 26


class Json(str):
    """Text that is JSON already."""

    __slots__ = ()


def dumps(value: object) -> Json:
    """Strict, compact JSON of what holds no Json (it may be Json). Raises ValueError for NaN and infinities, TypeError for
    what JSON cannot hold."""
    return value if isinstance(value, Json) else Json(_ENCODER.encode(value))


def joined(value: object) -> Json:
    """The same of mappings and lists in which Json stands, which goes in as it is."""
    if isinstance(value, Mapping) and any(isinstance(v, (Json, list)) for v in value.values()):
        return Json("{" + ",".join(f"{dumps(str(k))}:{joined(v)}" for k, v in value.items()) + "}")
    if isinstance(value, list) and any(isinstance(v, (Json, Mapping)) for v in value):
        return Json("[" + ",".join(joined(v) for v in value) + "]")
    return dumps(value)


def _plain(value: object) -> object:
    if isinstance(value, np.bool_):
        return bool(value)
    if isinstance(value, np.integer):
        return int(value)
    if isinstance(value, np.floating):
        return float(value)
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Iterable) and not isinstance(value, (bytes, bytearray)):
        return list(value)
    raise TypeError(f"{type(value).__name__} does not fit into JSON")


_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_plain)


def as_array(values: object) -> np.ndarray:
    """uint8 stays, everything else becomes little-endian float32; C order."""
    array = np.asarray(values)
    return np.ascontiguousarray(array, _TYPES["u1"] if array.dtype == np.uint8 else _TYPES["f4"])


def encode(header: Mapping[str, object], arrays: Sequence[np.ndarray] = ()) -> bytes:
    """The message. `arrays` must be uint8 or float32 with one or two axes (as_array makes them so)."""
    shapes = []
    for array in arrays:
        kind = array.dtype.newbyteorder("<").str[1:]
        if kind not in _TYPES or array.ndim not in (1, 2):
            raise TypeError(f"an array of {array.dtype} with {array.ndim} axes does not travel")
        shapes.append([kind, *array.shape])
    text = joined({**header, "arrays": Json(json.dumps(shapes, separators=(",", ":")))}).encode(errors="replace")
    text += b" " * (-len(text) % 4)
    parts = [struct.pack("<I", len(text)), text]
    for array in arrays:
        blob = array.astype(_TYPES[array.dtype.newbyteorder("<").str[1:]], copy=False).tobytes()
        parts += (blob, b"\0" * (-len(blob) % 4))
    return b"".join(parts)


def decode(message: bytes) -> tuple[dict[str, object], list[np.ndarray]]:
    """The inverse of encode; raises ValueError for anything that encode did not write."""
    if len(message) < 4:
        raise ValueError("a message has at least 4 bytes")
    (length,) = struct.unpack_from("<I", message)
    if length > min(len(message) - 4, MAX_HEADER):
        raise ValueError("the header is longer than the message")
    header = json.loads(message[4 : 4 + length].decode(), parse_constant=_refuse)
    at, arrays = 4 + length, []
    for kind, *shape in header.get("arrays", ()):
        dtype = _TYPES[kind]
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if size < 0 or at + size > len(message):
            raise ValueError("an array is longer than the message")
        arrays.append(np.frombuffer(message, dtype, size // dtype.itemsize, at).reshape(shape))
        at += size + (-size % 4)
    if at != len(message):
        raise ValueError("the message is longer than its arrays")
    return header, arrays


def _refuse(name: str) -> float:
    raise ValueError(f"{name} is not JSON")
