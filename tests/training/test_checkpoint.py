import errno
import json
import os
import shutil
import signal
import threading

import pytest
import safetensors.torch
import torch

from data.tokenizer import ByteTokenizer, load_tokenizer
from training import checkpoint, checkpoints


def memory():
    """The content of training.pt, with an optimizer that has no state yet."""
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
    """A run folder with the checkpoints of two steps, and the model of the second one."""

    def save_step(step, model):
        folder = tmp_path / "run" / "checkpoints" / f"step_{step:08}"
        save(folder, model, step, memory() | {"corpus": f"of step {step}"})
        return folder

    model = small(257, tied=True).float()
    save_step(10, small(257, tied=True).float())
    return save_step(20, model).parent.parent, model


def test_what_was_saved_is_loaded(saved):
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


def test_a_checkpoint_can_be_moved_and_sampled_without_training_pt(saved, tmp_path):
    run, model = saved
    moved = tmp_path / "elsewhere"
    os.rename(run / "checkpoints" / "step_00000020", moved)
    os.remove(moved / "training.pt")
    tokens = torch.randint(257, (1, 9))
    assert torch.equal(checkpoint.load_model(moved)(tokens), model(tokens))
    with pytest.raises(ValueError, match=r"training.pt is missing"):
        checkpoint.find(moved, for_training=True)


def test_a_model_can_be_loaded_with_a_longer_max_seq_len(saved):
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
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "empty": lambda path: os.truncate(path, 0),
    "missing": os.remove,
}


FILES = ["model.safetensors", "model.json", "tokenizer/vocabulary.json", "training.pt"]


@pytest.mark.parametrize(
    ("name", "damage"),
    # if the manifest can be read, a flipped bit in it looks like damage to the file whose entry it changed
    [
        *((name, damage) for name in FILES for damage in DAMAGE),
        *(("manifest.json", d) for d in ("truncated", "empty", "missing")),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_previous_one_is_used(saved, name, damage):
    run, _ = saved
    DAMAGE[damage](run / "checkpoints" / "step_00000020" / name)
    warnings = []
    assert checkpoint.find(run, for_training=True, warn=warnings.append).name == "step_00000010"
    assert len(warnings) == 1 and "step_00000020" in warnings[0] and name in warnings[0]


def test_a_manifest_with_a_wrong_key_is_damaged(saved):
    run, _ = saved
    manifest = run / "checkpoints" / "step_00000020" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"size"', '"rize"', 1))
    assert checkpoint.find(run, warn=lambda text: None).name == "step_00000010"


def test_an_error_says_when_every_checkpoint_is_damaged(saved):
    run, _ = saved
    for folder in checkpoint.steps(run):
        flip(folder / "model.safetensors")
    with pytest.raises(ValueError, match="2 there, none valid"):
        checkpoint.load_model(run)


@pytest.fixture
def several(small, tmp_path):
    """A run folder whose last checkpoint is not the best, and whose third has no validation loss."""
    for step, metrics in {
        10: {"val_loss": 2.0},
        20: {"val_loss": 1.0},
        30: {},
        40: {"val_loss": 0.5, "compared_loss": 3.0},  # on another part of the text than the others
    }.items():
        model = small(257, tied=True).float()
        save(tmp_path / "run" / "checkpoints" / f"step_{step:08}", model, step, **metrics)
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("which", "name"),
    [("", "40"), (":best", "20"), (":10", "10"), (":00000030", "30"), ("/checkpoints/step_00000010", "10")],
)
def test_a_checkpoint_is_named_by_run_and_step_or_best_or_path(several, which, name):
    assert checkpoint.find(f"{several}{which}", for_training=True).name == f"step_000000{name}"
    assert checkpoint.load_model(f"{several}{which}").max_seq_len == 32
    assert checkpoint.describe_best(several).endswith(
        "run:best is step 20, validation loss 1.0000; the last, 3.0000, is clearly worse"
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_best_is_named_and_the_best_of_the_others_is_used(several, name, damage):
    DAMAGE[damage](several / "checkpoints" / "step_00000020" / name)
    warnings = []
    assert checkpoint.find(f"{several}:best", for_training=True, warn=warnings.append).name == "step_00000010"
    assert "step_00000020" in warnings[0] and name in warnings[0]
    assert name == "model.json" or warnings[1:] == [
        f"using the best of the others, {several}/checkpoints/step_00000010"
    ]


def test_a_missing_or_damaged_step_is_not_replaced_by_another(several):
    with pytest.raises(ValueError, match="run has no checkpoint of step 15: there are 10, 20, 30, 40"):
        checkpoint.find(f"{several}:15")
    flip(several / "checkpoints" / "step_00000010" / "model.safetensors")
    with pytest.raises(ValueError, match="step_00000010/model.safetensors is damaged"):
        checkpoint.find(f"{several}:10")
    with pytest.raises(ValueError, match="step_00000020 is one checkpoint"):
        checkpoint.find(f"{several}/checkpoints/step_00000020:best")
    for step in (10, 20, 40):
        checkpoint.shutil.rmtree(several / "checkpoints" / f"step_000000{step}")
    with pytest.raises(ValueError, match="no checkpoint of .*run has a validation loss: give .*run:STEP, there are 30"):
        checkpoint.find(f"{several}:best")
    several.rename(several.with_name("a:best"))
    assert checkpoint.find(several.with_name("a:best")).name == "step_00000030"


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


def test_leftovers_of_a_killed_save_are_not_checkpoints(saved):
    run, _ = saved
    os.rename(run / "checkpoints" / "step_00000020", run / "checkpoints" / ".step_00000020.abcd1234")
    assert checkpoint.find(run).name == "step_00000010"


def test_another_format_and_another_model_are_refused(saved, small):
    run, _ = saved
    folder = checkpoint.find(run)
    with pytest.raises(ValueError, match="holds another model"):
        checkpoint.load_weights(folder, small(99, tied=True))
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"format": 3}))
    with pytest.raises(ValueError, match="format 3, this version reads formats up to 2"):
        checkpoint.load_model(folder)


