"""Two ranks on a CPU, by gloo; most tests read the results of one launch of on_two_ranks.py, without torchrun."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from commands import command
from composed import settings
from filelock import FileLock

import train
from conf.entry import REPOSITORY
from training import auto, checkpoint
from training.gradients import compute_gradients

pytestmark = pytest.mark.slow

SMALL = [
    "experiment=smoke",
    "precision=fp32",
    "compile=false",
    "batch_tokens=256",
    "micro_batch=2",  # of 8 rows
    "steps=6",
    "every.log=1",
    "every.evaluate=3",
    "every.sample=3",
    "every.checkpoint=2",
    "data.paths=[words.txt]",
    "data.validation=[]",
    "data.separator='\\n'",
    "packing=documents",  # unequal numbers of targets
    "sample.prompt='7 times'",
    "sample.tokens=8",
]
FSDP = ["parallel=fsdp"]
SELDOM = ["every.log=100", "every.evaluate=100", "every.sample=100", "packing=stream"]
RUNS = [
    ("ddp", []),
    ("fsdp", [*FSDP, "activation_checkpointing=true"]),
    ("dropout", ["model.dropout=0.1"]),
    ("dropout_parts", ["model.dropout=0.1", "stop_after=3"]),
    ("dropout_parts", ["model.dropout=0.1", "resume=auto"]),
    ("one_then_ddp", ["resume=auto"]),
    ("one_then_fsdp", ["resume=auto", *FSDP]),
    ("ddp_then_fsdp", ["stop_after=3"]),
    ("ddp_then_fsdp", ["resume=auto", *FSDP]),
    ("fsdp_then_one", ["stop_after=3", *FSDP]),
    ("ddp_then_one", ["stop_after=3"]),
    ("without", ["skip_batches=[4]"]),
    ("rollback_ddp", ["on_spike=rollback", "spike_window=2", "spike_sigmas=50"]),
    ("rollback_fsdp", ["on_spike=rollback", "spike_window=2", "spike_sigmas=50", *FSDP]),
    ("bf16_ddp", ["precision=bf16"]),
    ("bf16_fsdp", ["precision=bf16", "activation_checkpointing=true", *FSDP]),
    ("patience", ["steps=null", "epochs=2", "patience=1", "every.evaluate=1", "optimizer=adamw", "optimizer.lr=1e-30"]),
    ("steady_ddp", SELDOM),
    ("steady_fsdp", [*SELDOM, *FSDP]),
    ("signal", []),
]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def environment(folder: Path) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "HOME": str(folder)}


def write_text(folder: Path):
    lines = [f"{i} times {i} is {i * i}." + " And so on." * (i % 4) for i in range(80)]
    (folder / "words.txt").write_text("\n".join(lines))


@pytest.fixture(scope="session")
def launched(tmp_path_factory) -> Path:
    """A folder with the results of two ranks, and of one process before and after them; pytest's workers share it."""
    shared = tmp_path_factory.getbasetemp()
    folder = (shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared) / "ranks"
    with FileLock(f"{folder}.lock"):
        if not (folder / "done").exists():
            shutil.rmtree(folder, ignore_errors=True)  # left by a worker that failed
            folder.mkdir()
            launch(folder)
            (folder / "done").touch()
    return folder


def launch(folder: Path):
    write_text(folder)
    before = Path.cwd()
    os.chdir(folder)
    torch.set_num_threads(1)
    try:
        train.train(settings(*SMALL, "stop_after=3"), folder / "runs" / "one_then_ddp")
        shutil.copytree(folder / "runs" / "one_then_ddp", folder / "runs" / "one_then_fsdp")
        train.train(settings(*SMALL), folder / "runs" / "one")
        train.train(settings(*SMALL, "precision=bf16"), folder / "runs" / "bf16_one")
        (folder / "runs.json").write_text(json.dumps(RUNS))
        script = [str(Path(__file__).with_name("on_two_ranks.py")), str(folder), json.dumps(SMALL)]
        result = command(*script, timeout=280, ranks=2, HOME=str(folder))
        assert result.returncode == 0, result.stderr[-5000:]
        for name in ("fsdp_then_one", "ddp_then_one"):
            train.train(settings(*SMALL, "resume=auto"), folder / "runs" / name)
    finally:
        os.chdir(before)


def rows(run: Path) -> list[dict]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "clock"} for line in lines]


def weights(run: Path) -> dict[str, torch.Tensor]:
    return checkpoint.load_file(checkpoint.find(run, for_training=True) / "model.safetensors")


