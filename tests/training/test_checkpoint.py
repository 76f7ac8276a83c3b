import json
import os
import pickle

import pytest
import torch

from data.tokenizer import ByteTokenizer, load_tokenizer
from training import checkpoint


@pytest.fixture
def saved(small, tmp_path):
    """A run folder with the checkpoints of two steps, and the model of the second."""

    def save(step, model):
        folder = tmp_path / "run" / "checkpoints" / f"step_{step:08}"
        checkpoint.save(
            folder, model, ByteTokenizer().save, {"step": step, "seq_len": 8}, {"optimizer": {"step": step}}
        )
        return folder

    model = small(257, tied=True).float()
    save(10, small(257, tied=True).float())
    return save(20, model).parent.parent, model


def test_what_was_saved_comes_back(saved):
    run, model = saved
    again = checkpoint.load_model(run)
    tokens = torch.randint(257, (1, 9))
    assert torch.equal(again(tokens), model(tokens))
    assert again.head.weight is again.embedding.weight
    assert not again.training
    folder = checkpoint.find(run, for_training=True)
    assert folder.name == "step_00000020"
    assert checkpoint.load_training(folder) == {"optimizer": {"step": 20}}
    assert load_tokenizer(folder / "tokenizer").vocab_size == 257


def test_a_checkpoint_may_move_and_lose_what_sampling_does_not_need(saved, tmp_path):
    run, model = saved
    moved = tmp_path / "elsewhere"
    os.rename(run / "checkpoints" / "step_00000020", moved)
    os.remove(moved / "training.pt")
    tokens = torch.randint(257, (1, 9))
    assert torch.equal(checkpoint.load_model(moved)(tokens), model(tokens))
    with pytest.raises(ValueError, match=r"training.pt is missing"):
        checkpoint.find(moved, for_training=True)


def test_a_model_may_be_loaded_to_reach_further(saved):
    run, model = saved
    tokens = torch.randint(257, (1, 100))
    with pytest.raises(ValueError, match="max_seq_len 32"):
        checkpoint.load_model(run)(tokens)
    further = checkpoint.load_model(run, max_seq_len=128, rope_scaling="interpolation", rope_factor=4.0)
    assert further(tokens).shape == (1, 100, 257)
    squeezed = further(tokens[:, :20], 4 * torch.arange(20))
    torch.testing.assert_close(squeezed, model(tokens[:, :20]))
    with pytest.raises(ValueError, match="another model"):
        checkpoint.load_model(run, d_model=32)


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGE = {
    "a flipped bit": flip,
    "half": lambda path: os.truncate(path, path.stat().st_size // 2),
    "nothing": lambda path: os.truncate(path, 0),
    "gone": os.remove,
}


FILES = ["model.safetensors", "model.json", "tokenizer/vocabulary.json", "training.pt"]


@pytest.mark.parametrize(
    ("name", "damage"),
    # a flipped bit in a manifest is found in the file whose sum it changed, if it can be read at all
    [
        *((name, damage) for name in FILES for damage in DAMAGE),
        *(("manifest.json", d) for d in ("half", "nothing", "gone")),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(saved, name, damage):
    run, _ = saved
    DAMAGE[damage](run / "checkpoints" / "step_00000020" / name)
    said = []
    assert checkpoint.find(run, for_training=True, warn=said.append).name == "step_00000010"
    assert len(said) == 1 and "step_00000020" in said[0] and name in said[0]


def test_a_manifest_with_a_wrong_key_is_a_damaged_one(saved):
    run, _ = saved
    manifest = run / "checkpoints" / "step_00000020" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"size"', '"rize"', 1))
    assert checkpoint.find(run, warn=lambda text: None).name == "step_00000010"


def test_when_all_are_damaged_it_says_so(saved):
    run, _ = saved
    for folder in checkpoint.steps(run):
        flip(folder / "model.safetensors")
    with pytest.raises(ValueError, match="2 there, none valid"):
        checkpoint.load_model(run)


@pytest.mark.parametrize("moment", ["_flush", "_write_json", "_save_weights"])
def test_a_save_that_fails_leaves_nothing_behind(saved, small, monkeypatch, moment):
    run, _ = saved
    before = sorted(run.rglob("*"))

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(checkpoint, moment, fail)
    with pytest.raises(OSError, match="disk full"):
        checkpoint.save(run / "checkpoints" / "step_00000030", small(), ByteTokenizer().save, {"step": 30}, {})
    assert sorted(run.rglob("*")) == before


def test_the_same_step_may_be_saved_again(saved, small):
    run, _ = saved
    before, other = sorted(run.rglob("*")), small(257, tied=True).float()
    checkpoint.save(run / "checkpoints" / "step_00000020", other, ByteTokenizer().save, {"step": 20}, {})
    assert sorted(run.rglob("*")) == before
    tokens = torch.randint(257, (1, 9))
    assert torch.equal(checkpoint.load_model(run)(tokens), other(tokens))


def test_leftovers_of_a_killed_save_are_no_checkpoints(saved):
    run, _ = saved
    os.rename(run / "checkpoints" / "step_00000020", run / "checkpoints" / ".step_00000020.abcd1234")
    assert checkpoint.find(run).name == "step_00000010"


def test_another_format_and_another_model_are_refused(saved, small):
    run, _ = saved
    folder = checkpoint.find(run)
    with pytest.raises(ValueError, match="holds another model"):
        checkpoint.load_weights(folder, small(99, tied=True))
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"format": 2}))
    with pytest.raises(ValueError, match="format 2, this version reads 1"):
        checkpoint.load_model(folder)


def test_a_pickle_that_runs_code_is_refused_and_not_run(saved, tmp_path):
    run, _ = saved
    folder = checkpoint.find(run)

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "evil"),)

    torch.save({"optimizer": Evil()}, folder / "training.pt")
    with pytest.raises(pickle.UnpicklingError):
        checkpoint.load_training(folder)
    assert not (tmp_path / "evil").exists()
