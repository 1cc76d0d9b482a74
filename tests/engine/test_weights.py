import json
import os
import struct

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.detokenizer import Detokenizer
from engine.errors import EngineError
from engine.models.loading import load_model, load_tied, resolve_model
from engine.models.registry import find_family
from engine.models.weights import check_tensors, checkpoint_tensors, load_weights, read_config, stored_types
from engine.quantization.base import load_formats
from engine.quantization.gguf import convert, open_gguf, read_tensor, unpermute
from tests.engine import stories
from tests.engine import toy_tokenizers as toys
from tests.engine.model_harness import Harness
from tests.engine.test_models import IDS, hf_logits, llama_config, make_hf, ours, qwen3_config, worst

CPU = torch.device("cpu")


def sharded(tmp_path, config=None):
    """A checkpoint in three shards with an index."""
    model = make_hf(config or llama_config())
    model.save_pretrained(tmp_path, max_shard_size="120KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) >= 3
    return model, shards


def parts(folder):
    stated = read_config(folder)
    family = find_family(stated)
    return family, family.parse(stated)


def load(folder, **kwargs):
    family, config = parts(folder)
    return load_weights(folder, family.params(config), CPU, torch.float32, **kwargs)


def refusal(folder, code="bad_checkpoint"):
    """The sentence of a refused load; nothing may be allocated on the way."""
    family, config = parts(folder)
    with pytest.raises(EngineError) as caught:
        check_tensors(checkpoint_tensors(folder), family.params(config))
    assert caught.value.code == code
    with pytest.raises(EngineError):
        load(folder)
    return caught.value.sentence


# M4: a checkpoint is complete or refused


def test_shards_load_as_the_whole_does(tmp_path):
    model, _ = sharded(tmp_path)
    assert worst(Harness(ours(tmp_path)).logits(IDS), hf_logits(model, IDS)) < 1e-4


def test_every_parameter_is_assigned_exactly_once_and_progress_ends_at_one(tmp_path):
    model, _ = sharded(tmp_path)
    seen = []
    weights = load(tmp_path, progress=lambda fraction, text: seen.append((fraction, text)))
    assert set(weights) == set(model.state_dict()) and len(seen) == len(weights)
    assert [f for f, _ in seen] == sorted(f for f, _ in seen) and seen[-1][0] == 1.0 and "MB" in seen[-1][1]
    for name, tensor in model.state_dict().items():
        assert torch.equal(weights[name], tensor)


def test_a_missing_shard_is_named(tmp_path):
    _, shards = sharded(tmp_path)
    shards[1].unlink()
    assert f"{shards[1].name} is missing" in refusal(tmp_path)


@pytest.mark.parametrize("cut", [1, 1000, "header", 4])
def test_a_cut_off_shard_is_named(tmp_path, cut):
    _, shards = sharded(tmp_path)
    size = shards[1].stat().st_size
    os.truncate(shards[1], 40 if cut == "header" else 4 if cut == 4 else size - cut)
    assert f"{shards[1].name} is cut off" in refusal(tmp_path)


def test_stray_files_are_not_read(tmp_path):
    model, shards = sharded(tmp_path)
    for name in ("extra.safetensors", "model.safetensors", "a.safetensors", "zz-model.safetensors"):
        save_file({key: torch.full_like(value, 9.0) for key, value in load_file(shards[0]).items()}, tmp_path / name)
    (tmp_path / "model-00009-of-00003.safetensors").write_bytes(b"rubbish")
    assert worst(Harness(ours(tmp_path)).logits(IDS), hf_logits(model, IDS)) < 1e-4


def change_index(folder, edit):
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    edit(index["weight_map"])
    path.write_text(json.dumps(index))


def test_an_index_that_names_a_file_that_is_not_there_is_refused(tmp_path):
    sharded(tmp_path)
    change_index(tmp_path, lambda m: m.update({"model.norm.weight": "model-00007-of-00003.safetensors"}))
    assert "model-00007-of-00003.safetensors is missing" in refusal(tmp_path)


def test_an_index_that_names_a_tensor_that_its_file_lacks_is_refused(tmp_path):
    _, shards = sharded(tmp_path)
    change_index(tmp_path, lambda m: m.update({"model.norm.weight": shards[0].name}))
    assert shards[0].name in refusal(tmp_path) and "model.norm.weight" in refusal(tmp_path)


def test_a_tensor_that_no_file_has_is_named(tmp_path):
    sharded(tmp_path)
    change_index(tmp_path, lambda m: m.pop("model.layers.1.mlp.up_proj.weight"))
    assert "model.layers.1.mlp.up_proj.weight" in refusal(tmp_path)


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "a/b.safetensors", 7])
def test_an_index_cannot_lead_out_of_its_folder(tmp_path, name):
    sharded(tmp_path)
    change_index(tmp_path, lambda m: m.update({"model.norm.weight": name}))
    assert "outside the folder" in refusal(tmp_path)


