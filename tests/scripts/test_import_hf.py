"""Models of others: Llamas with random weights, and one that was trained elsewhere."""

import json
import os

import pytest
import torch
from commands import command

from data.tokenizer import load_tokenizer
from model import generate
from scripts.import_hf import import_llama
from training import checkpoint

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
    """Makes a Llama in the Hugging Face layout, and gives its folder and transformers' model."""
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
def test_a_llama_gives_its_logits(llama, tmp_path, config):
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


def test_the_settings_of_older_files_mean_the_same(llama, tmp_path):
    """transformers 4 wrote rope_theta and rope_scaling where 5 writes rope_parameters."""
    folder, theirs = llama(rope_parameters={**YARN, "rope_theta": 5000.0})
    config = json.loads((folder / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    (folder / "config.json").write_text(json.dumps(config))
    tokens = torch.randint(267, (2, 64))
    ours = checkpoint.load_model(import_llama(folder, tmp_path / "ours"))
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-5, atol=1e-5)


def run(*arguments):
    return command("-m", *arguments)


def test_the_command_writes_a_checkpoint_that_writes_text(llama, llama_tokenizer):
    folder, _ = llama()
    result = run("scripts.import_hf", f"source={folder}", "target=imported/llama")
    assert result.returncode == 0, result.stderr
    tokenizer = load_tokenizer("imported/llama/tokenizer")
    assert tokenizer.content == llama_tokenizer
    assert (tokenizer.beginning, tokenizer.ends) == (1, [2])
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
    assert "names no text of its own" in result.stderr


def edit(file, **changes):
    def change(folder):
        content = json.loads((folder / file).read_text())
        content.update(changes)
        (folder / file).write_text(json.dumps({key: value for key, value in content.items() if value is not None}))

    return change


def cut(file):
    return lambda folder: os.truncate(folder / file, 1000)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: os.remove(folder / "config.json"), "config.json cannot be read"),
        (lambda folder: os.remove(folder / "tokenizer.json"), "tokenizer.json cannot be read"),
        (lambda folder: os.remove(folder / "model.safetensors"), "model.safetensors cannot be read"),
        (cut("model.safetensors"), "model.safetensors cannot be read"),
        (cut("tokenizer.json"), "tokenizer.json cannot be read"),
        (edit("tokenizer.json", model={"type": "Strange"}), "tokenizer.json is no tokenizer"),
        (edit("config.json", model_type="gpt2"), "model_type=llama.*got gpt2"),
        (edit("config.json", attention_bias=True), "attention_bias=False.*got True"),
        (edit("config.json", head_dim=16), "head_dim.*16 and 32 / 4"),
        (edit("config.json", hidden_size=None), "hidden_size must be a positive int, got None"),
        (edit("config.json", hidden_size=64, head_dim=None), "does not hold what its config.json says"),
        (edit("config.json", vocab_size=100), "267 tokens, config.json only 100"),
        (edit("config.json", rope_parameters={"rope_type": "llama3"}), "type llama3"),
        (edit("config.json", rope_parameters={**YARN, "beta_fast": 16}), "beta_fast must be 32, got 16"),
        (edit("config.json", num_key_value_heads=3), "4 and 3"),
        (edit("config.json", num_attention_heads=0), "num_attention_heads must be a positive int, got 0"),
        (edit("config.json", hidden_size="32"), "hidden_size must be a positive int, got 32"),
        (edit("config.json", rms_norm_eps="small"), "rms_norm_eps must be a positive float, got small"),
        (edit("config.json", rope_parameters={**YARN, "factor": "4"}), "factor must be a positive float, got 4"),
        (edit("config.json", quantization_config={}), "quantised"),
        (edit("generation_config.json", eos_token_id=[]), r"eos_token_id must be an id, got \[\]"),
        (edit("generation_config.json", bos_token_id=9999), "below 267, got 9999"),
        (lambda folder: (folder / "config.json").write_text("[]"), "config.json must hold an object, got list"),
        (lambda folder: (folder / "model.safetensors.index.json").write_text("{}"), "does not hold"),
    ],
)
def test_what_cannot_be_imported_is_named_and_nothing_is_left(llama, tmp_path, damage, message):
    folder, _ = llama()
    damage(folder)
    with pytest.raises(ValueError, match=message):
        import_llama(folder, tmp_path / "ours" / "step")
    assert not (tmp_path / "ours").exists()


def test_a_head_that_is_missing_is_named(llama, tmp_path):
    folder, _ = llama(tie_word_embeddings=True)
    edit("config.json", tie_word_embeddings=False)(folder)
    with pytest.raises(ValueError, match="does not hold what its config.json says.*head.weight"):
        import_llama(folder, tmp_path / "ours")


