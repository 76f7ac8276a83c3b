import json
import subprocess
import sys
import time
from concurrent.futures import Future
from statistics import median

import pytest
import wandb
from omegaconf import OmegaConf
from wandb_server import wandb_server

from conf.entry import REPOSITORY
from training import tracking

pytestmark = pytest.mark.slow

KEY = "k" * 40


def start(folder, mode="auto", **changes):
    folder.mkdir(exist_ok=True)
    options = {"project": "p", "timeout": 5.0, "finish_timeout": 10.0, "config": {"steps": 3}, "run_id": None}
    return tracking.start(mode, folder=folder, **{**options, "warn": print, **changes})


def log(mirror, steps) -> list[float]:
    """Logs one row per step; returns the seconds that each took."""
    taken = []
    for step in steps:
        began = time.perf_counter()
        tracking.log(mirror, {"step": step, "loss": 1.0 / step, "clock": {"seconds": 2.5}})
        taken.append(time.perf_counter() - began)
        time.sleep(0.002)
    return taken


def steps(run) -> list[int]:
    return [row["trainer/step"] for row in run.history]


@pytest.fixture
def server(monkeypatch):
    """A W&B server, and its address and key in the environment."""
    with wandb_server(key=KEY) as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        monkeypatch.setenv("WANDB_API_KEY", KEY)
        yield server


def stop(server):
    server.shutdown()
    server.server_close()


