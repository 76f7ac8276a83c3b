"""Fine-tuning: a trained model, our own or an imported one, learns to answer. Complete miniature runs."""

import json

import pytest
import torch
from commands import command

import train
from data.tokenizer import load_tokenizer
from scripts.import_hf import import_llama
from training import checkpoint

pytestmark = pytest.mark.slow

QUIET = ["compile=false", "tracking.mode=disabled", "sample.tokens=5", "every.sample=100", "every.checkpoint=100"]


def write_chat(name: str = "chat.jsonl", prompt: str = "say it"):
    with open(name, "w") as file:
        for i in range(40):
            turns = [("user", f"{prompt} {i}"), ("assistant", "the hat")]
            file.write(json.dumps({"messages": [{"role": r, "content": c} for r, c in turns]}) + "\n")


@pytest.fixture
def base(settings, tmp_path):
    """A finished run of a model that differs from the default."""
    (tmp_path / "words.txt").write_text("".join(f"{i} times {i} is {i * i}.\n" for i in range(50)))
    own = ["model.norm=layernorm", "model.n_kv_heads=1", "model.tied=true", "model.d_model=16"]
    own += ["data.paths=[words.txt]", "data.validation=[]", "steps=2", "batch_tokens=64"]
    assert train.train(settings("experiment=smoke", *QUIET, *own), tmp_path / "base") == 0
    return tmp_path / "base"


def finetune(settings, tmp_path, name: str, *overrides: str):
    write_chat()
    own = ["experiment=finetune", "data.paths=[chat.jsonl]", *QUIET, "steps=30", "every.evaluate=10", "every.log=10"]
    cfg = settings(*own, "schedule.warmup=2", "optimizer.lr=1e-2", *overrides)
    assert train.train(cfg, tmp_path / name) == 0
    rows = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
    return cfg, [row["val_loss"] for row in rows if "val_loss" in row]


def test_finetuning_keeps_model_and_tokenizer_and_learns_to_answer(settings, tmp_path, base):
    cfg, losses = finetune(settings, tmp_path, "tuned", f"init_from={base}", "model.dropout=0.1", "steps=40")
    assert (cfg.model.d_model, cfg.model.norm, cfg.model.n_kv_heads, cfg.seq_len) == (16, "layernorm", 1, 32)
    assert cfg.model.dropout == 0.1
    assert losses[-1] < losses[0] / 2
    about = checkpoint.read_about(checkpoint.find(tmp_path / "tuned"))
    assert about["data"]["template"]["user"] == "User: {}\n" and about["data"]["messages_column"] == "messages"


def test_own_special_tokens_are_learned_and_kept_in_the_checkpoint(settings, tmp_path):
    (tmp_path / "words.txt").write_text("".join(f"<|user|>{i}<|bot|>{i * i}\n" for i in range(200)))
    own = ["tokenizer=bpe", "tokenizer.vocab_size=300", "tokenizer.special=['<|end|>','<|user|>','<|bot|>']"]
    own += ["tokenizer.parse_special=true", "data.paths=[words.txt]", "data.validation=[]", "steps=2"]
    assert train.train(settings("experiment=smoke", *QUIET, *own), tmp_path / "base") == 0
    template = "{system: '{}', user: '<|user|>{}', assistant: '<|bot|>{}<|end|>'}"
    finetune(settings, tmp_path, "tuned", f"init_from={tmp_path}/base", f"data.template={template}", "steps=4")
    folder = checkpoint.find(tmp_path / "tuned")
    tokenizer = load_tokenizer(folder / "tokenizer")
    _, user, bot = tokenizer.special.values()
    prompt = 'prompt="<|user|>3<|bot|>"'
    result = command("-m", "scripts.explain", f"checkpoint={folder}", prompt, "json=why.json", "method=occlusion")
    assert result.returncode == 0, result.stderr
    three = tokenizer.encode("3").tolist()
    assert json.loads((tmp_path / "why.json").read_text())["tokens"] == [user, *three, bot]
    result = command("-m", "scripts.generate", f"checkpoint={folder}", prompt, "max_new_tokens=3")
    assert result.returncode == 0 and result.stdout.startswith("<|user|>3<|bot|>"), result.stderr
    assert "prompt of 3 tokens" in result.stderr
    evaluated = command("-m", "scripts.evaluate", f"checkpoint={folder}", "device=cpu")
    assert evaluated.returncode == 0, evaluated.stderr


