import sys
import types
from dataclasses import replace
from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from engine.config import RopeConfig
from engine.errors import EngineError
from engine.models import registry
from engine.models.base import Family, count_parameters
from engine.models.decoder import Decoder, decoder_config, decoder_params, fp32_linear
from engine.models.loading import load_tied
from engine.models.qwen3 import Qwen3
from engine.models.registry import find_family, load_families, parse_config
from engine.models.rope import parse_rope, rope_tables
from engine.models.weights import read_config
from engine.ops import torch_ops
from engine.probe import POINTS, Probe
from tests.engine.model_harness import Harness

LENGTH = 200  # past the original length of every rope kind
IDS = torch.randint(3, 96, (LENGTH,), generator=torch.Generator().manual_seed(7)).tolist()
_YARN = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 64}
ROPES = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 64},
    "yarn": _YARN,
    "yarn_pair": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    "yarn_explicit": {**_YARN, "attention_factor": 1.0},
    "yarn_betas": {**_YARN, "factor": 4.0, "beta_fast": 16, "beta_slow": 2, "truncate": False},
}  # fmt: skip


def llama_config(**changes) -> LlamaConfig:
    """Untied and with large weights: a tied one with the usual ones repeats its last token whatever came before."""
    stated = dict(
        vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=256, initializer_range=0.2, tie_word_embeddings=False, rms_norm_eps=1e-5,
    )
    return LlamaConfig(**{**stated, **changes})


def qwen3_config(**changes) -> Qwen3Config:
    stated = dict(
        vocab_size=96, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        max_position_embeddings=256, initializer_range=0.2, tie_word_embeddings=False,
    )
    return Qwen3Config(**{**stated, **changes})


# One line a family: a small transformers config, untied, with large weights, vocab_size 96 and positions for LENGTH.
SMALL_CONFIGS = {"llama": llama_config, "qwen3": qwen3_config}