def test_a_pickle_that_runs_code_is_refused_and_not_run(saved, tmp_path):
    run, _ = saved
    folder = checkpoint.find(run)

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "evil"),)

    torch.save({"optimizer": Evil()}, folder / "training.pt")
    with pytest.raises(ValueError, match="training.pt holds more than plain types and tensors and is not opened"):
        checkpoint.load_training(folder)
    assert not (tmp_path / "evil").exists()


# --- a process that dies while it saves ---


def dying(monkeypatch, point: int):
    """Kills the process at the `point`-th point; one is before and one after every flush and rename."""
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


@pytest.mark.slow
@pytest.mark.parametrize("what", ["a new step", "the same step", "pruning"])
def test_a_kill_at_any_moment_of_a_save_leaves_a_valid_checkpoint(small, tmp_path, monkeypatch, what):
    """The next process removes the leftovers and saves as usual."""
    models = [small(257).float() for _ in range(3)]
    run, point = tmp_path / "run", 0
    while True:
        point += 1
        shutil.rmtree(run, ignore_errors=True)
        for step in (1, 2):
            save(checkpoint.step_folder(run, step), models[step - 1], step, val_loss=float(step))
        if (child := os.fork()) == 0:
            with monkeypatch.context() as patch:
                dying(patch, point)
                new = 2 if what == "the same step" else 3
                save(checkpoint.step_folder(run, new), models[2], new, val_loss=3.0)
                if what == "pruning":
                    checkpoints.prune(run, keep=1)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code in (0, -signal.SIGKILL)
        warnings = []
        found = checkpoint.find(run, for_training=True, warn=warnings.append)
        assert warnings == []
        weights = checkpoint.load_file(found / "model.safetensors")
        expected = [checkpoint.snapshot(model)[0] for model in models]
        assert any(all(torch.equal(weights[n], one[n]) for n in weights) for one in expected)
        with checkpoints.run_lock(run):
            save(checkpoint.step_folder(run, 4), models[0], 4)
            checkpoints.prune(run, keep=1)
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
        checkpoints.prune(run, keep=1)
    assert checkpoint.find(run, warn=lambda text: None).name == "step_00000010"


def test_saving_runs_in_the_background_of_training(small, tmp_path, monkeypatch):
    """The second save waits for the first, and the end for both; weights are saved as they were at the call."""
    gate, model, warnings = threading.Event(), small(257).float(), []
    real = checkpoint.save_file
    monkeypatch.setattr(checkpoint, "save_file", lambda *arguments: (gate.wait(), real(*arguments)))
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    with checkpoints.BackgroundSaver(tmp_path / "run", None, warnings.append) as saver:
        weights, arguments = checkpoint.snapshot(model)
        about = {"step": 1, "seq_len": 8, "precision": "fp32", **arguments}
        saver.save(1, weights, ByteTokenizer().save, about, {})
        torch.nn.init.zeros_(model.head.weight)
        assert checkpoint.steps(tmp_path / "run") == []
        gate.set()
        saver.save(2, weights, ByteTokenizer().save, about | {"step": 2}, {})
        assert [path.name for path in checkpoint.steps(tmp_path / "run")][-1] == "step_00000001"
    assert len(checkpoint.steps(tmp_path / "run")) == 2 and warnings == []
    again = checkpoint.load_model(tmp_path / "run").state_dict()
    assert all(torch.equal(again[name], before[name]) for name in before)


