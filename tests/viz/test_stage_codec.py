"""The wire format: what goes in comes out, and what JSON cannot carry is refused."""

from __future__ import annotations

import numpy as np
import pytest

from viz.stage.codec import Json, as_array, decode, dumps, encode


def test_a_message_comes_back():
    header = {
        "t": "frames",
        "text": "ü…\u202e</script>",
        "panels": [{"view": "a", "figure": Json('{"x":[1,2]}'), "items": {"marks": [["m", 0.5]]}}],
    }
    arrays = [np.arange(6, dtype=np.uint8).reshape(2, 3), np.array([1.5, np.nan, np.inf], np.float32), np.zeros((0, 4), np.uint8)]
    message = encode(header, arrays)
    assert len(message) % 4 == 0
    got, back = decode(message)
    assert got.pop("arrays") == [["u1", 2, 3], ["f4", 3], ["u1", 0, 4]]
    assert got == {**header, "panels": [{"view": "a", "figure": {"x": [1, 2]}, "items": {"marks": [["m", 0.5]]}}]}
    for before, after in zip(arrays, back, strict=True):
        np.testing.assert_array_equal(before, after)


def test_the_same_message_has_the_same_bytes():
    make = lambda: encode({"a": [1, {"b": 2.5}], "c": None}, [np.ones(5, np.float32)])  # noqa: E731
    assert make() == make()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), [1, float("nan")], {"a": [{"b": float("nan")}]}])
def test_nan_never_reaches_json(value):
    with pytest.raises(ValueError):
        encode({"x": value})


def test_numpy_values_become_plain_json():
    assert dumps({"a": np.float32(0.5), "b": np.int64(3), "c": np.bool_(True), "d": np.arange(2), "e": (1, 2), "f": [np.int32(1)]}) == (
        '{"a":0.5,"b":3,"c":true,"d":[0,1],"e":[1,2],"f":[1]}'
    )
    with pytest.raises(TypeError):
        dumps({"x": object()})
    with pytest.raises(TypeError):
        dumps({"x": b"bytes"})


def test_only_two_types_travel():
    assert as_array(np.arange(3, dtype=">f8")).dtype == np.dtype("<f4")
    assert as_array(np.ones((2, 2), np.uint8)[:, ::-1]).flags.c_contiguous
    for bad in (np.zeros(3, np.int64), np.zeros((1, 1, 1), np.uint8), np.float32(1)):
        with pytest.raises(TypeError):
            encode({}, [bad])


def test_half_a_character_does_not_stop_a_message():
    assert decode(encode({"x": "\ud800!"}))[0]["x"] == "?!"


@pytest.mark.parametrize("cut", [0, 3, 5, -1, -4])
def test_a_cut_message_is_refused(cut):
    message = encode({"a": 1}, [np.ones(3, np.float32)])
    with pytest.raises(ValueError):
        decode(message[:cut] if cut else b"")


def test_a_message_that_is_too_long_or_lies_is_refused():
    message = encode({"a": 1}, [np.ones(3, np.float32)])
    for bad in (message + b"\0" * 4, b"\xff\xff\xff\xff" + message[4:], encode({"a": Json("NaN")})):
        with pytest.raises(ValueError):
            decode(bad)
