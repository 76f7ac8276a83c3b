"""Files saved by earlier versions are read under the present names."""

import json

import pytest
import torch
import yaml
from hydra import compose, initialize_config_dir
from miniature import equal
from safetensors.torch import load_file, save_file

from conf import resumed
from conf.entry import REPOSITORY
from conf.parsing import parse
from conf.schema import Train
from data import older
from training import checkpoint
from training.metrics import best, read_rows

BEFORE = {name: former for former, name in older.NAMES.items()}
FORMER = {(key, name): value for (key, value), name in older.VALUES.items()}


def as_before(saved):
    """The same with the names of format 1."""
    if isinstance(saved, list):
        return [as_before(item) for item in saved]
    if not isinstance(saved, dict):
        return saved
    values = {key: FORMER.get((key, value), value) if isinstance(value, str) else value for key, value in saved.items()}
    return {BEFORE.get(key, key): as_before(value) for key, value in values.items()}


def make_older(run):
    """Rewrites a run's folder as a version with format 1 would have written it."""
    folder = checkpoint.find(run)
    weights = load_file(folder / "model.safetensors")
    former = {name.replace("norm.weight", "norm.gain"): tensor for name, tensor in weights.items()}
    assert former.keys() != weights.keys()
    save_file(former, folder / "model.safetensors")
    about = as_before(json.loads((folder / "model.json").read_text()))
    (folder / "model.json").write_text(json.dumps(about))
    training = torch.load(folder / "training.pt", weights_only=True)
    torch.save(as_before(training), folder / "training.pt")
    files = json.loads((folder / "manifest.json").read_text())["files"]
    manifest = {"format": 1, "files": {name: checkpoint._facts(folder / name) for name in files}}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    config = as_before(yaml.safe_load((run / "config.yaml").read_text()))
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    rows = [as_before(json.loads(line)) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_a_run_of_format_1_resumes_bit_for_bit(run, optimizer):
    options = [f"optimizer={optimizer}", "attention=math", "kernels=false", "compile=false", "model.qk_norm=true"]
    whole = run("whole", *options)
    parts = run("parts", *options, "stop_after=3")
    make_older(parts)
    assert best(read_rows(parts / "metrics.jsonl"))["val_bpb"] > 0
    assert checkpoint.val_loss(checkpoint.find(parts)) < 99
    run("parts", *options, "resume=auto")
    new = read_rows(parts / "metrics.jsonl")
    (parts / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in new))
    assert equal(whole, parts)


def test_a_resumed_run_keeps_settings_under_former_names(tmp_path):
    own = {"eval_tokens": 512, "attention": "math", "optimizer": {"grad_clip": 0.5, "lr_norm": 0.25}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(as_before(own)))
    assert "evaluation_tokens: 512" in (tmp_path / "config.yaml").read_text()
    with initialize_config_dir(str(REPOSITORY / "conf"), version_base="1.3"):
        composed = compose("train", overrides=["resume=auto"])
    cfg = parse(resumed.with_its_own(composed, ["resume=auto"], tmp_path, Train), Train)
    assert (cfg.eval_tokens, cfg.attention, cfg.optimizer.grad_clip, cfg.optimizer.lr_norm) == (512, "math", 0.5, 0.25)


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("+evaluation_tokens=5", "unknown setting evaluation_tokens: it is called eval_tokens now"),
        ("+optimizer.clip=5", "unknown setting optimizer.clip: it is called optimizer.grad_clip now"),
        ("attention=written", r"got written \(it is called math now\)"),
    ],
)
def test_the_error_for_a_former_name_gives_the_present_one(settings, word, hint):
    with pytest.raises(ValueError, match=hint):
        settings(word)
