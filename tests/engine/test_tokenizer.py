import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors
from transformers import AutoTokenizer

from engine.errors import EngineError
from engine.tokenizer import TextTokenizer, show_bytes
from tests.engine import toy_tokenizers as toys

TEXTS = ("", "a", "  two  blanks ", "a🙂 é한", "line\n\ttab\r\n", "<|user|>typed<|end|>", "\u202eleft", "x" * 5000, "12 345", "\x00")


def with_bos():
    backend = toys.byte_level()
    user = backend.token_to_id("<|user|>")
    backend.post_processor = processors.TemplateProcessing(single="<|user|> $A", special_tokens=[("<|user|>", user)])
    return backend


@pytest.mark.parametrize(
    ("backend", "config"),
    [
        (toys.byte_level, {}),
        (toys.pieces, {"eos_token": "</s>"}),
        (with_bos, {}),
        (toys.byte_level, {"bos_token": "<|user|>", "add_bos_token": True}),
        (toys.byte_level, {"bos_token": "<|user|>", "add_bos_token": True, "add_eos_token": True}),
        (with_bos, {"add_bos_token": False}),
        (toys.byte_level, {"tokenizer_class": "LlamaTokenizer", "bos_token": "<|user|>"}),
        (toys.byte_level, {"tokenizer_class": "GPT2Tokenizer"}),
        (toys.byte_level, {"tokenizer_class": "Qwen2Tokenizer"}),
        (toys.byte_level, {"added_tokens_decoder": {"261": {"content": "<extra>", "special": False, "normalized": False}}}),
        (toys.byte_level, {"extra_special_tokens": ["<tool>"]}),
    ],
)
def test_ids_equal_transformers_for_the_same_folder(tmp_path, backend, config):
    toys.save_folder(tmp_path, backend(), **config)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
    theirs, mine = AutoTokenizer.from_pretrained(tmp_path), TextTokenizer.load(tmp_path)
    for text in TEXTS:
        assert list(mine.encode(text)) == theirs(text).input_ids, text
        assert list(mine.encode(text, special=False)) == theirs(text, add_special_tokens=False).input_ids, text


def test_truncation_and_padding_stored_in_a_tokenizer_do_not_apply(tmp_path):
    backend = toys.byte_level()
    backend.enable_truncation(3)
    backend.enable_padding(length=8)
    assert TextTokenizer.load(toys.save_folder(tmp_path, backend)).encode("abcdef") == tuple(b"abcdef")


def test_a_plain_folder_is_read_without_transformers(tmp_path, monkeypatch):
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *a, **k: pytest.fail("transformers was asked"))
    assert TextTokenizer.load(toys.save_folder(tmp_path)).encode("hi") == tuple(b"hi")


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=40))
def test_byte_level_text_round_trips(text):
    tokenizer = TextTokenizer(toys.byte_level())
    plain = text.replace("<|", "")
    assert tokenizer.decode(tokenizer.encode(plain)) == plain


def test_a_chat_is_written_by_the_template_and_gets_no_second_bos(tmp_path):
    toys.save_folder(tmp_path, with_bos())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    mine, messages = TextTokenizer.load(tmp_path), [{"role": "user", "content": "hi ${x} {{y}}"}]
    text, ids = mine.chat(messages)
    assert text == "<|user|>hi ${x} {{y}}<|end|><|bot|>"
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert list(ids) == theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]


def test_a_model_without_a_template_says_so(tmp_path):
    tokenizer = TextTokenizer.load(toys.save_folder(tmp_path, chat_template=None))
    assert not tokenizer.has_chat_template
    with pytest.raises(EngineError) as caught:
        tokenizer.chat([{"role": "user", "content": "hi"}])
    assert caught.value.code == "no_chat_template"


def test_a_template_in_a_file_of_its_own_counts(tmp_path):
    toys.save_folder(tmp_path, chat_template=None)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0]['content'] }}!")
    assert TextTokenizer.load(tmp_path).chat([{"role": "user", "content": "hi"}])[0] == "hi!"


def test_a_template_that_refuses_is_a_sentence(tmp_path):
    toys.save_folder(tmp_path, chat_template="{{ raise_exception('roles must alternate') }}")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(EngineError, match="roles must alternate"):
        TextTokenizer.load(tmp_path).chat([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize("text", ["\ud800", "ok \udfff", "a\ud83d"])
def test_text_that_is_no_unicode_is_refused(text):
    tokenizer = TextTokenizer(toys.byte_level())
    with pytest.raises(EngineError) as caught:
        tokenizer.encode(text)
    assert caught.value.code == "bad_text" and caught.value.fields["position"] == text.index(text.strip("ok a")[0])
    str(caught.value).encode()  # the sentence itself can be sent


@pytest.mark.parametrize(
    ("content", "words"), [(None, "is missing"), (b"{", "cannot be read"), (b"\xff\xfe", "cannot be read"), (b"[]", "cannot be read")]
)
def test_a_broken_tokenizer_file_is_a_sentence(tmp_path, content, words):
    toys.save_folder(tmp_path)
    path = tmp_path / "tokenizer.json"
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(EngineError) as caught:
        TextTokenizer.load(tmp_path)
    assert caught.value.code == "bad_checkpoint" and words in caught.value.sentence


def test_a_broken_tokenizer_config_is_a_sentence(tmp_path):
    toys.save_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(EngineError, match=r"tokenizer_config.json is not valid JSON"):
        TextTokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        (b"abc", "abc"),
        ("é🙂".encode(), "é🙂"),
        (b"\xe2\x82", "⟨E2 82⟩"),
        (b"\x99\x82", "⟨99 82⟩"),
        (b"a\xf0\x9f", "a⟨F0 9F⟩"),
        (b"\x80b\xff", "⟨80⟩b⟨FF⟩"),
        (b"", ""),
        (b"\xed\xa0\x80", "⟨ED A0 80⟩"),
    ],
)
def test_bytes_are_shown_as_text_where_they_are_text(raw, shown):
    assert show_bytes(raw) == shown


def test_pieces_show_blanks_bytes_and_special_tokens():
    tokenizer = TextTokenizer(toys.byte_level())
    blank_b, end = (tokenizer.backend.token_to_id(token) for token in ("Ġb", "<|end|>"))
    assert [tokenizer.piece(i) for i in (ord("a"), 0xE2, blank_b, end)] == ["a", "⟨E2⟩", " b", "<|end|>"]
    spm = TextTokenizer(toys.pieces())
    assert [spm.piece(i) for i in (0, 2 + 0xE2, 2 + 0x41, spm.backend.token_to_id("▁Hello"))] == ["<s>", "⟨E2⟩", "A", " Hello"]
    assert spm.piece(99_999) == "⟨99999?⟩" and spm.piece(-1) == "⟨-1?⟩"
