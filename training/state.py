"""The training state: what a checkpoint holds, and what resuming and rolling back restore."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from model import GPT
from training import checkpoint, distributed
from training.checkpoint import Sample
from training.engine import Engine
from training.gate import Gate, Guard, GuardConfig
from training.optimizer import OptimizerConfig, build_optimizer


class Generators:
    """This rank's random number generators; torch keeps their state globally."""

    def state(self) -> dict:
        cuda = [torch.cuda.get_rng_state()] if torch.cuda.is_available() else []
        return {"cpu": torch.get_rng_state(), "cuda": cuda}

    def load(self, state: Mapping[str, Any]):
        torch.set_rng_state(state["cpu"])
        if state["cuda"] and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"][0])


@dataclass
class TrainState:
    """All state of a run after `step` steps. Every field is saved in a checkpoint; nothing else carries over.

    The gate's state, the last losses, lives on the device; it is saved as `guard.losses`, which is current only in what
    `memory` returns.
    """

    step: int
    model: GPT
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    guard: Guard
    samples: list[Sample] = field(default_factory=list)
    rng: Generators = field(default_factory=Generators)
    gate: Gate = field(kw_only=True)

    @classmethod
    def build(
        cls, engine: Engine, optimizer_config: OptimizerConfig, guard_config: GuardConfig, seed: int, step: int
    ) -> "TrainState":
        """The state of a new run. To be called after FSDP has replaced the model's parameters."""
        optimizer = build_optimizer(engine.model, optimizer_config, engine.choices.precision)
        scaler = torch.amp.GradScaler(engine.device.type, enabled=engine.choices.precision == "fp16")
        if distributed.rank() > 0:  # dropout must not draw the same numbers on each rank
            torch.manual_seed(seed + 1_000_003 * (distributed.rank() + distributed.size() * step))
        return cls(step, engine.model, optimizer, scaler, Guard(), gate=Gate(engine.device, guard_config))

    def memory(self) -> dict[str, Any]:
        """Everything but the step and the weights, gathered on the CPU, for training.pt. A collective."""
        self.guard.losses = self.gate.losses()
        return {
            "optimizer": distributed.gather_full(self.optimizer.state_dict()),
            "scaler": self.scaler.state_dict(),
            "guard": asdict(self.guard),
            "samples": list(self.samples),
            "rng": distributed.gather_objects(self.rng.state()),
        }

    def load(self, folder: Path):
        """Loads a checkpoint that any number of ranks saved, to resume it or to roll back to it."""
        saved, mismatch = checkpoint.load_training(folder), f"{folder} holds another model"
        checkpoint.check_sizes(checkpoint.sizes(folder / "model.safetensors"), self.model, mismatch)
        distributed.load_weights(self.model, checkpoint.read_weights(folder))
        try:
            distributed.load_optimizer(self.optimizer, saved["optimizer"])
            if saved["scaler"]:
                self.scaler.load_state_dict(saved["scaler"])
            if distributed.rank() < len(saved["rng"]):  # else it was saved by fewer ranks
                self.rng.load(saved["rng"][distributed.rank()])
            self.samples, self.guard = list(saved["samples"]), Guard(**saved["guard"])
            self.gate.open(self.guard.losses)
        except (RuntimeError, TypeError, LookupError) as error:  # raised by torch, for another machine or version
            raise ValueError(f"{folder}/training.pt does not fit this program: {error!r}") from error
        self.step = checkpoint.read_about(folder)["step"]
