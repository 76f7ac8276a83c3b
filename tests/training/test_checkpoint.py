import json
import os
import shutil
import signal
import threading

import pytest
import torch

from data.tokenizer import ByteTokenizer, load_tokenizer
from training import checkpoint


def memory():
    """What training remembers, with an optimizer that remembers nothing yet."""
    config = {"optimizer": {"name": "adamw"}}
    rng = [{"cpu": torch.get_rng_state(), "cuda": []}]
    return {
        "optimizer": {"state": {}, "param_groups": []},
        **{"scaler": {}, "rng": rng, "samples": [], "guard": {}, "choices": {}, "corpus": "none", "config": config},
        "wandb_id": None,
    }


def save(folder, model, step, training=None, **about):
    weights, arguments = checkpoint.snapshot(model)
    about = {"step": step, "seq_len": 8, "precision": "fp32", **arguments, **about}
    checkpoint.save(folder, weights, ByteTokenizer().save, about, training or memory())


@pytest.fixture
def saved(small, tmp_path):
    """A run folder with the checkpoints of two steps, and the model of the second."""

    def save_step(step, model):
        folder = tmp_path / "run" / "checkpoints" / f"step_{step:08}"
        save(folder, model, step, memory() | {"corpus": f"of step {step}"})
        return folder

    model = small(257, tied=True).float()
    save_step(10, small(257, tied=True).float())
    return save_step(20, model).parent.parent, model


def test_what_was_saved_comes_back(saved):
    run, model = saved
    again = checkpoint.load_model(run)
    tokens = torch.randint(257, (1, 9))
    assert torch.equal(again(tokens), model(tokens))
    assert again.head.weight is again.embedding.weight
    assert not again.training
    folder = checkpoint.find(run, for_training=True)
    assert folder.name == "step_00000020"
    assert checkpoint.load_training(folder)["corpus"] == "of step 20"
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


@pytest.mark.parametrize("moment", ["flush", "rename", "_write_json", "save_file"])
def test_a_save_that_fails_leaves_nothing_behind(saved, small, monkeypatch, moment):
    run, _ = saved
    before = sorted(run.rglob("*"))

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(checkpoint, moment, fail)
    with pytest.raises(OSError, match="disk full"):
        save(run / "checkpoints" / "step_00000030", small(), 30)
    assert sorted(run.rglob("*")) == before


def test_the_same_step_may_be_saved_again(saved, small):
    run, _ = saved
    before, other = sorted(run.rglob("*")), small(257, tied=True).float()
    save(run / "checkpoints" / "step_00000020", other, 20)
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
    with pytest.raises(ValueError, match="training.pt holds more than numbers and is not opened"):
        checkpoint.load_training(folder)
    assert not (tmp_path / "evil").exists()


# --- a process that dies while it saves ---


def dying(monkeypatch, point: int):
    """Every flush and rename becomes two points, before it and after it; at the `point`-th the process is killed."""
    passed = []

    def pass_point():
        passed.append(1)
        if len(passed) == point:
            os.kill(os.getpid(), signal.SIGKILL)

    for name in ("flush", "rename"):
        real = getattr(checkpoint, name)

        def wrapped(*arguments, real=real):
            pass_point()
            real(*arguments)
            pass_point()

        monkeypatch.setattr(checkpoint, name, wrapped)
    return passed


@pytest.mark.parametrize("what", ["a new step", "the same step", "pruning"])
def test_a_kill_at_any_moment_of_a_save_leaves_a_valid_checkpoint(small, tmp_path, monkeypatch, what):
    """And the next process cleans up what is left, and saves as if nothing had been."""
    models = [small(257).float() for _ in range(3)]
    run, point = tmp_path / "run", 0
    while True:
        point += 1
        shutil.rmtree(run, ignore_errors=True)
        for step in (1, 2):
            save(checkpoint.step_folder(run, step), models[step - 1], step, validation_loss=float(step))
        if (child := os.fork()) == 0:
            with monkeypatch.context() as patch:
                dying(patch, point)
                new = 2 if what == "the same step" else 3
                save(checkpoint.step_folder(run, new), models[2], new, validation_loss=3.0)
                if what == "pruning":
                    checkpoint.prune(run, keep=1)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code in (0, -signal.SIGKILL)
        said = []
        found = checkpoint.find(run, for_training=True, warn=said.append)
        assert said == []
        weights = checkpoint.load_file(found / "model.safetensors")
        expected = [checkpoint.snapshot(model)[0] for model in models]
        assert any(all(torch.equal(weights[n], one[n]) for n in weights) for one in expected)
        with checkpoint.taken(run):
            save(checkpoint.step_folder(run, 4), models[0], 4)
            checkpoint.prune(run, keep=1)
        assert checkpoint.find(run).name == "step_00000004"
        left = {path.name for path in (run / "checkpoints").iterdir()} - {".lock"}
        assert left == {"step_00000004", "step_00000001"}  # the newest and the best
        if code == 0:
            break
    assert point > {"a new step": 15, "the same step": 17, "pruning": 18}[what]
    print(f"{what}: survived {point - 1} points")


def test_the_last_valid_checkpoint_is_never_pruned(saved):
    run, _ = saved
    flip(run / "checkpoints" / "step_00000020" / "model.safetensors")
    with pytest.raises(ValueError, match="damaged"):
        checkpoint.prune(run, keep=1)
    assert checkpoint.find(run, warn=lambda text: None).name == "step_00000010"


def test_saving_goes_on_while_training_does(small, tmp_path, monkeypatch):
    """The second save waits for the first, and the end for both; what is saved is what was there when it was asked."""
    gate, model, said = threading.Event(), small(257).float(), []
    real = checkpoint.save_file
    monkeypatch.setattr(checkpoint, "save_file", lambda *arguments: (gate.wait(), real(*arguments)))
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    with checkpoint.Saver(tmp_path / "run", None, said.append) as saver:
        weights, arguments = checkpoint.snapshot(model)
        about = {"step": 1, "seq_len": 8, "precision": "fp32", **arguments}
        saver.save(1, weights, ByteTokenizer().save, about, {})
        torch.nn.init.zeros_(model.head.weight)
        assert checkpoint.steps(tmp_path / "run") == []
        gate.set()
        saver.save(2, weights, ByteTokenizer().save, about | {"step": 2}, {})
        assert [path.name for path in checkpoint.steps(tmp_path / "run")][-1] == "step_00000001"
    assert len(checkpoint.steps(tmp_path / "run")) == 2 and said == []
    again = checkpoint.load_model(tmp_path / "run").state_dict()
    assert all(torch.equal(again[name], before[name]) for name in before)
