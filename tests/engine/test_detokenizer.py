import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.detokenizer import Detokenizer, StopMatcher
from engine.tokenizer import TextTokenizer
from tests.engine import toy_tokenizers as toys

BYTES = TextTokenizer(toys.byte_level(added=("<think>", "é x")))
PIECES = TextTokenizer(toys.pieces())
UNSTRIPPED = TextTokenizer(toys.pieces(strip=False))
METASPACE = TextTokenizer(toys.pieces(metaspace=True))
OTHER = TextTokenizer(toys.word_piece())
KINDS = {"bytes": BYTES, "pieces": PIECES, "unstripped": UNSTRIPPED, "metaspace": METASPACE, "other": OTHER}


def run(tokenizer, prompt, ids, stop=()):
    """Pieces of a whole sequence: one a push, then the flush; and whether it stopped."""
    detokenizer = Detokenizer(tokenizer, prompt, stop)
    out = []
    for token_id in ids:
        text, stopped = detokenizer.push(token_id)
        out.append(text)
        if stopped:
            break
    out.append(detokenizer.flush())
    assert detokenizer.text == "".join(out)
    return out, detokenizer.stopped


def spell(text):
    return list(text.encode())


def test_the_toy_tokenizers_are_of_the_kinds_that_they_are_called():
    assert [KINDS[k].decoding.kind for k in KINDS] == ["bytes", "pieces", "pieces", "pieces", "other"]
    assert PIECES.decoding.strip == 1 and PIECES.decoding.fallback
    assert METASPACE.decoding.bare_first and not METASPACE.decoding.fallback


def test_one_by_one_decoding_would_lose_the_characters_that_the_stream_keeps():
    ids = spell("a🙂 é")
    assert "".join(BYTES.decode([i]) for i in ids).count("�") == 6  # the control: what one by one does
    assert "".join(run(BYTES, [], ids)[0]) == "a🙂 é"


def test_characters_come_out_whole():
    family = "👨‍👩‍👧‍👦"
    pieces, _ = run(BYTES, [], spell(f"a🙂 é한{family}"))
    assert "".join(pieces) == f"a🙂 é한{family}"
    assert all("�" not in piece for piece in pieces)


def test_a_prompt_that_ends_inside_a_character_is_not_sent_again():
    emoji = spell("🙂")
    pieces, _ = run(BYTES, spell("Hello ") + emoji[:2], emoji[2:])
    assert pieces == ["", "🙂", ""]


def test_a_character_that_the_prompt_began_and_nobody_finished_is_the_prompts():
    prompt, ids = spell("Hello ") + spell("🙂")[:2], spell("abc")
    assert BYTES.decode(prompt + ids) == "Hello �abc"
    assert "".join(run(BYTES, prompt, ids)[0]) == "abc"
    assert "".join(run(BYTES, prompt, [])[0]) == ""


def test_the_blank_of_a_first_piece_is_kept_after_a_prompt_and_dropped_without_one():
    hello, world = (PIECES.backend.token_to_id(t) for t in ("▁Hello", "▁world"))
    assert "".join(run(PIECES, [0, hello], [world])[0]) == " world"
    assert "".join(run(PIECES, [0], [hello, world])[0]) == "Hello world"
    assert "".join(run(METASPACE, [0], [hello, world])[0]) == METASPACE.decode([0, hello, world])
    assert "".join(run(METASPACE, [0, hello], [world])[0]) == " world"


def test_a_prompt_ending_inside_a_character_works_with_byte_tokens_too():
    emoji = [2 + b for b in "🙂".encode()]
    hello = PIECES.backend.token_to_id("▁Hello")
    assert "".join(run(PIECES, [hello, *emoji[:2]], emoji[2:])[0]) == "🙂"


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_pieces_add_up_to_the_whole_decode(kind, data):
    tokenizer = KINDS[kind]
    some = st.integers(0, tokenizer.vocab_size - 1)
    if kind in ("pieces", "unstripped"):  # byte tokens are most of the vocabulary: pick words as often
        some |= st.integers(258, tokenizer.vocab_size - 1) | st.sampled_from([2 + b for b in "é🙂".encode()])
    elif kind == "bytes":
        some |= st.sampled_from(list("é🙂한".encode())) | st.integers(250, tokenizer.vocab_size - 1)
    ids = data.draw(st.lists(some, max_size=12))
    pieces, _ = run(tokenizer, [], ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    if "�" not in tokenizer.decode(ids):
        assert all("�" not in piece for piece in pieces)


def test_a_prompt_that_ends_in_half_a_surrogate_keeps_its_own_broken_characters():
    tokenizer = KINDS["bytes"]
    for new in ([], [0x80], [65]):
        whole, before = tokenizer.decode([0xED, 0xA0, *new]), tokenizer.decode([0xED, 0xA0])
        assert before + "".join(run(tokenizer, [0xED, 0xA0], new)[0]) == whole


def test_a_blank_after_a_prompt_that_is_one_byte_token_stays():
    tokenizer = KINDS["pieces"]
    for prompt in ([2 + 65], [2 + 10], [2]):  # "A", a line end, a zero byte: "▁beta" does not begin the text
        assert "".join(run(tokenizer, prompt, [267])[0]) == " beta"
    assert "".join(run(tokenizer, [], [267])[0]) == "beta"


@pytest.mark.parametrize("kind", ["bytes", "pieces", "metaspace"])
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_pieces_are_the_whole_decode_without_the_prompts(kind, data):
    tokenizer = KINDS[kind]
    ids = st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=8)
    prompt, new = data.draw(ids), data.draw(ids)
    whole, before = tokenizer.decode(prompt + new), tokenizer.decode(prompt)
    pieces, _ = run(tokenizer, prompt, new)
    if whole.startswith(before) and (kind != "pieces" or not before.endswith("�")):
        assert before + "".join(pieces) == whole