# --- intact files with wrong content, by a stranger or by a faulty program ---


def put(folder, name, content):
    """Replaces a file of a checkpoint, and its entry in the manifest."""
    (folder / name).write_bytes(content)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][name] = checkpoint._facts(folder / name)
    (folder / "manifest.json").write_text(json.dumps(manifest))


def put_about(folder, change):
    about = json.loads((folder / "model.json").read_text())
    put(folder, "model.json", json.dumps(change(about)).encode())


def put_training(folder, saved):
    torch.save(saved, folder / "other.pt")
    content = (folder / "other.pt").read_bytes()
    os.remove(folder / "other.pt")
    put(folder, "training.pt", content)


def without(values, *names):
    return {name: value for name, value in values.items() if name not in names}


def with_arguments(**changes):
    return lambda about: about | {"arguments": about["arguments"] | changes}


ABOUTS = {
    "a list": (lambda about: [about], "it should be an object, got"),
    "nothing in it": (lambda about: {}, "arguments is missing"),
    "no step": (lambda about: without(about, "step"), "step is missing"),
    "a step as a string": (lambda about: about | {"step": "ten"}, "step should be a valid integer, got 'ten'"),
    "a step before the first": (lambda about: about | {"step": -1}, "step should be greater than or equal to 0"),
    "an unknown precision": (lambda about: about | {"precision": "fp17"}, "precision should be 'fp32', 'bf16' or"),
    "no arguments": (lambda about: about | {"arguments": None}, "arguments should be an object, got None"),
    "too few arguments": (lambda about: about | {"arguments": {}}, r"arguments\.vocab_size is missing"),
    "an unknown argument": (
        with_arguments(experts=8),
        "from another version: .* no argument 'experts'",
    ),
    "a width as a string": (with_arguments(d_model="16"), r"arguments\.d_model should be a valid integer, got '16'"),
    "a width of true": (with_arguments(d_model=True), r"arguments\.d_model should be a valid integer, got True"),
    "no heads": (with_arguments(n_heads=0), r"arguments\.n_heads should be greater than or equal to 1"),
    "a base of NaN": (with_arguments(theta=float("nan")), r"arguments\.theta should be a finite number"),
    "a base with 1000 digits": (with_arguments(theta=10**1000), r"arguments\.theta should be a finite number"),
    "a base below 1": (with_arguments(theta=0.5), "holds another model: theta must be above 1"),
    "an unknown scheme": (with_arguments(positions="clock"), "holds another model: positions must be one of"),
    "another width": (
        with_arguments(d_model=32),
        r"another model: embedding\.weight is .*, the model's is \(257, 32\)",
    ),
    "same size, other shapes": (with_arguments(feed_forward="gelu", d_ff=36), r"blocks\.0\.feed_forward\.up\.w.* is"),
    "a huge width": (
        with_arguments(d_model=60000),
        "holds another model: d_model is 60000, but the weights allow at most",
    ),
    "a billion blocks": (
        with_arguments(n_layers=10**9),
        "another model: n_layers is 1000000000, but the weights allow at most",
    ),
    "a width beyond 64 bits": (with_arguments(d_model=10**30), r"arguments\.d_model should be less than"),
    "a huge max_seq_len": (with_arguments(max_seq_len=10**14), r"needs [\d,.]+ GiB of memory, this machine has"),
    "a huge d_ff": (with_arguments(d_ff=2**62), "holds another model: "),
    "a billion heads": (with_arguments(n_heads=10**9, n_kv_heads=10**9, positions="alibi"), "holds another model"),
}


@pytest.mark.slow
@pytest.mark.parametrize("wrong", ABOUTS)
def test_wrong_values_in_model_json_are_refused(saved, wrong):
    run, _ = saved
    folder = checkpoint.find(run)
    change, message = ABOUTS[wrong]
    put_about(folder, change)
    with pytest.raises(ValueError, match=message) as caught:
        checkpoint.load_model(run)
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "content", ['{"format": 1, "files": null}', "[]", "5", "{}", '{"format": "1", "files": {}}', "[" * 100_000]
)
def test_a_manifest_of_another_shape_is_damaged(saved, content):
    folder = checkpoint.find(saved[0])
    (folder / "manifest.json").write_text(content)
    with pytest.raises(ValueError, match=r"manifest\.json is damaged: "):
        checkpoint.load_model(folder)