def make_hf(config):
    """A random transformers model with every bias and norm away from its neutral start."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                weight.add_(torch.randn_like(weight) * 0.3)
    return model


@torch.no_grad()
def hf_logits(model, ids):
    return model(torch.tensor([ids])).logits[0].float()


def ours(folder, dtype=torch.float32):
    family, parsed = parse_config(read_config(folder))
    config, weights = load_tied(folder, family, parsed, torch.device("cpu"), dtype)
    return family.build(config, weights)


def both(tmp_path, config):
    model = make_hf(config)
    model.save_pretrained(tmp_path)
    return model, ours(tmp_path)


def worst(a, b):
    return (a - b).abs().max().item()


def agree(model, mine):
    """Whole prompt at once, then in chunks, then token by token; by single and by fused operations."""
    want = hf_logits(model, IDS)
    for ops in (torch_ops(), replace(torch_ops(), fused=True)):
        assert worst(Harness(mine, ops=ops).logits(IDS), want) < 1e-4
        harness = Harness(mine, ops=ops)
        parts = [harness.logits(IDS[start:stop], start) for start, stop in ((0, 7), (7, 16), (16, 190))]
        parts += [harness.logits([IDS[at]], at) for at in range(190, LENGTH)]
        assert worst(torch.cat(parts), want) < 1e-4
    return want


def test_every_family_has_a_small_config_to_be_compared_with():
    missing = set(load_families()) - set(SMALL_CONFIGS)
    assert not missing, f"add to SMALL_CONFIGS in {__file__}: a small transformers config of {', '.join(sorted(missing))}"


@pytest.mark.parametrize("family", sorted(load_families().keys() & SMALL_CONFIGS.keys()))
def test_every_familys_logits_equal_transformers(tmp_path, family):
    model, mine = both(tmp_path, SMALL_CONFIGS[family]())
    assert mine.config.family == family == model.config.model_type, "FAMILY.name, ModelConfig.family and model_type must be one name"
    agree(model, mine)
    params = load_families()[family].params(mine.config)
    assert count_parameters(params) == model.num_parameters()
    mistakes = hf_logits(model, IDS).argmax(-1) != hf_logits(model, [(IDS[0] + 1) % 96, *IDS[1:]]).argmax(-1)
    assert mistakes.sum() > 20, f"the small config of {family} cannot tell right from wrong: give it a larger initializer_range"


def test_the_tiny_models_can_tell_right_from_wrong(tmp_path):
    model, mine = both(tmp_path, llama_config())
    want = hf_logits(model, IDS)
    other = hf_logits(model, [(IDS[0] + 1) % 96, *IDS[1:]])
    assert (other.argmax(-1) != want.argmax(-1)).sum() > 20  # the first token matters to the last ones
    mine.sin = mine.sin * 1.001
    assert worst(Harness(mine).logits(IDS), want) > 1e-3


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True},
        {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72, "head_dim": 8},
        {"num_key_value_heads": 4},
        {"num_key_value_heads": 1},
        {"head_dim": 32},
        {"attention_bias": True},
        {"mlp_bias": True},
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
        {"intermediate_size": 100, "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0}},
    ],
    ids=lambda changes: ",".join(changes) or "plain",
)
def test_llama_logits_equal_transformers(tmp_path, changes):
    agree(*both(tmp_path, llama_config(**changes)))


@pytest.mark.parametrize(
    "changes",
    [{}, {"tie_word_embeddings": True}, {"attention_bias": True}, {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 16},
     {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}}],
    ids=lambda changes: ",".join(changes) or "plain",
)  # fmt: skip
def test_qwen3_logits_equal_transformers(tmp_path, changes):
    model, mine = both(tmp_path, qwen3_config(**changes))
    assert type(mine) is Qwen3
    agree(model, mine)


def test_qwen3_without_its_query_norm_would_differ(tmp_path):
    model, mine = both(tmp_path, qwen3_config())
    Decoder.queries_keys, kept = Decoder.queries_keys, Qwen3.queries_keys
    try:
        Qwen3.queries_keys = Decoder.queries_keys
        assert worst(Harness(mine).logits(IDS), hf_logits(model, IDS)) > 0.1
    finally:
        Qwen3.queries_keys = kept


def test_qwen3_assumes_heads_of_128_when_the_config_does_not_say():
    config = {"architectures": ["Qwen3ForCausalLM"], "vocab_size": 8, "hidden_size": 64, "intermediate_size": 8, "num_hidden_layers": 1,
              "num_attention_heads": 2}  # fmt: skip
    assert find_family(config).parse(config).head_dim == 128


# M1: rope kinds


@pytest.mark.parametrize("kind", ROPES)
def test_each_rope_kind_gives_transformers_logits_and_tables(tmp_path, kind):
    model, mine = both(tmp_path, llama_config(rope_parameters={"rope_theta": 10000.0, **ROPES[kind]}))
    want = agree(model, mine)
    cos, sin = model.model.rotary_emb(torch.zeros(1), torch.arange(LENGTH)[None])
    half = mine.config.head_dim // 2
    assert worst(mine.cos[:LENGTH], cos[0, :, :half]) < 1e-6 and worst(mine.sin[:LENGTH], sin[0, :, :half]) < 1e-6
    if kind not in ("default", "dynamic"):
        mine.cos, mine.sin = rope_tables(RopeConfig(10000.0, mine.config.head_dim), 256, torch.device("cpu"))
        assert worst(Harness(mine).logits(IDS), want) > 1e-2  # the plain kind would have been seen


@pytest.mark.parametrize(("kind", "scale"), [("yarn", 1.277259), ("yarn_pair", 1.0), ("yarn_explicit", 1.0)])
def test_the_magnitude_of_yarn_is_what_transformers_gives(kind, scale):
    rope = parse_rope({"rope_scaling": ROPES[kind]}, 32, 256)
    cos, _ = rope_tables(rope, 256, torch.device("cpu"))
    assert cos[0, 0].item() == pytest.approx(scale, abs=1e-6)


def test_dynamic_rope_is_the_plain_kind_up_to_the_length_where_the_model_ends(tmp_path):
    config = llama_config(max_position_embeddings=64, rope_parameters={"rope_theta": 1e4, **ROPES["dynamic"]})
    model, mine = both(tmp_path, config)
    assert mine.config.max_position_embeddings == 64 and len(mine.cos) == 64
    assert worst(Harness(mine).logits(IDS[:64]), hf_logits(model, IDS[:64])) < 1e-4


def test_old_and_new_ways_to_write_rope_settings_mean_the_same():
    new = parse_rope({"rope_parameters": {"rope_theta": 5e5, **ROPES["llama3"]}}, 16, 256)
    old = parse_rope({"rope_theta": 5e5, "rope_scaling": {**ROPES["llama3"]}}, 16, 256)
    older = {key: value for key, value in ROPES["linear"].items() if key != "rope_type"} | {"type": "linear"}
    assert old == new
    assert parse_rope({"rope_scaling": older}, 16, 256) == parse_rope({"rope_scaling": ROPES["linear"]}, 16, 256)
    assert parse_rope({"rope_theta": 3.0, "rope_scaling": None}, 16, 256) == RopeConfig(3.0, 16)


def test_an_outer_original_length_wins_as_in_transformers(tmp_path):
    model = make_hf(llama_config(rope_parameters={"rope_theta": 10000.0, **ROPES["yarn"]}))
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace('"hidden_size"', '"original_max_position_embeddings": 32,\n  "hidden_size"'))
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    want = hf_logits(again, IDS)
    assert worst(want, hf_logits(model, IDS)) > 1e-2
    assert worst(Harness(ours(tmp_path)).logits(IDS), want) < 1e-4


@pytest.mark.parametrize(
    ("rope", "code", "words"),
    [
        ({"rope_type": "sideways"}, "unsupported_model", "sideways"),
        ({"rope_type": "proportional"}, "unsupported_model", "proportional"),
        ({"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 64},
         "unsupported_model", "longrope"),
        ({"rope_type": "linear"}, "bad_checkpoint", "factor"),
        ({"rope_type": "linear", "factor": "four"}, "bad_checkpoint", "factor"),
        ({"rope_type": "linear", "factor": 0}, "bad_checkpoint", "factor"),
        ({"rope_type": "llama3", "factor": 8.0}, "bad_checkpoint", "low_freq_factor"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "unsupported_model", "partial"),
        (["linear"], "bad_checkpoint", "rope"),
    ],
)  # fmt: skip
def test_other_rope_settings_are_refused_by_name(rope, code, words):
    with pytest.raises(EngineError) as caught:
        parse_rope({"rope_scaling": rope}, 16, 256)
    assert caught.value.code == code and words in caught.value.sentence


def test_longrope_is_accepted_where_a_sequence_never_leaves_its_short_set(tmp_path):
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "short_factor": [1.0 + i / 8 for i in range(8)],
            "long_factor": [9.0] * 8, "original_max_position_embeddings": 256}  # fmt: skip
    agree(*both(tmp_path, llama_config(rope_parameters=rope)))


# Types, probes, registry


def test_half_precision_logits_are_fp32_and_not_rounded():
    torch.manual_seed(0)
    hidden, weight = torch.randn(3, 64).bfloat16(), torch.randn(20_000, 64).bfloat16()
    logits = fp32_linear(hidden, weight)
    assert logits.dtype is torch.float32
    assert worst(logits, hidden.float() @ weight.float().t()) < 1e-4
    assert worst(logits, logits.bfloat16().float()) > 1e-3


def test_bf16_follows_transformers_within_its_rounding(tmp_path):
    model = make_hf(llama_config())
    model.save_pretrained(tmp_path)
    mine, half = ours(tmp_path, torch.bfloat16), make_hf(llama_config()).bfloat16()
    exact = hf_logits(model, IDS)
    mistake = (Harness(mine).logits(IDS) - exact).abs().mean()
    assert mistake < 1.5 * (hf_logits(half, IDS) - exact).abs().mean()


def test_probes_keep_every_named_point_and_change_nothing(tmp_path):
    _, mine = both(tmp_path, llama_config())
    probe = Probe(points=frozenset(POINTS))
    plain = Harness(mine).logits(IDS[:9])
    assert torch.equal(Harness(mine).logits(IDS[:9], probe=probe), plain)
    shapes = {key: value.shape for key, value in probe.arrays().items()}
    assert {name for name, _ in shapes} == set(POINTS)
    assert shapes["attention.q", 1] == (9, 4, 16) and shapes["attention.k", 0] == (9, 2, 16) and shapes["attention.out", 1] == (9, 4, 16)
    assert shapes["hidden", 1] == shapes["mlp.out", 0] == shapes["embedding", 0] == (9, 64)
    kept = probe.arrays()
    last = torch.from_numpy(kept["hidden", 1])
    assert torch.equal(mine.logits(Harness(mine).ops.rms_norm(last, mine.norm, 1e-5)), plain)


def test_every_family_is_found_by_its_architectures_and_model_type():
    families = load_families()
    assert {"llama", "qwen3"} <= set(families)
    for family in families.values():
        assert all(find_family({"architectures": [name]}) is family for name in family.architectures)
        assert find_family({"model_type": family.name}) is family


@pytest.mark.parametrize("config", [{"architectures": ["MambaForCausalLM"]}, {"model_type": "mamba"}, {}, {"architectures": "Llama"}])
def test_an_unknown_architecture_is_refused_with_what_is_supported(config):
    with pytest.raises(EngineError) as caught:
        find_family(config)
    assert caught.value.code == "unsupported_model" and "LlamaForCausalLM" in caught.value.sentence


def test_a_module_that_declares_no_family_stops_the_walk(tmp_path, monkeypatch):
    package = types.ModuleType("toy_models")
    package.__path__ = [str(tmp_path)]
    monkeypatch.setitem(sys.modules, "toy_models", package)
    (tmp_path / "base.py").write_text("")
    assert registry.collect(package) == {}
    (tmp_path / "forgotten.py").write_text("")
    with pytest.raises(RuntimeError, match=r"toy_models.forgotten declares no FAMILY"):
        registry.collect(package)


def test_two_families_with_one_architecture_stop_the_walk(tmp_path, monkeypatch):
    package = types.ModuleType("twin_models")
    package.__path__ = [str(tmp_path)]
    monkeypatch.setitem(sys.modules, "twin_models", package)
    line = "from engine.models.llama import FAMILY as F\nfrom dataclasses import replace\nFAMILY = replace(F, name={!r})\n"
    (tmp_path / "one.py").write_text(line.format("one"))
    (tmp_path / "two.py").write_text(line.format("two"))
    with pytest.raises(RuntimeError, match="LlamaForCausalLM"):
        registry.collect(package)


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"hidden_act": "gelu"}, "unsupported_model", "gelu"),
        ({"quantization_config": {"quant_method": "gptq"}}, "unsupported_model", "gptq"),
        ({"hidden_size": None}, "bad_checkpoint", "hidden_size"),
        ({"hidden_size": "64"}, "bad_checkpoint", "hidden_size"),
        ({"num_hidden_layers": 0}, "bad_checkpoint", "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "bad_checkpoint", "num_key_value_heads"),
        ({"hidden_size": 63}, "bad_checkpoint", "hidden_size"),
        ({"head_dim": 15}, "unsupported_model", "odd head_dim"),
        ({"rms_norm_eps": -1}, "bad_checkpoint", "rms_norm_eps"),
        ({"eos_token_id": "two"}, "bad_checkpoint", "eos_token_id"),
    ],
)
def test_a_config_that_cannot_run_is_refused_by_name(changes, code, words):
    stated = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, **changes}
    with pytest.raises(EngineError) as caught:
        load_families()["llama"].parse(stated)
    assert caught.value.code == code and words in caught.value.sentence


@pytest.mark.parametrize("changes", [{"use_sliding_window": True}, {"layer_types": ["full_attention", "sliding_attention"]}])
def test_qwen3_sliding_windows_are_refused_by_name(changes):
    with pytest.raises(EngineError, match="sliding"):
        load_families()["qwen3"].parse({"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
                                        "num_attention_heads": 4, **changes})  # fmt: skip


@pytest.mark.parametrize(
    "config",
    [llama_config(), llama_config(attention_bias=True, mlp_bias=True), llama_config(tie_word_embeddings=True), qwen3_config()],
    ids=["plain", "biases", "tied", "norms"],
)
def test_parameters_are_counted_as_transformers_counts_them(config):
    family, parsed = parse_config({**config.to_dict(), "architectures": [f"{type(config).__name__.removesuffix('Config')}ForCausalLM"]})
    assert count_parameters(family.params(parsed)) == make_hf(config).num_parameters()


def qwen2_family():
    """A family as its author would write it: biases on q, k and v alone, which config.json does not mention."""
    return Family(
        name="qwen2", architectures=("Qwen2ForCausalLM",), build=Decoder, params=partial(decoder_params, output_bias=False),
        parse=lambda config: decoder_config("qwen2", {**config, "attention_bias": True}),
    )  # fmt: skip


def test_biases_on_q_k_and_v_alone_give_transformers_logits(tmp_path):
    model = make_hf(Qwen2Config(**{**llama_config().to_diff_dict(), "model_type": "qwen2", "rms_norm_eps": 1e-5}))
    model.save_pretrained(tmp_path)
    family = qwen2_family()
    config, weights = load_tied(tmp_path, family, family.parse(read_config(tmp_path)), torch.device("cpu"), torch.float32)
    assert "model.layers.0.self_attn.q_proj.bias" in weights and "model.layers.0.self_attn.o_proj.bias" not in weights
    agree(model, family.build(config, weights))


def test_a_family_whose_parse_names_another_family_is_stopped(monkeypatch):
    monkeypatch.setattr(registry, "load_families", lambda: {"qwen2": replace(qwen2_family(), parse=load_families()["llama"].parse)})
    with pytest.raises(RuntimeError, match=r"qwen2.py: parse returns a ModelConfig of the family 'llama'"):
        parse_config({**llama_config().to_dict(), "architectures": ["Qwen2ForCausalLM"]})


def test_a_family_named_otherwise_than_its_file_stops_the_walk(tmp_path, monkeypatch):
    package = types.ModuleType("misnamed_models")
    package.__path__ = [str(tmp_path)]
    monkeypatch.setitem(sys.modules, "misnamed_models", package)
    (tmp_path / "mine.py").write_text("from engine.models.llama import FAMILY\n")
    with pytest.raises(RuntimeError, match=r"misnamed_models.mine: FAMILY.name is 'llama'.*model_type"):
        registry.collect(package)