def test_special_tokens_are_not_shown():
    end = BYTES.backend.token_to_id("<|end|>")
    assert end in BYTES.special_ids
    assert "".join(run(BYTES, [], [*spell("a"), end, *spell("b")])[0]) == "ab"


def test_ids_outside_the_vocabulary_show_nothing():
    assert "".join(run(BYTES, [], [97, 99_999, 98])[0]) == "ab"


# Stop strings


def test_a_stop_string_over_four_tokens_is_never_shown():
    ids = [*spell("alpha "), *spell("beta gamma delta")]
    pieces, stopped = run(BYTES, [], ids, ["beta gamma"])
    assert stopped and "".join(pieces) == "alpha "
    assert "be" not in "".join(pieces)


def test_a_near_miss_is_released():
    pieces, stopped = run(BYTES, [], spell("ABC DEG DEF x"), ["DEF"])
    assert stopped and "".join(pieces) == "ABC DEG "
    assert "DEG" in "".join(pieces[:8])  # released as soon as it is one


def test_held_text_is_released_at_the_end():
    pieces, stopped = run(BYTES, [], spell("say beta gam"), ["beta gamma"])
    assert not stopped and pieces[-1] == "beta gam" and "".join(pieces) == "say beta gam"


@pytest.mark.parametrize(
    ("stops", "shown"),
    [
        (["beta gamma", "gamma"], "alpha "),
        (["gamma", "beta gamma"], "alpha "),
        (["beta", "beta gamma"], "alpha "),
        (["eta", "beta gamma"], "alpha "),  # the inner one ends first, the outer one begins first
        (["eta", "beta gammon"], "alpha b"),  # the outer one does not come true
        (["ta g", "a gamma"], "alpha be"),
        (["gamma", "alpha"], ""),
        (["zzz"], "alpha beta gamma delta"),
    ],
)
def test_the_text_ends_before_the_earliest_match_in_the_full_decode(stops, shown):
    text = "alpha beta gamma delta"
    pieces, stopped = run(BYTES, [], spell(text), stops)
    assert ("".join(pieces), stopped) == (shown, shown != text)


def test_a_match_that_waits_for_another_is_decided_at_the_end():
    pieces, stopped = run(BYTES, [], spell("a beta gam"), ["eta", "beta gamma"])
    assert stopped and "".join(pieces) == "a b"


def test_a_match_inside_one_token_ends_the_text_in_its_middle():
    gamma = PIECES.backend.token_to_id("▁gamma")
    beta = PIECES.backend.token_to_id("▁beta")
    pieces, stopped = run(PIECES, [], [beta, gamma], ["amm"])
    assert stopped and "".join(pieces) == "beta g"


def test_the_prompt_is_never_part_of_a_match():
    pieces, stopped = run(BYTES, spell("be"), spell("ta beta"), ["beta"])
    assert stopped and "".join(pieces) == "ta "


@settings(max_examples=500, deadline=None)
@given(
    text=st.text("ab", max_size=24),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3),
    seed=st.integers(0, 2**16),
)
def test_stops_agree_with_a_search_in_the_full_text_however_it_is_cut(text, stops, seed):
    found = [at for at in (text.find(stop) for stop in stops) if at >= 0]
    want = text[: min(found)] if found else text
    matcher, cut, out, stopped, position = StopMatcher(stops), random.Random(seed), "", False, 0
    while position < len(text) and not stopped:
        step = cut.randint(1, 4)
        piece, stopped = matcher.feed(text[position : position + step])
        position += step
        out += piece
        assert want.startswith(out)  # never longer than the right text
    if not stopped:
        piece, stopped = matcher.finish("")
        out += piece
    assert (out, stopped) == (want, bool(found))


def test_pushing_after_the_stop_changes_nothing():
    detokenizer = Detokenizer(BYTES, [], ["b"])
    assert [detokenizer.push(i) for i in spell("abc")] == [("a", False), ("", True), ("", True)]
    assert detokenizer.flush() == "" and detokenizer.text == "a"


def test_a_long_stop_string_costs_no_more_than_its_matches():
    stop = "a" * 2000 + "b"
    pieces, stopped = run(BYTES, [], spell("a" * 5000), [stop])
    assert not stopped and "".join(pieces) == "a" * 5000
