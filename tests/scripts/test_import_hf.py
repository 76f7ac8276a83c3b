"""Importing Llamas: with random weights, and a published one that was trained."""

import json
import os

import pytest
import torch
from commands import command
from safetensors.torch import load_file, save_file

from data.tokenizer import load_tokenizer
from model import generate
from model.ops import BACKENDS, TORCH
from scripts.import_hf import import_llama
from training import checkpoint

pytestmark = pytest.mark.slow

SHAPE = {
    "vocab_size": 267,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


@pytest.fixture
def llama(tmp_path, llama_tokenizer):
    """Saves a Llama in the Hugging Face layout; returns its folder and transformers' model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    def make(saving=None, **config):
        folder = tmp_path / "llama"
        model = LlamaForCausalLM(LlamaConfig(**{**SHAPE, **config})).eval()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
        model.save_pretrained(folder, **(saving or {}))
        (folder / "tokenizer.json").write_text(llama_tokenizer)
        return folder, model

    return make


DELETE = object()
LENGTH = "original_max_position_embeddings"


def without(values, name):
    return {key: value for key, value in values.items() if key != name}


YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"num_key_value_heads": 2},
        {"num_key_value_heads": 1, "tie_word_embeddings": True, "rms_norm_eps": 1e-3},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
        {"rope_parameters": YARN},
        {"vocab_size": 300},  # more rows than tokens
        {"saving": {"max_shard_size": "20KB"}},
    ],
    ids=str,
)
def test_an_imported_llama_has_the_same_logits(llama, tmp_path, config):
    folder, theirs = llama(**config)
    ours = checkpoint.load_model(import_llama(folder, tmp_path / "ours"))
    assert ours.vocab_size == 267
    tokens = torch.randint(267, (2, 64))
    with torch.no_grad():
        expected = theirs(tokens).logits[..., :267]
        torch.testing.assert_close(ours(tokens), expected, rtol=1e-5, atol=1e-5)
        cache = ours.new_cache()
        pieces = [ours(piece, cache=cache) for piece in tokens.split([1, 40, 23], dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), expected, rtol=1e-5, atol=1e-5)


def test_half_precision_weights_become_float32(llama, tmp_path):
    folder, theirs = llama()
    theirs.bfloat16().save_pretrained(folder)
    ours = checkpoint.load_model(import_llama(folder, tmp_path / "ours"))
    tokens = torch.randint(267, (2, 10))
    torch.testing.assert_close(ours(tokens), theirs.float()(tokens).logits, rtol=1e-5, atol=1e-5)


def test_older_names_in_config_json_are_understood(llama, tmp_path):
    """transformers 4 wrote rope_theta and rope_scaling where 5 writes rope_parameters."""
    folder, theirs = llama(rope_parameters={**YARN, "rope_theta": 5000.0})
    config = json.loads((folder / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    (folder / "config.json").write_text(json.dumps(config))
    tokens = torch.randint(267, (2, 64))
    ours = checkpoint.load_model(import_llama(folder, tmp_path / "ours"))
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-5, atol=1e-5)


LONG = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
CONFIGS = {  # changes of config.json, and the error of an import (None: it is imported)
    "yarn's length beside": ({"rope_parameters": without(LONG, LENGTH), LENGTH: 64}, None),
    "yarn's length beside, another in it": ({"rope_parameters": LONG | {LENGTH: 16}, LENGTH: 64}, None),
    "yarn's length nowhere": ({"rope_parameters": without(LONG, LENGTH)}, None),
    "yarn's length in rope_scaling": ({"rope_scaling": LONG}, None),
    "yarn's length beside rope_scaling": ({"rope_scaling": LONG | {LENGTH: 16}, LENGTH: 64}, None),
    "a length that nothing needs": ({LENGTH: 16}, None),
    "yarn from very short": ({"rope_parameters": LONG | {LENGTH: 4, "factor": 32.0}}, None),
    "yarn to a broken length": ({"rope_parameters": LONG | {"factor": 2.51}}, None),
    "yarn to one that would shift": ({"rope_parameters": LONG | {LENGTH: 112, "factor": 1.45}}, "is a whole number"),
    "yarn that turns fast": ({"rope_parameters": LONG | {"rope_theta": 10.0, LENGTH: 100}}, None),
    "beta_fast": ({"rope_parameters": LONG | {"beta_fast": 16}}, "beta_fast"),
    "beta_fast by default": ({"rope_parameters": LONG | {"beta_fast": 32.0, "beta_slow": None}}, None),
    "beta_slow": ({"rope_parameters": LONG | {"beta_slow": 2}}, "beta_slow"),
    "attention_factor": ({"rope_parameters": LONG | {"attention_factor": 1.5}}, "attention_factor"),
    "mscale": ({"rope_parameters": LONG | {"mscale": 0.7, "mscale_all_dim": 1.2}}, "mscale"),
    "not truncated": ({"rope_parameters": LONG | {"truncate": False}}, "truncate"),
    "truncated by null": ({"rope_parameters": LONG | {"truncate": None}}, "truncate"),
    "rope_theta beside": ({"rope_theta": 500.0, "rope_parameters": None}, None),
    "rope_theta beside and in it": ({"rope_theta": 500.0, "rope_parameters": {"rope_theta": 5000.0}}, None),
    "rope_theta beside rope_scaling": ({"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0}}, None),
    "rope_scaling and rope_parameters": (
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_theta": 500.0, "factor": 8.0}},
        None,
    ),
    "rope_type and type": ({"rope_parameters": {"rope_type": "linear", "type": "yarn", "factor": 2.0}}, None),
    "an empty rope_scaling": ({"rope_scaling": {}, "rope_parameters": {"rope_theta": 500.0}}, None),
    "part of each head": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    "part of each head, in it": ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    "llama3's": (
        {"rope_parameters": LONG | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}},
        "type llama3",
    ),
    "dynamic": ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "type dynamic"),
    "no rms_norm_eps": ({"rms_norm_eps": DELETE}, None),
    "no max_position_embeddings": ({"max_position_embeddings": DELETE}, None),
    "no tie_word_embeddings": ({"tie_word_embeddings": DELETE}, None),
    "no head_dim": ({"head_dim": DELETE}, None),
    "no heads of their own": ({"num_key_value_heads": None}, None),
    "no hidden_act": ({"hidden_act": DELETE}, None),
    "swish": ({"hidden_act": "swish"}, None),
    "gelu": ({"hidden_act": "gelu"}, "hidden_act"),
    "no biases": ({"attention_bias": DELETE, "mlp_bias": DELETE}, None),
    "pretraining_tp": ({"pretraining_tp": 2}, None),
    "a window": ({"sliding_window": 4}, "sliding_window"),
    "no window": ({"sliding_window": None}, None),
}


@pytest.mark.parametrize("said", CONFIGS)
def test_config_json_is_read_as_transformers_does_or_refused_by_name(llama, tmp_path, said):
    """Heads are wide enough for YaRN's pairs to differ."""
    from transformers import LlamaForCausalLM

    changes, refusal = CONFIGS[said]
    shape = {"hidden_size": 128, "num_attention_heads": 2, "intermediate_size": 32, "num_hidden_layers": 1}
    folder, _ = llama(**shape, max_position_embeddings=128, rms_norm_eps=1e-6)
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({k: value for k, value in config.items() if value is not DELETE}))
    if refusal is not None:
        with pytest.raises(ValueError, match=refusal):
            import_llama(folder, tmp_path / "ours")
        return
    ours = checkpoint.load_model(import_llama(folder, tmp_path / "ours"))
    theirs = LlamaForCausalLM.from_pretrained(folder).eval()
    tokens = torch.randint(267, (2, 128))
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-4)