def single(tmp_path, config=None, **tensors):
    """A one-file checkpoint with some tensors replaced."""
    model = make_hf(config or llama_config())
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    save_file({**load_file(path), **tensors}, path)
    return model


def test_a_wrong_shape_names_file_and_tensor(tmp_path):
    single(tmp_path, **{"model.layers.0.self_attn.k_proj.weight": torch.zeros(64, 64)})
    sentence = refusal(tmp_path)
    assert "model.safetensors" in sentence and "k_proj" in sentence and "[32, 64]" in sentence


def test_weights_of_a_type_that_cannot_be_converted_are_refused_by_name(tmp_path):
    single(tmp_path, **{"model.norm.weight": torch.zeros(64, dtype=torch.float8_e4m3fn)})
    assert "F8_E4M3" in refusal(tmp_path, "unsupported_model")


@pytest.mark.parametrize(
    "content", [b"", b"12345678", struct.pack("<Q", 2**63) + b"{}", struct.pack("<Q", 2) + b"[]", struct.pack("<Q", 4) + b"nope"]
)
def test_a_file_that_is_no_safetensors_is_named(tmp_path, content):
    single(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(content)
    assert "model.safetensors" in refusal(tmp_path)


def test_a_folder_without_weights_says_so(tmp_path):
    single(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert "model.safetensors is missing" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "config.json is missing"), ("{", "not valid JSON"), ("[1]", "JSON object"), ("[" * 100_000, "not valid JSON"),
     ("\udc80", "cannot be read")],
)
def test_a_broken_config_json_is_a_sentence(tmp_path, content, words):
    if content is not None:
        (tmp_path / "config.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(EngineError) as caught:
        read_config(tmp_path)
    assert caught.value.code == "bad_checkpoint" and words in caught.value.sentence


@pytest.mark.parametrize(
    "name",
    ["model.layers.1.self_attn.q_proj.bias", "model.layers.2.mlp.up_proj.weight", "lm_head.bias", "model.layers.0.self_attn.q_norm.weight"],
)
def test_a_weight_that_the_model_would_not_read_is_refused_by_name(tmp_path, name):
    single(tmp_path, **{name: torch.ones(64)})
    sentence = refusal(tmp_path)
    assert name in sentence and "model.safetensors" in sentence and "does not read" in sentence


def test_a_checkpoint_with_biases_read_as_llama_without_them_is_refused(tmp_path):
    single(tmp_path, llama_config(attention_bias=True))
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "attention_bias": False}))
    assert "bias and 7 more" in refusal(tmp_path)


@pytest.mark.parametrize("name", ["self_attn.rotary_emb.inv_freq", "attn.bias", "attn.masked_bias"])
def test_constants_in_a_checkpoint_do_no_harm(tmp_path, name):
    model = single(tmp_path, **{f"model.layers.0.{name}": torch.ones(8)})
    assert worst(Harness(ours(tmp_path)).logits(IDS), hf_logits(model, IDS)) < 1e-4


# Types, tying, sharding


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_are_converted_and_owned(tmp_path, dtype):
    model = make_hf(llama_config()).bfloat16()
    model.save_pretrained(tmp_path)
    family, config = parts(tmp_path)
    weights = load_weights(tmp_path, family.params(config), CPU, dtype)
    os.truncate(tmp_path / "model.safetensors", 0)  # a mapped weight would now crash
    for name, tensor in model.state_dict().items():
        assert weights[name].dtype is dtype and torch.equal(weights[name], tensor.to(dtype))