@pytest.mark.parametrize("packing", ["documents", "stream"])
def test_stopped_finetuning_resumes_bit_for_bit(settings, tmp_path, base, packing):
    given = [f"init_from={base}", "model.dropout=0.1", "steps=6", f"packing={packing}", "every.evaluate=2"]
    _, losses = finetune(settings, tmp_path, "whole", *given)
    finetune(settings, tmp_path, "halves", *given, "stop_after=3")
    _, again = finetune(settings, tmp_path, "halves", *given, "resume=auto")
    assert again == losses
    one, other = (checkpoint.read_weights(checkpoint.find(tmp_path / name)) for name in ("whole", "halves"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_llama_learns_to_answer_and_to_stop(settings, tmp_path, llama_tokenizer):
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    shape |= {"num_key_value_heads": 1, "rms_norm_eps": 1e-3, "max_position_embeddings": 64}
    LlamaForCausalLM(LlamaConfig(vocab_size=267, **shape)).save_pretrained(tmp_path / "llama")
    (tmp_path / "llama" / "tokenizer.json").write_text(llama_tokenizer)
    import_llama(tmp_path / "llama", tmp_path / "ours")
    cfg, losses = finetune(settings, tmp_path, "tuned", f"init_from={tmp_path}/ours", "steps=60")
    assert (cfg.model.norm_eps, cfg.model.n_kv_heads, cfg.seq_len) == (1e-3, 1, 64)
    assert losses[-1] < losses[0] / 2
    model = checkpoint.load_model(tmp_path / "tuned")
    tokenizer = load_tokenizer(checkpoint.find(tmp_path / "tuned") / "tokenizer")
    answer = tokenizer.prompt("User: say it 1\nAssistant:")
    for _ in range(40):
        answer.append(int(model(torch.tensor([answer]))[0, -1].argmax()))
        if answer[-1] in tokenizer.stops:
            break
    assert answer[-1] in tokenizer.stops


def test_a_batch_without_an_answer_changes_nothing(settings, tmp_path, base):
    """Short rows cut from long questions hold hardly any answer."""
    write_chat(prompt="why " * 60)
    own = ["experiment=finetune", "data.paths=[chat.jsonl]", *QUIET, f"init_from={base}", "packing=stream", "steps=20"]
    cfg = settings(*own, "every.log=1", "seq_len=8", "batch_tokens=8")
    assert train.train(cfg, tmp_path / "tuned") == 0
    rows = [json.loads(line) for line in (tmp_path / "tuned" / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["skipped"] == sum("loss" not in row for row in rows) > 5
    assert checkpoint.not_finite(checkpoint.load_model(tmp_path / "tuned")) is None


def test_evaluating_conversations_counts_answers_only(settings, tmp_path, base):
    write_chat()
    given = ["checkpoint=base", "data=files", "data.paths=[chat.jsonl]"]
    plain = [*given, "data.messages_column=messages"]
    result = command("-m", "scripts.evaluate", *plain)
    assert result.returncode == 0, result.stderr
    assert f"{40 * len(' the hat' + chr(10))} bytes" in result.stdout
    result = command("-m", "scripts.evaluate", *plain, "report=true")
    assert result.returncode == 2 and "only answers count" in result.stderr
    result = command("-m", "scripts.evaluate", *given, "data.column=messages")
    assert result.returncode == 2 and "data.messages_column" in result.stderr


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], "error: a model and tokenizer from_checkpoint need init_from, got null: give init_from=RUN"),
        (["init_from=nowhere"], "error: init_from: there is no checkpoint in nowhere"),
        (["init_from=base", "seq_len=64"], "seq_len must be at most model.max_seq_len, got 64 and 32"),
        (["init_from=base", "model.d_model=32", "model.tied=false"], "has model.d_model=16 model.tied=true, this run"),
        (["init_from=base", "data.answer_column=a"], "give data.messages_column, or data.prompt_column and"),
        (["init_from=base", "data=files", "data.paths=[words.txt]", "data.prompt_column=a"], "data.prompt_column"),
        (["init_from=base", "data.template.user=hi"], "data.template.user must contain {} once"),
        (["init_from=base", "data.template.assistant='{}{}'"], "data.template.assistant must contain {} once"),
    ],
    ids=lambda value: " ".join(value)[:50],
)
def test_impossible_finetuning_is_refused_in_one_line(base, overrides, message):
    write_chat()
    paths = [] if any(one.startswith("data.paths") for one in overrides) else ["data.paths=[chat.jsonl]"]
    result = command(train.__file__, "experiment=finetune", *paths, *QUIET, "steps=20", *overrides)
    assert result.returncode == 2 and result.stderr.count("\n") == 1, result.stderr
    assert message in result.stderr