def test_an_untied_head_stays_untied(llama, tmp_path):
    """tie_word_embeddings contradicts an lm_head of other values: transformers 5 uses it, 4 dropped it."""
    folder, theirs = llama(tie_word_embeddings=True)
    embedding = theirs.get_input_embeddings().weight.detach()
    weights(**{"lm_head.weight": embedding + 1})(folder)
    with pytest.raises(ValueError, match=r"tie_word_embeddings=true, but lm_head.weight is not .*embed_tokens"):
        import_llama(folder, tmp_path / "ours")
    assert not (tmp_path / "ours").exists()
    weights(**{"lm_head.weight": embedding[:100].clone()})(folder)
    with pytest.raises(ValueError, match=r"tie_word_embeddings=true, but lm_head.weight is not .*embed_tokens"):
        import_llama(folder, tmp_path / "ours")
    weights(**{"lm_head.weight": embedding.clone()})(folder)
    ours = checkpoint.load_model(import_llama(folder, tmp_path / "ours"))
    assert ours.head.weight is ours.embedding.weight


def test_a_weight_in_two_files_is_refused_by_name(llama, tmp_path):
    folder, _ = llama(saving={"max_shard_size": "20KB"})
    first, second, *_ = sorted(folder.glob("*.safetensors"))
    weights = load_file(first)
    name = next(iter(weights))
    save_file(load_file(second) | {name: weights[name] + 1}, second)
    with pytest.raises(ValueError, match=f"{name} is in {first.name} and in {second.name}"):
        import_llama(folder, tmp_path / "ours")