def test_the_stored_type_is_named_for_people(tmp_path):
    make_hf(llama_config()).bfloat16().save_pretrained(tmp_path)
    assert stored_types(tmp_path) == "bfloat16"


def test_a_tied_checkpoint_needs_no_head(tmp_path):
    single(tmp_path, llama_config(tie_word_embeddings=True))
    assert "lm_head.weight" not in checkpoint_tensors(tmp_path)
    mine = ours(tmp_path)
    assert mine.lm_head is mine.embedding


@pytest.mark.parametrize("same", [True, False])
def test_a_tied_checkpoint_with_a_head_does_what_transformers_does(tmp_path, same):
    model = single(tmp_path, llama_config(tie_word_embeddings=True))
    head = model.model.embed_tokens.weight.detach().clone() + (0.0 if same else 0.5 * torch.randn(96, 64))
    single(tmp_path, llama_config(tie_word_embeddings=True), **{"lm_head.weight": head})
    want = hf_logits(AutoModelForCausalLM.from_pretrained(tmp_path), IDS)
    mine = ours(tmp_path)
    assert mine.config.tie_word_embeddings is same
    assert worst(Harness(mine).logits(IDS), want) < 1e-4


def test_an_untied_checkpoint_without_a_head_is_refused(tmp_path):
    single(tmp_path, llama_config(tie_word_embeddings=True))
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "tie_word_embeddings": False}))
    assert "lm_head.weight" in refusal(tmp_path)


def test_the_parts_of_two_ranks_make_the_whole(tmp_path):
    single(tmp_path, llama_config(attention_bias=True))
    family, config = parts(tmp_path)
    whole = load(tmp_path)
    halves = [load(tmp_path, shard=(rank, 2)) for rank in (0, 1)]
    for param in family.params(config):
        pair = [half[param.name] for half in halves]
        if param.shard_axis is None:
            assert all(torch.equal(part, whole[param.name]) for part in pair)
        else:
            assert torch.equal(torch.cat(pair, param.shard_axis), whole[param.name]) and pair[0].is_contiguous()
    assert halves[0]["model.layers.0.self_attn.o_proj.weight"].shape == (64, 32)


def test_heads_that_do_not_split_are_refused(tmp_path):
    toys.save_folder(tmp_path)
    single(tmp_path, llama_config(num_key_value_heads=1))
    with pytest.raises(EngineError, match="do not split over 2"):
        load_model(str(tmp_path), "cpu", torch.float32, world=2)


# M5: which ids end a text


def eos_folder(tmp_path, config, generation, tokenizer="<|end|>"):
    """A folder whose three files name EOS ids of their own. `generation` None: no such file; "": no such key."""
    model = make_hf(llama_config(vocab_size=264, initializer_range=0.5))
    model.save_pretrained(tmp_path)
    toys.save_folder(tmp_path, eos_token=tokenizer)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": config, "bos_token_id": 1}))
    generated = tmp_path / "generation_config.json"
    generated.unlink(missing_ok=True)
    if generation is not None:
        generated.write_text(json.dumps({"eos_token_id": generation} if generation != "" else {"do_sample": False}))
    return model


def continuation(model, ids, new):
    return model.generate(torch.tensor([ids]), max_new_tokens=new, do_sample=False, pad_token_id=0)[0, len(ids) :].tolist()


@pytest.mark.parametrize("case", ["list", "number", "config", "config list", "both", "generation without", "null", "negative", "tokenizer"])
def test_generation_stops_where_transformers_stops_on_the_same_folder(tmp_path, case):
    model = make_hf(llama_config(vocab_size=264, initializer_range=0.5))
    model.generation_config.eos_token_id = None
    free = continuation(model, IDS[:5], 24)
    early, late = free[6], next(t for t in free[12:] if t != free[6])
    assert free.index(early) == 6, "the case needs an id that first comes at the seventh place"
    config, generation = {
        "list": (250, [late, early]), "number": (250, early), "config": (early, None), "config list": ([late, early], None),
        "both": (early, late), "generation without": (early, ""), "null": (early, None), "negative": (None, [-1, early]),
        "tokenizer": (None, None),
    }[case]  # fmt: skip
    spelled = toys.BYTE_CHARS.get(early, "a")
    eos_folder(tmp_path, config, generation, spelled if case == "tokenizer" else "<|end|>")
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    want = continuation(again, IDS[:5], 24)
    _, parsed = parts(tmp_path)
    got = Harness(ours(tmp_path)).greedy(IDS[:5], 24, parsed.eos_token_ids)
    assert got == want
    assert (len(got) == 7) == (case not in ("both", "generation without", "tokenizer"))


