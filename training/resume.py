"""Where a run begins: at its beginning, with the weights of another, or where a checkpoint stands."""

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

OF_RUN = ("config", "choices", "corpus", "steps", "wandb_id", "guard")  # of training.pt, what a run needs to begin


@dataclass
class Start:
    """`checkpoint` is the one to resume, of which `saved` holds what is OF_RUN; `weights_of` what init_from names."""

    step: int = 0
    checkpoint: Path | None = None
    weights_of: Path | None = None
    about: About | None = None
    saved: dict[str, Any] = field(default_factory=dict)
    batch_order: int = ORDER

    @property
    def known(self) -> Known | None:
        """The corpus that the checkpoint has learned from."""
        return learned_from(self.about, self.checkpoint) if self.checkpoint is not None else None

    def check_corpus(self, corpus: Corpus, cfg: "Train"):
        """ValueError unless the run goes on with the text and the tokenizer that it began with."""
        if self.saved and self.saved["corpus"] != corpus.fingerprint():
            again = as_before(self.saved["config"], asdict(cfg))
            what = f"{self.checkpoint} has learned from another text than {corpus.folder}, or with another tokenizer"
            raise ValueError(what + (f": give {again}" if again else ""))
        if self.weights_of is not None:
            checkpoint.check_same_tokenizer(self.weights_of, corpus.tokenizer)
        try:
            corpus.tokenizer.prompt(cfg.sample.prompt)
        except ValueError as error:
            raise ValueError(f"sample.prompt: {error}") from error

    def restore(self, state: TrainState, cfg: "Train"):
        """What the checkpoint remembers; of validation only what was measured as it is now."""
        if self.checkpoint is None:
            return
        checkpoint.check_same_model(self.checkpoint, state.model)
        state.load(self.checkpoint)
        if self.saved["config"].get("eval_tokens") != cfg.eval_tokens:
            state.guard.lowest, state.guard.lowest_step, state.guard.waited = math.inf, None, 0


def find_start(cfg: "Train", run: Path) -> Start:
    """Of a run in the folder `run`; says what has changed since. ValueError where it may not begin so.

    With resume=auto, the run folder is the newest run that has a checkpoint, or a new one.
    """
    if cfg.resume not in (None, "auto"):
        folder = checkpoint.find(cfg.resume, for_training=True)
        if checkpoint.steps(run):
            raise ValueError(f"{run} already holds checkpoints: take another folder, or resume=auto to go on with them")
    elif checkpoint.steps(run):
        if cfg.resume is None:
            raise ValueError(f"{run} already holds checkpoints: resume=auto goes on with them; or take another folder")
        folder = checkpoint.find(run, for_training=True)
    else:
        if cfg.resume == "auto":
            print("resume=auto: no run of this name has a checkpoint, beginning a new one")
        return Start(weights_of=None if cfg.init_from is None else checkpoint.find(cfg.init_from))
    about, training = checkpoint.read_about(folder), checkpoint.load_training(folder)
    saved: dict[str, Any] = {name: value for name, value in training.items() if name in OF_RUN}
    print(f"resuming from {folder}: {about['step']} steps are done")
    check_same_settings(folder, saved["config"], asdict(cfg))
    for name, before, now in differences(saved["config"], asdict(cfg)):
        print(f"a setting has changed: {name} was {before}, is {now}")
    return Start(about["step"], folder, None, about, saved, about.get("batch_order", 1))


def planned_steps(cfg: "Train", start: Start, batches: Batches | None = None) -> int | None:
    """As set, or as epochs have come to before, on the text that a checkpoint knows; else as they do on this text."""
    measures = ("epochs", "batch_tokens", "seq_len", "packing")
    if cfg.steps is not None:
        return cfg.steps
    if start.saved and all(start.saved["config"].get(name) == getattr(cfg, name) for name in measures):
        return start.saved["steps"]
    return batches.steps(cfg.epochs) if batches is not None else None


def nothing_left(cfg: "Train", steps: int, start: Start) -> bool:
    """Whether a run that is started again and again has come to its good end. ValueError for one that is not."""
    end = min(steps, cfg.stop_after or steps)
    if start.step >= end:
        nothing = f"nothing left to do: {start.step} steps are done, the run ends at {end}; give more steps"
    elif start.saved and cfg.patience is not None and _waited(start, cfg) >= cfg.patience:
        nothing = f"nothing left to do: {start.step} steps are done, and patience={cfg.patience} has ended; give more"
    else:
        return False
    if cfg.resume != "auto":
        raise ValueError(nothing)
    print(nothing)
    return True


def _waited(start: Start, cfg: "Train") -> int:
    """Evaluations without a lower validation loss, of those that were measured as they are now."""
    same = start.saved["config"].get("eval_tokens") == cfg.eval_tokens
    return start.saved["guard"].get("waited", 0) if same else 0