def run(*arguments):
    return command("-m", *arguments)


def test_the_command_saves_a_checkpoint_that_generates_text(llama, llama_tokenizer):
    folder, _ = llama()
    result = run("scripts.import_hf", f"source={folder}", "target=imported/llama")
    assert result.returncode == 0, result.stderr
    tokenizer = load_tokenizer("imported/llama/tokenizer")
    assert tokenizer.content == llama_tokenizer
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (1, [2])
    for prompt in ([], ["--", "the heat"]):
        result = run("scripts.generate", "checkpoint=imported/llama", "max_new_tokens=5", *prompt)
        assert result.returncode == 0, result.stderr
        assert result.stdout.startswith(" ".join(prompt[1:]))
    evaluate = ["scripts.evaluate", "checkpoint=imported/llama"]
    with open("text.txt", "w") as file:
        file.write("the heat that eats the hat " * 20)
    result = run(*evaluate, "data=files", "data.paths=[text.txt]", "seq_len=32")
    assert result.returncode == 0, result.stderr
    assert "bits per byte" in result.stdout
    result = run(*evaluate)
    assert result.returncode == 2
    assert "does not name its training text" in result.stderr


def edit(file, **changes):
    def change(folder):
        content = json.loads((folder / file).read_text())
        content.update(changes)
        (folder / file).write_text(json.dumps({key: value for key, value in content.items() if value is not None}))

    return change


def weights(**changes):
    def change(folder):
        path = folder / "model.safetensors"
        save_file(load_file(path) | changes, path)

    return change