def test_a_broken_generation_config_is_a_sentence(tmp_path):
    eos_folder(tmp_path, 5, 6)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(EngineError, match=r"generation_config.json is not valid JSON"):
        read_config(tmp_path)


# What --model may be


def test_a_folder_loads_whole(tmp_path):
    toys.save_folder(tmp_path)
    model = single(tmp_path, llama_config(vocab_size=264, eos_token_id=5))
    loaded = load_model(str(tmp_path), "cpu", torch.float32)
    assert loaded.folder.source == "folder" and loaded.folder.precision == "float32" and loaded.folder.name == tmp_path.name
    assert loaded.config.eos_token_ids == {5} and loaded.tokenizer.encode("hi") == (104, 105)
    assert worst(Harness(loaded.model).logits(IDS), hf_logits(model, IDS)) < 1e-4


def test_the_environment_names_a_model(tmp_path, monkeypatch):
    single(tmp_path)
    monkeypatch.setenv("GLASS_MODEL", str(tmp_path))
    assert resolve_model(None).path == tmp_path


@pytest.mark.parametrize("model", ["no/such/folder/here", "nothing", "/no/such", "a b/c", "x" * 300, "a\0b", "owner/"])
def test_what_is_neither_folder_nor_hub_id_is_refused(model):
    with pytest.raises(EngineError) as caught:
        resolve_model(model)
    assert caught.value.code == "model_not_found" and len(caught.value.sentence) < 400


def test_a_file_is_refused_with_a_hint(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(EngineError, match="give the folder"):
        resolve_model(str(tmp_path / "model.gguf"))


def test_an_empty_folder_says_what_is_missing(tmp_path):
    with pytest.raises(EngineError, match=r"config.json is missing"):
        load_model(str(tmp_path), "cpu", torch.float32)


def test_a_folder_without_a_tokenizer_says_so(tmp_path):
    single(tmp_path)
    with pytest.raises(EngineError, match=r"tokenizer.json is missing"):
        load_model(str(tmp_path), "cpu", torch.float32)


# Q1 and Q3: GGUF


def permuted(rows, heads):
    """What llama.cpp's converter does to Llama's q and k."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def write_gguf(path, model, arch, permute, kind=None):
    """A transformers model as GGUF, the way llama.cpp writes it."""
    config, names = model.config, {v: k for k, v in gguf_names(model.config.num_hidden_layers).items()}
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    tokens = [toys.BYTE_CHARS[b] for b in range(256)] + ["Ġb"] + [f"<|x{i}|>" for i in range(config.vocab_size - 257)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 257 + [3] * (config.vocab_size - 257))
    writer.add_token_merges(["Ġ b"])
    writer.add_eos_token_id(257)
    writer.add_eot_token_id(258)
    writer.add_chat_template(toys.TEMPLATE)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.numpy()
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads if "k_proj" in name else 0
        if permute and heads:
            values = permuted(values, heads)
        if kind and values.ndim == 2:
            writer.add_tensor(names[name], gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(names[name], np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_names(layers):
    """GGUF names → Hugging Face names, from the gguf package's own table."""
    table, found = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, layers), {}
    linears = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj",
               "mlp.down_proj", "input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm")  # fmt: skip
    stems = ["model.embed_tokens", "model.norm", "lm_head", *(f"model.layers.{i}.{n}" for i in range(layers) for n in linears)]
    for stem in stems:
        for kind in (".weight", ".bias"):
            found[table.get_name(stem + kind, (".weight", ".bias"))] = stem + kind
    return found