def assert_close(a: Path, b: Path, spikes: int = 0):
    """Weights and rows agree, except for the number of `spikes` in b."""
    for name, weight in weights(a).items():
        torch.testing.assert_close(weights(b)[name], weight, rtol=1e-4, atol=2e-5)
    assert [row["step"] for row in rows(a)] == [row["step"] for row in rows(b)]
    for one, other in zip(rows(a), rows(b), strict=True):
        assert {**one, "spikes": other["spikes"]} == pytest.approx(other, rel=1e-5)
    assert rows(b)[-1]["spikes"] == spikes


@pytest.mark.parametrize("micro_batch", [1, 2, 4])
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_gradients_do_not_depend_on_the_split(launched, parallel, micro_batch, monkeypatch):
    """Over ranks and micro-batches, with unequal numbers of targets; ddp reduces once, after the last micro-batch."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    from on_two_ranks import CPU, batch, model

    for whole_micro_batch in (8, 1):
        whole, rows = model("fp32"), batch()
        count, scaler = (rows["targets"] != -100).sum().item(), torch.amp.GradScaler("cpu", enabled=False)
        options = {"micro_batch": whole_micro_batch, "count": count, "autocast": auto.autocast(CPU, "fp32")}
        compute_gradients(whole, scaler, rows, **options)
        for rank in (0, 1):
            found = torch.load(launched / f"gradients_{rank}.pt")[f"{parallel} {micro_batch} fp32"]
            for name, parameter in whole.named_parameters():
                torch.testing.assert_close(found["gradients"][name], parameter.grad, rtol=1e-6, atol=1e-6)
            assert parallel == "fsdp" or found["reduced"] == 1


@pytest.mark.parametrize("micro_batch", [1, 2, 4])
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_in_bf16_ranks_round_as_one_process_does(launched, parallel, micro_batch, monkeypatch):
    """With equal micro-batches the gradients differ only by the order of the fp32 sums over them."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    from on_two_ranks import CPU, batch, model

    whole, rows = model("bf16"), batch()
    count, scaler = (rows["targets"] != -100).sum().item(), torch.amp.GradScaler("cpu", enabled=False)
    options = {"micro_batch": micro_batch, "count": count, "autocast": auto.autocast(CPU, "bf16")}
    compute_gradients(whole, scaler, rows, **options)
    for rank in (0, 1):
        found = torch.load(launched / f"gradients_{rank}.pt")[f"{parallel} {micro_batch} bf16"]["gradients"]
        for name, parameter in whole.named_parameters():
            assert found[name].dtype == torch.float32
            assert (found[name] - parameter.grad).norm() <= 1e-5 * parameter.grad.norm(), name


@pytest.mark.parametrize("name", ["bf16_ddp", "bf16_fsdp"])
def test_in_bf16_two_ranks_learn_what_one_process_learns(launched, name):
    """Sums in another order are rounded to other bf16 numbers, and the optimizer amplifies the difference."""
    one, two = rows(launched / "runs" / "bf16_one"), rows(launched / "runs" / name)
    assert [row["loss"] for row in one] != [row["loss"] for row in rows(launched / "runs" / "one")]
    for a, b in zip(one, two, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-3)


@pytest.mark.parametrize("name", ["ddp", "fsdp", "one_then_ddp", "one_then_fsdp", "ddp_then_fsdp"])
def test_two_ranks_train_as_one_process_does_also_when_resuming_it(launched, name):
    assert_close(launched / "runs" / "one", launched / "runs" / name)


@pytest.mark.parametrize("name", ["fsdp_then_one", "ddp_then_one"])
def test_one_process_resumes_what_two_ranks_started(launched, name):
    assert_close(launched / "runs" / "one", launched / "runs" / name)


def test_two_ranks_resume_bit_for_bit_with_dropout(launched):
    whole, parts = launched / "runs" / "dropout", launched / "runs" / "dropout_parts"
    assert rows(whole) == rows(parts)
    assert all(torch.equal(weights(parts)[name], weight) for name, weight in weights(whole).items())
    assert rows(whole) != rows(launched / "runs" / "ddp")


def test_a_checkpoint_of_two_ranks_is_like_any_other(launched):
    """Only rank 0 holds the gathered copies that are saved."""
    gathered = [torch.load(launched / f"gradients_{rank}.pt")["gathered"] for rank in (0, 1)]
    assert gathered == [[torch.ones(1)], [None]]
    a, b = (checkpoint.load_training(checkpoint.find(launched / "runs" / name)) for name in ("one", "fsdp"))
    assert a.keys() == b.keys() and len(b["rng"]) == 2
    for i, state in a["optimizer"]["state"].items():
        for name, value in state.items():
            assert b["optimizer"]["state"][i][name].shape == value.shape
    assert checkpoint.load_model(launched / "runs" / "fsdp").n_parameters() > 0


