"""Run by test_distributed.py on two ranks: computes gradients, trains, and saves the results."""

import json
import os
import signal
import sys
from pathlib import Path

import torch
from composed import settings
from reads import noting
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import train
from model import GPT, ModelConfig
from training import auto, distributed, step
from training.engine import Engine
from training.gradients import compute_gradients

CPU = torch.device("cpu")


def batch() -> dict[str, torch.Tensor]:
    """A batch of 8 rows with unequal numbers of targets."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(17, (8, 6), generator=generator)
    targets = tokens.roll(1, 1)
    targets[0, 1:], targets[5, :4] = -100, -100
    return {"tokens": tokens, "targets": targets}


def model(precision: str) -> GPT:
    """A model in float64, or in float32 for bf16; bf16 would round its norms' weights."""
    torch.manual_seed(0)
    one = GPT(17, ModelConfig(d_model=16, n_layers=2, n_heads=2, d_ff=24, max_seq_len=8, qk_norm=True))
    for name, parameter in one.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.1)
    return one.double() if precision == "fp32" else one


def gradients(parallel: str, micro_batch: int, precision: str) -> dict:
    """The gradients from this rank's half of the batch, and the number of all-reduces with ddp."""
    one, rows = model(precision), batch()
    forward = distributed.parallelize(one, one, parallel, precision)
    reduced = []
    if parallel == "ddp":
        forward.register_comm_hook(None, lambda state, bucket: (reduced.append(1), allreduce_hook(state, bucket))[1])
    rank, count = distributed.rank(), (rows["targets"] != -100).sum().item()
    mine = {name: tensor[4 * rank : 4 * rank + 4] for name, tensor in rows.items()}
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    autocast = auto.autocast(CPU, precision)
    compute_gradients(forward, scaler, mine, micro_batch=micro_batch, count=count, autocast=autocast)
    found = {name: distributed.full_tensor(p.grad) for name, p in one.named_parameters()}
    return {"gradients": found, "reduced": len(reduced)}


def main(folder: Path, small: list[str]):
    distributed.start(60.0)
    rank = distributed.rank()
    found = {}
    for parallel in ("ddp", "fsdp"):
        for micro_batch in (1, 2, 4):
            for precision in ("fp32", "bf16"):
                found[f"{parallel} {micro_batch} {precision}"] = gradients(parallel, micro_batch, precision)
    found["gathered"] = distributed.gather_full([torch.ones(1)])
    torch.save(found, folder / f"gradients_{rank}.pt")

    os.chdir(folder)
    codes, real, real_step = {}, step.compute_gradients, train.train_step
    for name, overrides in json.loads((folder / "runs.json").read_text()):
        steps = []

        def disturbed(*arguments, name=name, steps=steps, **options):
            steps.append(1)
            total = real(*arguments, **options)
            if len(steps) == 3 and name == "signal" and rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            return 10 * total if len(steps) == 5 and name.startswith("rollback") else total

        step.compute_gradients = disturbed
        read = []
        train.train_step = noting(real_step, read) if name.startswith("steady") else real_step
        Engine.steps_ahead = 16 if name.startswith("steady") else 1
        codes[name] = [train.train(settings(*small, *overrides), folder / "runs" / name), len(steps), read]
    (folder / f"codes_{rank}.json").write_text(json.dumps(codes))
    distributed.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