NINE_THREE = dict(vocab_size=260, num_attention_heads=9, num_key_value_heads=3, hidden_size=576, head_dim=64, initializer_range=0.06)


@pytest.mark.parametrize(
    ("config", "arch", "permute"),
    [
        (llama_config(vocab_size=260), "llama", True),
        (llama_config(**NINE_THREE), "llama", True),
        (llama_config(vocab_size=260, attention_bias=True, tie_word_embeddings=True), "llama", True),
        (qwen3_config(vocab_size=260), "qwen3", False),
    ],
    ids=["llama 4/2", "llama 9/3", "llama bias tied", "qwen3"],
)
def test_a_gguf_of_f32_weights_gives_the_original_exactly(tmp_path, config, arch, permute):
    model = make_hf(config)
    folder = tmp_path / "out"
    folder.mkdir()
    precision = convert(write_gguf(tmp_path / "m.gguf", model, arch, permute), folder, lambda *_: None)
    assert precision == "float32"
    found = load_file(folder / "model.safetensors")
    for name, tensor in model.state_dict().items():
        if name in found:
            assert torch.equal(found[name], tensor), name
    want, mine = hf_logits(model, IDS), ours(folder)
    model.save_pretrained(tmp_path / "original")
    assert torch.equal(Harness(mine).logits(IDS), Harness(ours(tmp_path / "original")).logits(IDS))
    assert worst(Harness(mine).logits(IDS), want) < 1e-4
    assert mine.config.eos_token_ids == {257, 258}
    if permute:  # the wrong head count, and not un-permuting, would have been seen
        stated = read_config(folder)
        reader = open_gguf(tmp_path / "m.gguf")
        tensor = next(t for t in reader.tensors if t.name == "blk.0.attn_k.weight")
        kept = model.state_dict()["model.layers.0.self_attn.k_proj.weight"].numpy()
        assert np.array_equal(read_tensor(tensor, stated)[1], kept)
        assert not np.array_equal(read_tensor(tensor, {**stated, "model_type": "qwen3"})[1], kept)
        wrong = {**stated, "num_key_value_heads": stated["num_attention_heads"]}
        if config.num_attention_heads == 9:  # 192 rows are not 9 heads
            with pytest.raises(EngineError, match="not 9 heads"):
                read_tensor(tensor, wrong)
        else:
            assert not np.array_equal(read_tensor(tensor, wrong)[1], kept)


def test_unpermute_undoes_llama_cpps_permutation():
    rows = np.arange(3 * 8 * 2).reshape(24, 2)
    assert np.array_equal(unpermute(permuted(rows, 3), 3), rows)
    assert np.array_equal(permuted(np.arange(4), 1), [0, 2, 1, 3])


@pytest.mark.parametrize("kind", [gguf.GGMLQuantizationType.Q4_0, gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.Q8_0])
def test_quantised_weights_are_what_the_gguf_package_makes_of_them(tmp_path, kind):
    model = make_hf(llama_config(vocab_size=260, hidden_size=64, intermediate_size=96))
    folder = tmp_path / "out"
    folder.mkdir()
    precision = convert(write_gguf(tmp_path / "m.gguf", model, "llama", True, kind), folder, lambda *_: None)
    assert precision == f"float32, dequantised from {kind.name}"
    found = load_file(folder / "model.safetensors")
    for name, tensor in model.state_dict().items():
        want = tensor.numpy()
        if want.ndim == 2:
            want = gguf.quants.dequantize(gguf.quants.quantize(want, kind), kind)  # rows are quantised one by one
            assert not np.array_equal(want, tensor.numpy())
        assert np.array_equal(found[name].numpy(), want), name


def test_nibbles_lie_16_elements_apart_in_ggml_blocks():
    """One block, scale 1, first byte 0x21: 1 is element 0 and 2 is element 16."""
    one = np.float16(1.0).tobytes()
    q4_0 = np.frombuffer(one + bytes([0x21] + [0x88] * 15), np.uint8)[None]
    q4_1 = np.frombuffer(one + np.float16(0.5).tobytes() + bytes([0x21] + [0x00] * 15), np.uint8)[None]
    for raw, kind, first, second, rest in ((q4_0, "Q4_0", -7.0, -6.0, 0.0), (q4_1, "Q4_1", 1.5, 2.5, 0.5)):
        values = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])[0]
        assert (values[0], values[16]) == (first, second)
        assert set(np.delete(values, [0, 16])) == {rest}