@pytest.mark.parametrize("name", ["rollback_ddp", "rollback_fsdp"])
def test_ranks_roll_back_together(launched, name):
    assert checkpoint.load_training(checkpoint.find(launched / "runs" / name))["guard"]["skip"] == [4]
    assert_close(launched / "runs" / "without", launched / "runs" / name, spikes=1)


def test_a_signal_to_one_rank_stops_all_after_the_same_step(launched):
    codes = [json.loads((launched / f"codes_{rank}.json").read_text()) for rank in (0, 1)]
    assert codes[0] == codes[1]
    assert codes[0]["signal"] == [128 + signal.SIGTERM, 3, []]
    assert checkpoint.find(launched / "runs" / "signal").name == "step_00000003"


def test_patience_ends_all_ranks_after_the_same_step(launched):
    codes = [json.loads((launched / f"codes_{rank}.json").read_text())["patience"] for rank in (0, 1)]
    assert codes == [[0, 2, []], [0, 2, []]]
    run = launched / "runs" / "patience"
    steps, an_epoch = checkpoint.load_training(checkpoint.find(run))["steps"], 1 / rows(run)[0]["epoch"]
    assert steps - 1 < 2 * an_epoch <= steps


@pytest.mark.parametrize("name", ["steady_ddp", "steady_fsdp"])
def test_no_rank_reads_back_from_its_device_in_a_steady_step(launched, name):
    for rank in (0, 1):
        code, steps, read = json.loads((launched / f"codes_{rank}.json").read_text())[name]
        assert code == 0 and len(read) == steps and not any(read)


def wait_for(condition, seconds: float = 150):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def worker(launcher: int, rank: int) -> int:
    """The process id of a rank."""
    for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        if f"\0RANK={rank}\0".encode() in Path(f"/proc/{child}/environ").read_bytes():
            return int(child)
    raise AssertionError(f"rank {rank} is not there")


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds the process of a rank in /proc")
def test_torchrun_restarts_a_run_whose_rank_died(tmp_path):
    """It resumes from the last checkpoint."""
    write_text(tmp_path)
    own = ["every.checkpoint=5", "every.evaluate=1000", "every.sample=1000", "steps=80", "rank_timeout=15"]
    words = [*TORCHRUN, "--max-restarts=1", "--monitor-interval=0.2", str(REPOSITORY / "train.py"), *SMALL, *own]
    log = (tmp_path / "log").open("w")
    words += ["hydra.run.dir=run", "resume=auto"]
    process = subprocess.Popen(words, cwd=tmp_path, env=environment(tmp_path), stdout=log, stderr=log)
    metrics = tmp_path / "run" / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") > 8)
    os.kill(worker(process.pid, 1), signal.SIGKILL)
    code, output = process.wait(timeout=120), (tmp_path / "log").read_text()
    assert code == 0, output
    assert "resuming from run/checkpoints/step_" in output
    assert [row["step"] for row in rows(tmp_path / "run")] == list(range(1, 81))


HANGS = """
import os, signal, sys
from training import distributed, step
from training.state import TrainState

def hang(*_):
    if distributed.rank() == 1:
        open("hung", "w").write(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)

where, sys.argv[1:] = sys.argv[1], sys.argv[2:]
if where == "gradients":
    step.gradient_norm = hang
else:
    real, TrainState.memory = TrainState.memory, lambda state: (hang(), real(state))[1]
from train import main
main()
"""


@pytest.mark.parametrize(("where", "after"), [("gradients", 0), ("checkpoint", 2)])
def test_a_rank_that_hangs_is_named(tmp_path, where, after):
    """In a step or while saving: wherever the ranks wait for each other."""
    write_text(tmp_path)
    (tmp_path / "hangs.py").write_text(HANGS)
    words = ["hangs.py", where, *SMALL, "rank_timeout=5", "hydra.run.dir=run"]
    try:
        result = command(*words, cwd=tmp_path, ranks=2, HOME=str(tmp_path))
    finally:
        os.kill(int((tmp_path / "hung").read_text()), signal.SIGKILL)
    assert result.returncode != 0
    assert f"RuntimeError: rank 1 did not answer after step {after}" in result.stderr