def test_without_a_key_the_run_is_offline_and_holds_what_was_logged(tmp_path):
    folder = tmp_path / "run"
    run = start(folder)
    for step in (10, 20):
        tracking.log(run, {"step": step, "loss": 1.0 / step, "clock": {"seconds": 2.5}})
    tracking.log_samples(run, [{"step": 20, "prompt": "a", "text": "abc"}])
    tracking.finish(run)
    command = tracking.where(run)
    assert command == f"wandb sync {folder}/wandb/offline-run-*"
    (written,) = folder.glob("wandb/offline-run-*")
    inspect = [
        sys.executable,
        "-m",
        "wandb",
        "leet",
        "inspect",
        "--json",
        "--summary",
        str(written),
    ]
    result = subprocess.run(inspect, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    text = result.stdout
    assert json.loads(text)
    for expected in ("trainer/step", "loss", "clock/seconds", "samples"):
        assert expected in text


def test_disabled_writes_nothing(tmp_path):
    (tmp_path / "environment.json").write_text("{}")
    warnings = []
    run = start(tmp_path, mode="disabled", warn=warnings.append)
    tracking.log(run, {"step": 1, "loss": 1.0})
    tracking.finish(run)
    assert tracking.where(run) == "metrics.jsonl only" and not warnings
    assert not (tmp_path / "wandb").exists()


def test_the_environment_takes_precedence(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert start(tmp_path, mode="offline").run.disabled
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert start(tmp_path, mode=None).run.disabled  # except on ranks other than 0


@pytest.mark.parametrize(
    ("variable", "value", "mode"),
    [
        ("WANDB_MODE", "OFFLINE", "offline"),
        ("WANDB_MODE", "dryrun", "offline"),
        ("WANDB_MODE", "Disabled", "disabled"),
        ("WANDB_MODE", "shared", "online"),
        ("WANDB_MODE", "RUN", "online"),
        ("WANDB_DISABLED", "True", "disabled"),
        ("WANDB_DISABLED", "1", "disabled"),
        ("WANDB_DISABLED", "false", "auto"),
    ],
)
def test_wandbs_own_modes_are_understood_in_any_case(tmp_path, monkeypatch, variable, value, mode):
    monkeypatch.setenv(variable, value)
    assert tracking.asked_mode("auto") == mode
    warnings = []
    if mode != "online":
        run = start(tmp_path, warn=warnings.append)
        assert run.run.disabled == (mode == "disabled") and not warnings
        tracking.finish(run)


def test_names_in_wandb_come_from_settings_or_environment_or_defaults(server, tmp_path, monkeypatch):
    def names(folder: str, **settings):
        mirror = start(tmp_path / folder, **{"project": None, **settings})
        tracking.finish(mirror)
        run = server.runs[mirror.id]
        return mirror.run.project, run.name, run.group

    assert names("0", group="sweep") == ("inkling", str(tmp_path / "0"), "sweep")
    for name in ("PROJECT", "NAME", "RUN_GROUP"):
        monkeypatch.setenv(f"WANDB_{name}", f"my {name}")
    wandb.teardown()  # it remembers the environment of its first use
    assert names("1", group="sweep") == ("my PROJECT", "my NAME", "my RUN_GROUP")
    assert names("2", project="given", name="also given")[:2] == ("given", "also given")


def test_wandb_dir_may_hold_the_runs_of_several_folders(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    first, second = start(tmp_path / "a", mode="offline"), start(tmp_path / "b", mode="offline")
    tracking.finish(second)
    assert tracking.where(second) == f"wandb sync {tmp_path}/wandb/offline-run-*-{second.id}"
    (piece,) = tmp_path.glob(f"wandb/offline-run-*-{second.id}")
    assert tracking.rows_before(tmp_path, second.id) == (piece / f"run-{second.id}.wandb").stat().st_size // 100
    assert first.id != second.id and not list(tmp_path.glob("b/wandb"))


@pytest.mark.parametrize("mode", ["auto", "offline", "disabled"])
@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("WANDB_SILENT", "maybe"),
        ("WANDB_INIT_TIMEOUT", "soon"),
        ("WANDB_PROJECT", "a/b"),
        ("WANDB_RUN_ID", "a/b"),
        ("WANDB_BASE_URL", "nowhere"),
        ("NETRC", "."),
    ],
)
def test_no_environment_variable_ends_a_run(tmp_path, monkeypatch, mode, variable, value):
    monkeypatch.setenv(variable, value)
    warnings = []
    run = start(tmp_path, mode=mode, project=None, warn=warnings.append)
    tracking.log(run, {"step": 1, "loss": 1.0})
    tracking.finish(run)
    assert run.run.disabled == (mode == "disabled") and not run.failed
    if variable == "NETRC":
        assert not warnings
    else:
        (warning,) = warnings
        assert warning.startswith(f"W&B does not accept {variable}={value}") and "\n" not in warning


def test_if_wandb_cannot_write_the_run_continues_without_it(tmp_path, monkeypatch):
    monkeypatch.setattr(
        wandb, "init", lambda mode, init=wandb.init, **rest: init(mode=mode, **rest) if mode == "disabled" else 1 / 0
    )
    for mode in ("auto", "offline"):
        warnings = []
        run = start(tmp_path, mode=mode, warn=warnings.append)
        assert run.run.disabled and warnings == ["W&B says: division by zero; tracking in metrics.jsonl only"]
        tracking.log(run, {"step": 1, "loss": 1.0})
        tracking.finish(run)
        assert tracking.where(run) == "metrics.jsonl only"
    with pytest.raises(ValueError, match="W&B says: division by zero"):
        start(tmp_path, mode="online")


def test_a_key_is_found_in_the_environment_or_in_netrc_for_its_server(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_BASE_URL", "http://tracker.example:8080")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert not tracking.has_key()
    (tmp_path / "netrc").write_text("machine other.example login user password x\n")
    assert not tracking.has_key()
    (tmp_path / "netrc").write_text("machine tracker.example login user password x\n")
    assert tracking.has_key()
    monkeypatch.delenv("NETRC")
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    assert tracking.has_key()


def test_without_a_server_auto_tracks_offline_and_online_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    warnings = []
    run = start(tmp_path, timeout=1.0, warn=warnings.append)
    assert run.run.offline and len(warnings) == 1 and "tracking offline" in warnings[0]
    tracking.finish(run)
    assert [path.name[:12] for path in tmp_path.glob("wandb/*run-2*")] == ["offline-run-"]  # nothing of the attempt
    with pytest.raises(ValueError, match="W&B says"):
        start(tmp_path, mode="online", timeout=1.0)


def test_what_wandb_refuses_is_one_error(tmp_path, monkeypatch):
    for mode in ("auto", "offline"):
        with pytest.raises(ValueError, match="W&B says"):
            start(tmp_path, mode=mode, project="a/b")
    monkeypatch.setenv("WANDB_MODE", "sometimes")
    with pytest.raises(ValueError, match="online, offline or disabled, got sometimes"):
        start(tmp_path)


def test_a_server_receives_everything_and_a_resumed_run_keeps_its_id(server, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "environment.json").write_text("{}")
    (folder / "changes.patch").write_text("diff")
    mirror = start(folder, group="sweep")
    log(mirror, range(1, 21))
    tracking.log_samples(mirror, [{"step": 20, "prompt": "a", "text": "abc"}])
    tracking.finish(mirror)
    run = server.runs[mirror.id]
    assert (run.name, run.group, run.exit_code) == (str(folder), "sweep", 0)
    assert steps(run) == [*range(1, 21), 20]
    assert run.history[4]["loss"] == 0.2 and run.history[4]["clock/seconds"] == 2.5
    assert run.files["environment.json"] == b"{}" and run.files["changes.patch"] == b"diff"
    assert any(name.startswith("media/table/samples") for name in run.files)

    again = start(folder, run_id=mirror.id, config={"steps": 30})
    log(again, range(15, 31))  # from a checkpoint before the end
    tracking.finish(again)
    assert again.id == mirror.id and list(server.runs) == [mirror.id]
    assert steps(run) == [*range(1, 21), 20, *range(15, 31)]
    assert run.config == {"steps": 30}
    order = [row["_step"] for row in run.history]
    assert order == sorted(set(order))  # W&B's own step numbers, none twice


def test_the_summary_keeps_the_best_validation_loss_across_resuming(server, tmp_path):
    rows = [{"step": step, "val_loss": loss} for step, loss in ((1, 3.0), (2, 2.0), (3, 2.5))]
    folder = tmp_path / "run"
    mirror = start(folder)
    for row in rows:
        tracking.log(mirror, row)
    tracking.finish(mirror)
    summary = server.runs[mirror.id].summary
    assert (summary["best_val_loss"], summary["best_step"], summary["val_loss"]) == (2.0, 2, 2.5)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    mirror = start(folder, run_id=mirror.id)
    tracking.log(mirror, {"step": 4, "val_loss": 2.2})
    tracking.finish(mirror)
    summary = server.runs[mirror.id].summary
    assert (summary["best_val_loss"], summary["best_step"], summary["val_loss"]) == (2.0, 2, 2.2)


def test_a_checkpoint_is_an_artifact_with_its_files_and_aliases(server, tmp_path):
    folder = tmp_path / "step"
    (folder / "tokenizer").mkdir(parents=True)
    for name in ("model.json", "tokenizer/tokenizer.json"):
        (folder / name).write_text("{}")
    mirror = start(tmp_path / "run")
    for row in ({"step": 1, "val_loss": 2.0}, {"step": 2, "val_loss": 3.0}, {"step": 3}):
        (folder / "model.safetensors").write_text(str(row))
        tracking.log(mirror, row)
        saved = Future()
        tracking.log_checkpoint(mirror, row["step"], folder, row.get("val_loss"), saved)
        assert len(server.artifacts) < row["step"]
        saved.set_result(None)
        deadline = time.monotonic() + 10
        while len(server.artifacts) < row["step"] and time.monotonic() < deadline:
            time.sleep(0.01)
    tracking.log_checkpoint(mirror, 4, tmp_path / "full disk", None, failed := Future())
    failed.set_exception(OSError("full"))
    tracking.finish(mirror)
    assert not mirror.failed
    found = [(artifact.name, artifact.type, set(artifact.aliases)) for artifact in server.artifacts]
    name = f"model-{mirror.id}"
    assert found[0] == (name, "model", {"latest", "step-1", "best"})
    assert found[1:] == [(name, "model", {"latest", f"step-{step}"}) for step in (2, 3)]
    assert set(server.artifacts[0].files) == {"model.json", "tokenizer/tokenizer.json", "model.safetensors"}


@pytest.mark.parametrize("comes_back", [False, True])
def test_a_dead_server_costs_no_time_and_a_returning_one_gets_all_rows(server, tmp_path, comes_back):
    warnings = []
    mirror = start(tmp_path / "run", finish_timeout=10.0 if comes_back else 1.0, warn=warnings.append)
    taken = log(mirror, range(1, 51))
    stop(server)
    taken += log(mirror, range(51, 151))
    assert median(taken) < 0.002 and max(taken) < 0.1
    began = time.perf_counter()
    if comes_back:
        with wandb_server(port=server.server_port, key=KEY) as back:
            back.runs = server.runs
            tracking.finish(mirror)
            assert steps(back.runs[mirror.id]) == [*range(1, 151)] and not warnings
    else:
        tracking.finish(mirror)
        assert len(warnings) == 1 and f"wandb sync --include-online {tmp_path / 'run'}" in warnings[0]
    assert time.perf_counter() - began < 5


def test_a_slow_server_delays_nothing(server, tmp_path):
    mirror = start(tmp_path / "run")
    server.delay = 0.3
    taken = log(mirror, range(1, 31))
    began = time.perf_counter()
    tracking.log_samples(mirror, [{"step": 30, "prompt": "a", "text": "abc"}])  # W&B asks its server about a table
    assert time.perf_counter() - began < 0.1
    taken += log(mirror, range(31, 51))
    assert median(taken) < 0.002 and max(taken) < 0.1
    tracking.finish(mirror)
    assert sorted(steps(server.runs[mirror.id])) == sorted([*range(1, 51), 30])


def test_a_server_that_does_not_answer_in_time_is_not_waited_for(server, tmp_path):
    server.delay, warnings = 3.0, []
    mirror = start(tmp_path / "run", timeout=0.5, warn=warnings.append)
    assert mirror.run.offline and len(warnings) == 1
    tracking.finish(mirror)


def test_with_a_refused_key_auto_tracks_offline_and_online_is_an_error(server, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    warnings = []
    mirror = start(tmp_path / "run", warn=warnings.append)
    assert mirror.run.offline and len(warnings) == 1
    assert "401" in warnings[0] and "tracking offline" in warnings[0] and "\n" not in warnings[0]
    tracking.finish(mirror)
    with pytest.raises(ValueError, match=r"W&B says: .*401.* \(tracking.mode=disabled trains without W&B\)"):
        start(tmp_path / "run", mode="online")


def test_an_error_in_wandb_is_reported_once_and_later_rows_arrive(server, tmp_path, monkeypatch):
    warnings = []
    mirror = start(tmp_path / "run", warn=warnings.append)
    real, failing = mirror.run.log, {"trainer/step": 2}
    monkeypatch.setattr(mirror.run, "log", lambda row: real(row) if row["trainer/step"] > 2 else failing["no"])
    log(mirror, range(1, 5))
    tracking.finish(mirror)
    assert len(warnings) == 1 and "W&B says: KeyError: 'no'; metrics.jsonl has everything" in warnings[0]
    assert steps(server.runs[mirror.id]) == [3, 4]


def test_a_run_left_open_ends_before_the_next_starts(server, tmp_path):
    first = start(tmp_path / "0", group="sweep")
    log(first, [1])
    second = start(tmp_path / "1", group="sweep")
    log(second, [1, 2])
    tracking.finish(second)
    assert first.id != second.id and server.runs[first.id].exit_code is not None
    assert steps(server.runs[second.id]) == [1, 2]


def test_the_pieces_of_an_offline_run_become_one_run_on_the_server(server, tmp_path):
    folder = tmp_path / "run"
    first = start(folder, mode="offline")
    log(first, range(1, 21))
    tracking.finish(first)
    time.sleep(1.1)  # the names of their folders differ by the second
    second = start(folder, mode="offline", run_id=first.id)
    log(second, range(15, 31))
    tracking.finish(second)
    command = tracking.where(second)
    assert command == f"wandb sync {folder}/wandb/offline-run-*"
    arguments = command.replace("wandb", f"{sys.executable} -m wandb", 1)
    result = subprocess.run(arguments, shell=True, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    (run,) = server.runs.values()
    assert steps(run) == [*range(1, 21), *range(15, 31)]
    order = [row["_step"] for row in run.history]
    assert order == sorted(set(order))


def test_the_commands_of_the_sweep_compose(settings):
    from wandb.sdk.launch.sweeps.utils import create_sweep_command_args

    sweep = OmegaConf.to_container(OmegaConf.load(REPOSITORY / "docs" / "sweep.yaml"), resolve=False)
    assert sweep["command"] == ["${env}", "python", sweep["program"], "${args_no_hyphens}"]
    assert (REPOSITORY / sweep["program"]).is_file()

    def value_of(parameter: dict):
        return parameter.get("value", parameter.get("min", (parameter.get("values") or [None])[-1]))

    values = {name: value_of(parameter) for name, parameter in sweep["parameters"].items()}
    assert None not in values.values()
    chosen = create_sweep_command_args({"args": {name: {"value": value} for name, value in values.items()}})
    cfg = settings(*chosen["args_no_hyphens"])
    assert (cfg.optimizer.lr, cfg.schedule.decay, cfg.steps) == (0.0005, "cosine", 1000)