def tensors(**changes):
    """A function that serialises the weights with these changes; None removes a weight."""
    return lambda weights: safetensors.torch.save(
        {name: weight for name, weight in (weights | changes).items() if weight is not None}
    )


WEIGHTS = {
    "empty": (lambda weights: b"", "model.safetensors cannot be read"),
    "a header beyond the file": (lambda weights: b"\xff" * 64, "model.safetensors cannot be read"),
    "a header that is no JSON": (lambda weights: (8).to_bytes(8, "little") + b"[[[[[[[[", "cannot be read"),
    "a header that claims too much": (
        lambda weights: safetensors.torch.save(weights).replace(b'"shape":[16,16]', b'"shape":[16,61]'),
        "model.safetensors cannot be read",
    ),
    "one missing": (tensors(**{"norm.weight": None}), r"holds another model: norm\.weight is missing"),
    "one under another name": (
        lambda weights: safetensors.torch.save(without(weights, "norm.weight") | {"gain": weights["norm.weight"]}),
        r"holds another model: norm\.weight is missing, the model's is \(16,\)",
    ),
    "one too many": (tensors(more=torch.zeros(0)), r"more is \(0,\), the model has none"),
    "one transposed": (
        lambda weights: safetensors.torch.save(
            weights | {"blocks.0.feed_forward.up.weight": weights["blocks.0.feed_forward.up.weight"].T.contiguous()}
        ),
        r"feed_forward\.up\.weight is \(16, 24\), the model's is \(24, 16\)",
    ),
    "integers": (
        tensors(**{"norm.weight": torch.ones(16, dtype=torch.int32)}),
        r"norm\.weight holds I32, no weights",
    ),
    "NaN": (
        tensors(**{"norm.weight": torch.full((16,), torch.nan)}),
        r"norm\.weight holds numbers that are not f",
    ),
    "infinite": (
        tensors(**{"norm.weight": torch.full((16,), torch.inf)}),
        r"norm\.weight holds numbers that are not finite",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("wrong", WEIGHTS)
def test_weights_that_do_not_fit_the_model_are_named(saved, wrong):
    run, _ = saved
    folder = checkpoint.find(run)
    content, message = WEIGHTS[wrong]
    put(folder, "model.safetensors", content(checkpoint.load_file(folder / "model.safetensors")))
    with pytest.raises(ValueError, match=message) as caught:
        checkpoint.load_model(run)
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value)


def test_a_model_is_compared_with_its_weights_before_it_is_built(saved, monkeypatch):
    """Otherwise a crafted model.json could claim any amount of memory."""
    run, _ = saved
    put_about(checkpoint.find(run), with_arguments(d_model=48))
    monkeypatch.setattr(checkpoint, "GPT", lambda **_: pytest.fail("it was built"))
    with pytest.raises(ValueError, match="holds another model"):
        checkpoint.load_model(run)


TRAININGS = {
    "a list": ([1, 2], "it should be a valid dictionary, got"),
    "a tensor": (torch.ones(2), "it should be a valid dictionary, got"),
    "another dict": ({"epoch": 3}, "optimizer is missing"),
    "no optimizer": (without(memory(), "optimizer"), "optimizer is missing"),
    "an optimizer of another kind": (memory() | {"optimizer": {"state": []}}, r"optimizer\.state should be"),
    "no random state": (memory() | {"rng": [{"cpu": [1, 2], "cuda": []}]}, r"rng\.0\.cpu should be an instance"),
    "settings of another kind": (memory() | {"config": [1]}, "config should be a valid dictionary, got"),
    "settings without an optimizer": (memory() | {"config": {}}, r"config\.optimizer is missing"),
    "samples of another kind": (memory() | {"samples": [5]}, r"samples\.0 should be a valid dictionary, got 5"),
    "a guard of another kind": (memory() | {"guard": {"waited": "long"}}, r"guard\.waited should be a valid integer"),
    "losses of another kind": (memory() | {"guard": {"losses": 3.0}}, r"guard\.losses should be a valid list"),
    "a choice of another kind": (memory() | {"choices": {"micro_batch": [8]}}, r"choices\.micro_batch should be"),
}


@pytest.mark.slow
@pytest.mark.parametrize("wrong", TRAININGS)
def test_wrong_values_in_training_pt_are_refused(saved, wrong):
    folder = checkpoint.find(saved[0])
    content, message = TRAININGS[wrong]
    put_training(folder, content)
    with pytest.raises(ValueError, match=message) as caught:
        checkpoint.load_training(folder)
    assert str(folder / "training.pt") in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 no archive", b"\x80\x02K\x05.", b"\x80\x02}q\x00."], ids=repr)