def test_the_tokenizer_of_a_gguf_splits_digits_and_round_trips(tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    convert(write_gguf(tmp_path / "m.gguf", make_hf(llama_config(vocab_size=260)), "llama", True), folder, lambda *_: None)
    loaded = load_model(str(folder), "cpu", torch.float32)
    text = "a  12 é🙂\n\n b  3"
    ids = loaded.tokenizer.encode(text)
    assert loaded.tokenizer.decode(ids) == text and ids == tuple(AutoTokenizer.from_pretrained(folder)(text).input_ids)
    assert [loaded.tokenizer.backend.pre_tokenizer.pre_tokenize_str("x 12")[i][0] for i in range(4)] == ["x", "Ġ", "1", "2"]
    assert 257 in loaded.tokenizer.special_ids and loaded.tokenizer.has_chat_template


@pytest.mark.parametrize("damage", ["magic", "cut", "empty"])
def test_a_damaged_gguf_is_a_sentence(tmp_path, damage):
    path = write_gguf(tmp_path / "m.gguf", make_hf(llama_config(vocab_size=260)), "llama", True)
    raw = path.read_bytes()
    path.write_bytes({"magic": b"GGUX" + raw[4:], "cut": raw[: len(raw) // 2], "empty": b""}[damage])
    with pytest.raises(EngineError, match="GGUF file"):
        convert(path, tmp_path, lambda *_: None)


def test_a_gguf_of_another_architecture_is_refused_by_name(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", make_hf(llama_config(vocab_size=260)), "gemma3", False)
    with pytest.raises(EngineError, match="gemma3"):
        convert(path, tmp_path, lambda *_: None)


def test_every_format_file_declares_itself():
    assert {"GGUF"} <= set(load_formats())


# A real model


@pytest.fixture(scope="module")
def stories_folder(tmp_path_factory):
    if (source := stories.stories_data()) is None:
        pytest.skip("../shared/data has no stories260K.bin")
    return stories.convert_stories(source, tmp_path_factory.mktemp("stories"))


def test_the_stories_model_tells_the_story_that_transformers_tells(stories_folder):
    known = stories.StoriesVocabulary.load(stories.stories_data())
    loaded = load_model(str(stories_folder), "cpu", torch.float32)
    prompt = list(loaded.tokenizer.encode("Once upon a time"))
    assert prompt == known.encode("Once upon a time")
    want = continuation(AutoModelForCausalLM.from_pretrained(stories_folder), prompt, 120)
    got = Harness(loaded.model).greedy(prompt, 120, loaded.config.eos_token_ids)
    assert got == want
    detokenizer = Detokenizer(loaded.tokenizer, prompt)
    text = "".join(detokenizer.push(i)[0] for i in got) + detokenizer.flush()
    assert "Once upon a time" + text == known.decode(prompt + got)
    assert text.startswith(", there was a little girl named Lily. She loved to play outside in the park.")


def test_the_stories_tokenizer_encodes_as_llama2_c_does(stories_folder):
    known = stories.StoriesVocabulary.load(stories.stories_data())
    loaded = load_model(str(stories_folder), "cpu", torch.float32)
    for text in ("Lily and Tom", "a 🙂 é", "  two  blanks ", "“Hello!” she said.\nThe end"):
        assert list(loaded.tokenizer.encode(text)) == known.encode(text), text
        assert loaded.tokenizer.decode(known.encode(text)) == known.decode(known.encode(text)), text


def test_loading_needs_its_params_once(tmp_path):
    single(tmp_path)
    family, config = parts(tmp_path)
    params = family.params(config)
    with pytest.raises(RuntimeError, match="declared twice"):
        load_weights(tmp_path, (*params, params[0]), CPU, torch.float32)
    assert load_tied(tmp_path, family, config, CPU, torch.float32)[0] == config
