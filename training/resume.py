"""Where a run starts: from scratch, from the weights of another run, or from a checkpoint that it resumes."""

import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.batches import ORDER, Batches
from data.corpus import Corpus, Known, learned_from
from training import checkpoint
from training.checkpoint import About
from training.run_folder import as_before, check_same_settings, differences
from training.state import TrainState

if TYPE_CHECKING:
    from conf.schema import Train

OF_RUN = ("config", "choices", "corpus", "steps", "wandb_id", "guard")  # the keys of training.pt that a start needs


@dataclass
class Start:
    """`checkpoint` is the one to resume, `saved` its entries named in OF_RUN; `weights_of` is the one of init_from."""

    step: int = 0
    checkpoint: Path | None = None
    weights_of: Path | None = None
    about: About | None = None
    saved: dict[str, Any] = field(default_factory=dict)
    batch_order: int = ORDER

    @property
    def known(self) -> Known | None:
        """The corpus that the checkpoint was trained on."""
        return learned_from(self.about, self.checkpoint) if self.checkpoint is not None else None

    def check_corpus(self, corpus: Corpus, cfg: "Train"):
        """ValueError unless the run continues with the text and the tokenizer that it started with."""
        if self.saved and self.saved["corpus"] != corpus.fingerprint():
            settings = as_before(self.saved["config"], asdict(cfg))
            what = f"{self.checkpoint} was trained on another text than {corpus.folder}, or with another tokenizer"
            raise ValueError(what + (f": give {settings}" if settings else ""))
        if self.weights_of is not None:
            checkpoint.check_same_tokenizer(self.weights_of, corpus.tokenizer)
        try:
            corpus.tokenizer.prompt(cfg.sample.prompt)
        except ValueError as error:
            raise ValueError(f"sample.prompt: {error}") from error

    def restore(self, state: TrainState, cfg: "Train"):
        """Loads the checkpoint's state; forgets the lowest validation loss if eval_tokens has changed."""
        if self.checkpoint is None:
            return
        checkpoint.check_same_model(self.checkpoint, state.model)
        state.load(self.checkpoint)
        if self.saved["config"].get("eval_tokens") != cfg.eval_tokens:
            state.guard.lowest, state.guard.lowest_step, state.guard.waited = math.inf, None, 0


def find_start(cfg: "Train", run: Path) -> Start:
    """Finds where the run in the folder `run` starts, and prints which settings have changed since its checkpoint.

    With resume=auto, `run` is the newest run that has a checkpoint, or a new folder. ValueError if the run must not
    start like this.
    """
    if cfg.resume not in (None, "auto"):
        folder = checkpoint.find(cfg.resume, for_training=True)
        if checkpoint.steps(run):
            raise ValueError(f"{run} already holds checkpoints: choose another folder, or resume=auto to continue them")
    elif checkpoint.steps(run):
        if cfg.resume is None:
            raise ValueError(f"{run} already holds checkpoints: resume=auto continues them; or choose another folder")
        folder = checkpoint.find(run, for_training=True)
    else:
        if cfg.resume == "auto":
            print("resume=auto: no run of this name has a checkpoint, starting a new one")
        return Start(weights_of=None if cfg.init_from is None else checkpoint.find(cfg.init_from))
    about, training = checkpoint.read_about(folder), checkpoint.load_training(folder)
    saved: dict[str, Any] = {name: value for name, value in training.items() if name in OF_RUN}
    print(f"resuming from {folder}: {about['step']} steps are done")
    check_same_settings(folder, saved["config"], asdict(cfg))
    for name, before, now in differences(saved["config"], asdict(cfg)):
        print(f"changed setting: {name} was {before}, is now {now}")
    return Start(about["step"], folder, None, about, saved, about.get("batch_order", 1))


def planned_steps(cfg: "Train", start: Start, batches: Batches | None = None) -> int | None:
    """The setting `steps`, or what `epochs` amounts to: as the checkpoint has it, else counted on this text.

    None while the text is needed and not there yet.
    """
    measures = ("epochs", "batch_tokens", "seq_len", "packing")
    if cfg.steps is not None:
        return cfg.steps
    if start.saved and all(start.saved["config"].get(name) == getattr(cfg, name) for name in measures):
        return start.saved["steps"]
    return batches.steps(cfg.epochs) if batches is not None else None


def nothing_left(cfg: "Train", steps: int, start: Start) -> bool:
    """Whether the run is finished already, which is fine with resume=auto; ValueError without."""
    end = min(steps, cfg.stop_after or steps)
    if start.step >= end:
        nothing = f"nothing left to do: {start.step} steps are done, the run ends at {end}; increase steps"
    elif start.saved and cfg.patience is not None and _waited(start, cfg) >= cfg.patience:
        nothing = f"nothing left to do: patience={cfg.patience} ended the run after {start.step} steps; increase it"
    else:
        return False
    if cfg.resume != "auto":
        raise ValueError(nothing)
    print(nothing)
    return True


def _waited(start: Start, cfg: "Train") -> int:
    """The number of evaluations since the lowest validation loss; 0 if eval_tokens has changed."""
    same = start.saved["config"].get("eval_tokens") == cfg.eval_tokens
    return start.saved["guard"].get("waited", 0) if same else 0
