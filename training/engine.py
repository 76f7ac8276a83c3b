"""How forward and backward are computed on this machine: device, precision, kernels, compile, ranks, micro-batches."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from data.corpus import Corpus
from kernels import build
from model import GPT
from model.gpt import checkpoint_activations
from training import auto, checkpoint, distributed, estimate
from training.auto import Choices
from training.backend import choose_ops
from training.compilation import compile_forward
from training.gradients import micro_batches

if TYPE_CHECKING:
    from conf.schema import Train


@dataclass
class Engine:
    """A model and how it is computed.

    Training calls `forward`: the model itself, or the model compiled or wrapped in DDP. `peak_flops` is the peak FLOP/s
    of a known device, or None.
    """

    model: GPT
    device: torch.device
    choices: Choices
    autocast: torch.autocast
    peak_flops: float | None
    parallel: str
    forward: Callable

    @classmethod
    def build(
        cls, cfg: "Train", vocab_size: int, steps: int, chosen: dict[str, Any], weights_of: Path | None = None
    ) -> "Engine":
        """Builds the model on its device, with new weights or those of a checkpoint, and resolves every `auto`.

        `chosen`: the choices of the run that is resumed. ValueError if this machine has too little memory.
        """
        device = auto.choose_device(cfg.device, cfg.deterministic)
        if device.type == "cpu":
            auto.keep_freed_memory()
        rows = cfg.batch_tokens // cfg.seq_len // distributed.size()
        n_parameters, n_bytes = estimate.size(vocab_size, cfg.model)
        n_learning = 8 * n_parameters if device.type == "cpu" else 0  # gradients and at least one moment
        what = f"training {n_parameters:,} parameters with max_seq_len {cfg.model.max_seq_len:,}"
        estimate.check_fits(what, n_bytes + n_learning)
        model = GPT(vocab_size, cfg.model).to(device)
        if weights_of is not None:
            checkpoint.check_same_model(weights_of, model)
            checkpoint.load_weights(weights_of, model)
        choices = auto.choose(
            cfg,
            device=device,
            rows=rows,
            seq_len=cfg.seq_len,
            vocab_size=vocab_size,
            soft_cap=cfg.model.soft_cap,
            flops=6 * n_parameters * cfg.batch_tokens * steps,
            saved=chosen,
        )
        if device.type == "cpu":
            pieces = f"{cfg.batch_tokens:,} tokens, {choices.micro_batch} x {cfg.seq_len} at once,"
            n_bytes = estimate.min_step_memory(model, rows, choices.micro_batch, cfg.seq_len)
            estimate.check_fits(f"a step of {pieces}", n_bytes)
        choices.kernels = choices.kernels and build.load("training", warn=print)
        model.use(choose_ops(choices.attention, choices.kernels))
        if cfg.activation_checkpointing:
            checkpoint_activations(model)
        autocast = auto.autocast(device, choices.precision)
        peak_flops = auto.peak_flops(device, cfg.device_spec, choices.precision)
        return cls(model, device, choices, autocast, peak_flops, cfg.parallel, model)

    def prepare(self, batch: dict[str, Tensor], row_lengths: list[int], *, try_sizes: bool):
        """Compiles for rows of these lengths, and wraps the model for several ranks. `batch` is any batch of the run.

        try_sizes: on a GPU, finds the largest micro-batch that fits.
        """
        first = {name: rows[: self.choices.micro_batch].to(self.device) for name, rows in batch.items()}
        if try_sizes and self.device.type == "cuda":
            self.choices.micro_batch = auto.largest_that_fits(self.model, first, self.autocast)
        if self.choices.compile:
            print("compile   compiling the model, once", flush=True)
            began = time.perf_counter()
            regional = distributed.size() == 1 or self.parallel == "ddp"  # FSDP's hooks are on the model itself
            of_each_length = [next(micro_batches(first, self.choices.micro_batch, length)) for length in row_lengths]
            self.forward = compile_forward(self.model, of_each_length, self.autocast, warn=print, regional=regional)
            self.choices.compile = self.forward is not self.model
            print(f"compile   took {time.perf_counter() - began:.0f} s", flush=True)
        self.forward = distributed.parallelize(self.model, self.forward, self.parallel, self.choices.precision)
        self.model.train()

    @property
    def steps_ahead(self) -> int:
        """How many steps the host may run ahead of the device; on a CPU they are the same."""
        return 1 if self.device.type == "cpu" else 16

    @property
    def searchable(self) -> bool:
        """Whether one rank may call the model alone; under FSDP all ranks must call it together."""
        return distributed.size() == 1 or self.parallel == "ddp"

    def explain_oom(self, batch: dict[str, Tensor]) -> AbstractContextManager:
        return auto.explain_oom(self.model, batch, self.choices.micro_batch, self.autocast)


def announce(
    cfg: "Train", folder: Path, corpus: Corpus, engine: Engine, n_steps: int, epochs: float, row_lengths: list[int]
):
    """Prints what is about to run."""
    ranks, n_parameters = distributed.size(), engine.model.n_parameters()
    several = f" on {ranks} ranks, {cfg.parallel}" if ranks > 1 else ""
    n_train, n_validation = len(corpus.train), len(corpus.validation)
    print(f"run       {folder}")
    print(f"text      {n_train:,} tokens for training, {n_validation:,} for validation, {corpus.folder}")
    print(f"model     {n_parameters:,} parameters, vocabulary {corpus.tokenizer.vocab_size:,}")
    growing = f" in rows of {', then '.join(map(str, row_lengths))}" if len(row_lengths) > 1 else ""
    print(f"steps     {n_steps} of {cfg.batch_tokens:,} tokens{growing}, {epochs:.1f} epochs")
    choices = ", ".join(f"{name} {value}" for name, value in asdict(engine.choices).items())
    print(f"device    {engine.device}{several}, {choices}", flush=True)