def test_nothing_is_overwritten(llama, tmp_path):
    folder, _ = llama()
    (tmp_path / "ours").mkdir()
    with pytest.raises(ValueError, match="ours is there already"):
        import_llama(folder, tmp_path / "ours")


# --- stories260K: trained on TinyStories by the author of llama2.c, with its published greedy continuation -----------


@pytest.fixture(scope="module")
def stories(reference, tmp_path_factory):
    """The imported step folder, its model and the 257 ids that it must write."""
    folder = import_llama(reference / "stories260K", tmp_path_factory.mktemp("stories") / "step")
    expected = json.loads((reference / "stories260K" / "expected_greedy_ids.json").read_text())
    assert len(expected) == 257
    return folder, checkpoint.load_model(folder), expected


def greedy(model, *prompts):
    prompts = torch.tensor(prompts)
    n = 257 - prompts.shape[1]
    return torch.cat([prompts, torch.stack(list(generate(model, prompts, n, temperature=0)), dim=1)], dim=1).tolist()


def test_it_writes_its_story_without_a_cache(stories):
    _, model, expected = stories
    ids = expected[:1]
    with torch.inference_mode():
        while len(ids) < 257:
            ids.append(model(torch.tensor([ids]))[0, -1].argmax().item())
    assert ids == expected


@pytest.mark.parametrize("backend", ["fused", "written"])
def test_it_writes_its_story_with_a_cache(stories, backend):
    _, model, expected = stories
    model.use_attention(backend)
    assert greedy(model, expected[:1]) == [expected]
    model.use_attention("fused")


@pytest.mark.parametrize("cuts", [[256], [1, 255], [100, 1, 155], [7] * 36 + [4], [1, 2, 3, 250], [128, 128]], ids=str)
def test_it_writes_its_story_in_any_chunking(stories, cuts):
    """Read in pieces, each position's most likely next token is the story's."""
    _, model, expected = stories
    cache, tokens, ids = model.new_cache(256), torch.tensor([expected[:-1]]), []
    with torch.inference_mode():
        for piece in tokens.split(cuts, dim=1):
            ids += model(piece, cache=cache)[0].argmax(-1).tolist()
    assert ids == expected[1:]


def test_it_writes_its_story_in_a_batch_with_other_prompts(stories):
    _, model, expected = stories
    others = [[403], [500], [0]]
    together = greedy(model, others[0], expected[:1], *others[1:])
    assert together[1] == expected
    for row, other in zip((0, 2, 3), others, strict=True):
        assert together[row] == greedy(model, other)[0]


def test_it_writes_its_story_beside_a_longer_prompt(stories):
    """The shorter row is padded on the left, with positions of its own."""
    _, model, expected = stories
    n, b = 8, 2
    tokens = torch.tensor([[7] * (n - 1) + expected[:1], expected[100 : 100 + n]])
    padding = torch.tensor([[False] * (n - 1) + [True], [True] * n])
    positions = torch.stack([torch.tensor([0] * n), torch.arange(n)])
    cache, ids = model.new_cache(), expected[:1]
    with torch.inference_mode():
        while len(ids) < 257:
            tokens = model(tokens, positions, padding=padding, cache=cache)[:, -1:].argmax(-1)
            ids.append(tokens[0].item())
            padding = torch.cat([padding, torch.ones(b, 1, dtype=torch.bool)], dim=1)
            positions = positions[:, -1:] + 1
    assert ids == expected


@pytest.mark.parametrize("cached", [True, False])
def test_it_writes_its_story_compiled(stories, cached):
    """With a cache, token by token; without, each position's most likely next token at once."""
    folder, _, expected = stories
    model = checkpoint.load_model(folder)
    model.compile(dynamic=cached)
    if cached:
        assert greedy(model, expected[:1]) == [expected]
        return
    with torch.inference_mode():
        assert model(torch.tensor([expected[:-1]]))[0].argmax(-1).tolist() == expected[1:]


def test_the_command_tells_the_story(stories, reference):
    folder, *_ = stories
    result = run("scripts.generate", f"checkpoint={folder}", "temperature=0", "max_new_tokens=256")
    assert result.returncode == 0, result.stderr
    assert result.stdout == (reference / "stories260K" / "expected_greedy_text.txt").read_text() + "\n"


def test_a_prompt_goes_on_from_the_start_token(stories):
    folder, model, expected = stories
    tokenizer = load_tokenizer(folder / "tokenizer")
    prompt = tokenizer.prompt("Once upon a time")
    assert prompt == expected[:5]
    assert tokenizer.prompt("") == expected[:1]
    assert greedy(model, prompt) == [expected]