def test_an_unreadable_training_pt_is_refused_in_one_line(saved, content):
    folder = checkpoint.find(saved[0])
    put(folder, "training.pt", content)
    with pytest.raises(ValueError, match=r"training\.pt ") as caught:
        checkpoint.load_training(folder)
    assert "\n" not in str(caught.value)


# --- symbolic links, whose targets belong to someone else ---


@pytest.fixture
def linked(saved, tmp_path):
    """A run whose step folders are links to those of another run, and that run."""
    run, other = tmp_path / "fork", saved[0]
    (run / "checkpoints").mkdir(parents=True)
    for folder in checkpoint.steps(other):
        (run / "checkpoints" / folder.name).symlink_to(folder)
    return run, other


def count_valid(run):
    folders = checkpoint.steps(run)
    for folder in folders:
        checkpoint.check(folder)
    return len(folders)


def test_pruning_removes_a_link_but_not_its_target(linked, small):
    run, other = linked
    save(checkpoint.step_folder(run, 30), small(257, tied=True).float(), 30)
    checkpoints.prune(run, keep=1)
    assert [folder.name for folder in checkpoint.steps(run)] == ["step_00000030"]
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step_00000030"]
    assert count_valid(other) == 2


@pytest.mark.parametrize("target", ["there", "gone"])
def test_saving_a_step_again_replaces_its_link(linked, small, target):
    run, other = linked
    if target == "gone":
        os.rename(other, other.with_name("moved"))
        other = other.with_name("moved")
    model = small(257, tied=True).float()
    save(checkpoint.step_folder(run, 20), model, 20)
    assert not checkpoint.step_folder(run, 20).is_symlink()
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step_00000010", "step_00000020"]
    tokens = torch.randint(257, (1, 9))
    assert torch.equal(checkpoint.load_model(run)(tokens), model(tokens))
    assert count_valid(other) == 2


def test_leftover_links_and_files_are_cleaned_up(linked):
    run, other = linked
    (run / "checkpoints" / ".step_00000020.abcd.old").symlink_to(checkpoint.step_folder(other, 20))
    (run / "checkpoints" / ".step_00000030.abcd").write_text("a file")
    with checkpoints.run_lock(run):
        pass
    assert {path.name for path in (run / "checkpoints").iterdir()} <= {"step_00000010", "step_00000020", ".lock"}
    assert count_valid(other) == 2


def test_retiring_a_step_renames_its_link(linked):
    run, other = linked
    checkpoints.retire_after(run, 10)
    assert [folder.name for folder in checkpoint.steps(run)] == ["step_00000010"]
    assert count_valid(other) == 2


def test_a_linked_checkpoints_folder_stays_linked_and_is_left_clean(tmp_path):
    disk, run = tmp_path / "disk", tmp_path / "run"
    disk.mkdir(), run.mkdir()
    (run / "checkpoints").symlink_to(disk)
    with checkpoints.run_lock(run):
        assert (disk / ".lock").exists()
    assert list(disk.iterdir()) == []


def test_a_signal_while_a_run_starts_leaves_no_lock(tmp_path, monkeypatch):
    def terminated(descriptor):
        raise SystemExit(143)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", terminated)
        with pytest.raises(SystemExit), checkpoints.run_lock(tmp_path / "run"):
            pass
    assert not (tmp_path / "run").exists()
    with checkpoints.run_lock(tmp_path / "run"):  # it is free
        pass


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(errno.EFBIG, "File too large"), "is full"),
        (RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 91968 vs 9186"), "is full"),
        (RuntimeError("no such thing"), "no such thing"),
    ],
)
def test_a_full_disk_is_reported_as_such(tmp_path, monkeypatch, error, message):
    def fail(*_):
        raise error

    warnings = []
    monkeypatch.setattr(checkpoint, "save", fail)
    with checkpoints.BackgroundSaver(tmp_path, None, warnings.append) as saver:
        saver.save(1)
    assert len(warnings) == 1 and message in warnings[0]
    assert ("bytes are free" in warnings[0]) == (message == "is full")