def index(content):
    def change(folder):
        os.rename(folder / "model.safetensors", folder / "model-1.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps(content))

    return change


def cut(file):
    return lambda folder: os.truncate(folder / file, 1000)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: os.remove(folder / "config.json"), "config.json is missing"),
        (lambda folder: os.remove(folder / "tokenizer.json"), "tokenizer.json is missing"),
        (lambda folder: os.remove(folder / "model.safetensors"), "model.safetensors cannot be read"),
        (cut("model.safetensors"), "model.safetensors cannot be read"),
        (cut("tokenizer.json"), "tokenizer.json is damaged: Invalid JSON"),
        (edit("tokenizer.json", model={"type": "Strange"}), "this tokenizer.json cannot be read"),
        (edit("config.json", model_type="gpt2"), "model_type must be llama to be imported, got gpt2"),
        (edit("config.json", attention_bias=True), "attention_bias must be False to be imported, got True"),
        (edit("config.json", head_dim=16), "head_dim.*16 and 32 / 4"),
        (edit("config.json", hidden_size=None), "hidden_size must be a positive int, .*got None"),
        (edit("config.json", hidden_size=64, head_dim=None), "does not hold what its config.json says"),
        (edit("config.json", vocab_size=100), "267 tokens, config.json only 100"),
        (edit("config.json", rope_parameters={"rope_type": "llama3"}), "type llama3"),
        (edit("config.json", rope_parameters={**YARN, "beta_fast": 16}), "beta_fast must be 32 to be imported, got 16"),
        (edit("config.json", num_key_value_heads=3), "4 and 3"),
        (edit("config.json", num_attention_heads=0), "num_attention_heads must be a positive int, .*got 0"),
        (edit("config.json", hidden_size="32"), "hidden_size must be a positive int, .*got 32"),
        (edit("config.json", rms_norm_eps="small"), "rms_norm_eps must be a positive float, .*got small"),
        (edit("config.json", rope_parameters={**YARN, "factor": "4"}), "factor must be a positive float, .*got 4"),
        (edit("config.json", quantization_config={}), "quantised"),
        (edit("generation_config.json", eos_token_id=[]), r"eos_token_id must be an id, got \[\]"),
        (edit("generation_config.json", bos_token_id=9999), "below 267, got 9999"),
        (
            lambda folder: (folder / "config.json").write_text("[]"),
            "config.json is damaged: it should be an object, got",
        ),
        (lambda folder: (folder / "model.safetensors.index.json").write_text("{}"), "holds its weights twice"),
        (index({}), "index.json is damaged: weight_map is missing"),
        (index({"weight_map": ["model.safetensors"]}), "index.json is damaged: weight_map should be an object"),
        (index({"weight_map": None}), "index.json is damaged: weight_map should be an object, got None"),
        (index({"weight_map": {"a": 5}}), r"index.json is damaged: weight_map\.a should be a valid string, got 5"),
        (index({"weight_map": {"a": {"b": "c"}}}), r"index.json is damaged: weight_map\.a should be a valid string"),
        (index({"weight_map": {"a": "../model.safetensors"}}), "safetensors is not in the same folder"),
        (index({"weight_map": {"a": "gone.safetensors"}}), "gone.safetensors cannot be read"),
        (index({"weight_map": {}}), "does not hold what its config.json says"),
        (edit("config.json", rope_scaling=[1, 2]), r"config.json is damaged: rope_scaling should be .*, got \[1, 2\]"),
        (edit("config.json", rope_scaling="yarn"), "config.json is damaged: rope_scaling should be .*, got 'yarn'"),
        (edit("config.json", rope_parameters={"full_attention": {}}), r"rope_parameters\.full_attention"),
        (edit("config.json", tie_word_embeddings="yes"), "tie_word_embeddings should be a valid boolean, got 'yes'"),
        (edit("config.json", sliding_window=8), "sliding_window must be None to be imported, got 8"),
        (edit("config.json", model_type=None, architectures=["MistralForCausalLM"]), "only a LlamaForCausalLM"),
        (lambda folder: (folder / "config.json").write_text("[" * 100_000), "config.json is damaged: Invalid JSON"),
        (lambda folder: (folder / "config.json").write_bytes(b"\xff\xfe"), "config.json is damaged: Invalid JSON"),
        (lambda folder: (folder / "config.json").write_text(""), "config.json is empty"),
        (lambda folder: (folder / "generation_config.json").write_text("5"), "generation_config.json is damaged: it"),
        (edit("config.json", hidden_size=60000, head_dim=None), "hidden_size is 60000|d_model is 60000"),
        (edit("config.json", num_hidden_layers=10**9), "n_layers is 1000000000, but the weights allow at most"),
        (edit("config.json", num_hidden_layers=1), r"blocks\.1\..* is .*, the model has none"),
        (edit("config.json", intermediate_size=10**18), "does not hold what its config.json says"),
        (edit("config.json", max_position_embeddings=10**14), r"needs [\d,.]+ GiB of memory, this machine has"),
        (edit("config.json", hidden_size=10**30), r"hidden_size must be a positive int, below 2\*\*63"),
        (edit("config.json", vocab_size=300), r"embedding\.weight is \(267, 32\), the model's is \(300, 32\)"),
        (weights(**{"model.layers.0.self_attn.q_proj.bias": torch.zeros(32)}), "a Llama has no weight called"),
        (weights(**{"model.layers.7.input_layernorm.weight": torch.ones(32)}), r"blocks\.7\..* the model has none"),
        (
            weights(**{"model.norm.weight": torch.full((32,), torch.nan)}),
            r"norm\.weight holds numbers that are not finite",
        ),
        (
            weights(**{"model.norm.weight": torch.ones(32, dtype=torch.int8)}),
            r"model\.norm\.weight holds I8, no weights",
        ),
        (weights(**{"model.norm.weight": torch.ones(1, 32)}), r"norm\.weight is \(1, 32\), the model's is \(32,\)"),
    ],
)
def test_an_impossible_import_is_refused_by_name_and_leaves_no_files(llama, tmp_path, damage, message):
    folder, _ = llama()
    damage(folder)
    with pytest.raises(ValueError, match=message):
        import_llama(folder, tmp_path / "ours" / "step")
    assert not (tmp_path / "ours").exists()


def test_a_missing_head_is_refused_by_name(llama, tmp_path):
    folder, _ = llama(tie_word_embeddings=True)
    edit("config.json", tie_word_embeddings=False)(folder)
    with pytest.raises(ValueError, match="does not hold what its config.json says.*head.weight"):
        import_llama(folder, tmp_path / "ours")


