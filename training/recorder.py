"""What a run reports: lines on the screen, metrics.jsonl, W&B, and the files in its folder that describe it."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from conf.console import visible
from training import checkpoint, distributed, estimate, interruption, tracking
from training.engine import Engine
from training.metrics import MetricsLog, Screen, Stopwatch, peak_memory
from training.resume import Start
from training.run_folder import describe, record_environment
from training.state import TrainState

if TYPE_CHECKING:
    from conf.schema import Train


class Recorder:
    """Writes and prints on rank 0; the other ranks may call its methods too."""

    def __init__(self, folder: Path, cfg: "Train", engine: Engine, start: Start, steps: int, group: str | None):
        self.folder, self.engine, self.steps, self.tokens_per_step = folder, engine, steps, cfg.batch_tokens
        first = distributed.rank() == 0
        self.screen, self.watch = Screen(steps), Stopwatch()
        facts: dict[str, Any] = {
            "parameters": engine.model.n_parameters(),
            "tokens_per_step": cfg.batch_tokens,
            "steps": steps,
        }
        if first:
            facts["environment"] = record_environment(folder, engine.device, **facts)
            OmegaConf.save(OmegaConf.create(asdict(cfg)), folder / "config.yaml")
        self.log = MetricsLog(folder / "metrics.jsonl" if first else None, start.step, warn=self.say)
        self.mirror = tracking.start(
            cfg.tracking.mode if first else None,
            project=cfg.tracking.project,
            name=cfg.tracking.name,
            timeout=cfg.tracking.timeout,
            finish_timeout=cfg.tracking.finish_timeout,
            folder=folder,
            config=asdict(cfg) | asdict(engine.choices) | facts,
            run_id=start.saved.get("wandb_id") if cfg.resume == "auto" else None,
            warn=print,
            group=group,
        )
        if first:
            (folder / "README.txt").write_text(describe(folder, tracking.where(self.mirror)), encoding="utf-8")
        self.last = start.step, 0.0  # step and seconds of the last row

    def __enter__(self):
        self.screen.__enter__()
        self.watch = Stopwatch()
        return self

    def __exit__(self, *_):
        self.screen.__exit__()

    def say(self, text: str):
        """Prints lines that stay."""
        self.screen.say(text)

    def write(self, row: dict, end: int, row_length: int):
        """Adds the clock's values to a row, writes and prints it. `end` is the last step of this start of the run."""
        (last_step, last_seconds), step, seconds = self.last, row["step"], self.watch.seconds()
        speed = (step - last_step) * self.tokens_per_step / (seconds - last_seconds)
        self.last = step, seconds
        row["clock"] = {"seconds": seconds, "tok_per_sec": speed, "memory_gib": peak_memory(self.engine.device)}
        if self.engine.peak_flops is not None:
            flops = estimate.flops_per_token(self.engine.model, row_length) * speed
            row["clock"]["mfu"] = flops / (self.engine.peak_flops * distributed.size())
        self.log.write(row)
        tracking.log(self.mirror, row)
        left = (end - step) * self.tokens_per_step / speed
        self.screen.report(step, row, left, keep="val_loss" in row)

    def sample(self, samples: list[dict]):
        """Prints the last sample; W&B gets a table of all."""
        tracking.log_samples(self.mirror, samples)
        self.say(f"\n{visible(samples[-1]['text'])}\n")

    def rewind(self, step: int):
        """Goes back to an earlier step, after which the run is repeated."""
        self.log.rewind(step)
        self.last = step, self.watch.seconds()

    def sync(self):
        """Flushes metrics.jsonl, so that no checkpoint is ahead of it."""
        self.log.sync()

    def farewell(self, state: TrainState, reason: int, patient: bool, failed: int) -> int:
        """Prints the results and what to type next; returns the exit code. ValueError if something was not saved."""
        self.log.sync()
        tracking.finish(self.mirror)
        step, run = state.step, self.folder
        if reason:
            why = interruption.describe(reason)
            print(f"stopped     {why}, after step {step}; continue with: python train.py resume={run}")
        if not patient:
            waited = f"{state.guard.waited} evaluations without a lower validation loss"
            print(f"patience    stopped after step {step}: {waited}")
        print(f"checkpoint  {next(iter(checkpoint.steps(run)), None)}")
        if best := checkpoint.describe_best(run):
            print(f"best        {best}")
        lowest = state.guard.lowest_step
        if lowest is not None and not checkpoint.step_folder(run, lowest).exists():
            print(f"lowest      validation loss {state.guard.lowest:.4f} after step {lowest}, which has no checkpoint")
        print(f"next        python -m scripts.generate checkpoint={run} -- To be, or not")
        print(f"tracking    {tracking.where(self.mirror)}", flush=True)
        if failed:
            raise ValueError(f"{failed} checkpoints could not be saved, see above")
        if self.log.waiting:
            first = self.log.waiting[0]["step"]
            raise ValueError(f"{len(self.log.waiting)} rows of {self.log.path} could not be written, from step {first}")
        return interruption.exit_code(reason)