def test_nothing_is_overwritten(llama, tmp_path):
    folder, _ = llama()
    (tmp_path / "ours").mkdir()
    with pytest.raises(ValueError, match="ours exists already"):
        import_llama(folder, tmp_path / "ours")


# --- stories260K: trained on TinyStories by the author of llama2.c, with its published greedy continuation -----------


@pytest.fixture(scope="module")
def stories(reference, tmp_path_factory):
    """The imported step folder, its model and the 257 ids that it must generate."""
    folder = import_llama(reference / "stories260K", tmp_path_factory.mktemp("stories") / "step")
    expected = json.loads((reference / "stories260K" / "expected_greedy_ids.json").read_text())
    assert len(expected) == 257
    return folder, checkpoint.load_model(folder), expected


def greedy(model, *prompts, length=257):
    prompts = torch.tensor(prompts)
    n = length - prompts.shape[1]
    return torch.cat([prompts, torch.stack(list(generate(model, prompts, n, temperature=0)), dim=1)], dim=1).tolist()


def test_it_generates_its_story_without_a_cache(stories):
    _, model, expected = stories
    ids = expected[:1]
    with torch.inference_mode():
        while len(ids) < 64:
            ids.append(model(torch.tensor([ids]))[0, -1].argmax().item())
    assert ids == expected[:64]


@pytest.mark.parametrize("backend", ["fused", "math"])
def test_it_generates_its_story_with_a_cache(stories, backend):
    _, model, expected = stories
    model.use(BACKENDS[backend])
    assert greedy(model, expected[:1]) == [expected]
    model.use(TORCH)


@pytest.mark.parametrize("cuts", [[256], [1, 255], [100, 1, 155], [7] * 36 + [4]], ids=str)
def test_it_predicts_its_story_in_any_chunking(stories, cuts):
    """Read in pieces, each position's most likely next token is the story's."""
    _, model, expected = stories
    cache, tokens, ids = model.new_cache(256), torch.tensor([expected[:-1]]), []
    with torch.inference_mode():
        for piece in tokens.split(cuts, dim=1):
            ids += model(piece, cache=cache)[0].argmax(-1).tolist()
    assert ids == expected[1:]


def test_it_generates_its_story_in_a_batch_with_other_prompts(stories):
    _, model, expected = stories
    others = [[403], [500]]
    together = greedy(model, others[0], expected[:1], others[1])
    assert together[1] == expected
    for row, other in zip((0, 2), others, strict=True):
        assert together[row][:48] == greedy(model, other, length=48)[0]


def test_it_generates_its_story_next_to_a_longer_prompt(stories):
    """The shorter row is padded on the left and has its own positions."""
    _, model, expected = stories
    n, b = 8, 2
    tokens = torch.tensor([[7] * (n - 1) + expected[:1], expected[100 : 100 + n]])
    padding = torch.tensor([[False] * (n - 1) + [True], [True] * n])
    positions = torch.stack([torch.tensor([0] * n), torch.arange(n)])
    cache, ids = model.new_cache(), expected[:1]
    with torch.inference_mode():
        while len(ids) < 128:
            tokens = model(tokens, positions, padding=padding, cache=cache)[:, -1:].argmax(-1)
            ids.append(tokens[0].item())
            padding = torch.cat([padding, torch.ones(b, 1, dtype=torch.bool)], dim=1)
            positions = positions[:, -1:] + 1
    assert ids == expected[:128]


def test_it_predicts_its_story_compiled(stories):
    folder, _, expected = stories
    model = checkpoint.load_model(folder)
    model.compile(dynamic=False)
    with torch.inference_mode():
        assert model(torch.tensor([expected[:-1]]))[0].argmax(-1).tolist() == expected[1:]


def test_the_command_generates_the_story(stories, reference):
    folder, *_ = stories
    result = run("scripts.generate", f"checkpoint={folder}", "temperature=0", "max_new_tokens=256")
    assert result.returncode == 0, result.stderr
    assert result.stdout == (reference / "stories260K" / "expected_greedy_text.txt").read_text() + "\n"


def test_a_prompt_begins_with_the_start_token(stories):
    folder, model, expected = stories
    tokenizer = load_tokenizer(folder / "tokenizer")
    prompt = tokenizer.prompt("Once upon a time")
    assert prompt == expected[:5]
    assert tokenizer.prompt("") == expected[:1]
    assert greedy(model, prompt) == [expected]
