"""Measures speed, memory and learning next to other programs.  python -m scripts.benchmark --help"""

import json
import os
from pathlib import Path

import torch

from conf.entry import check_output, entry_point
from conf.scripts import Benchmark
from scripts.benchmarks.data import data
from scripts.benchmarks.generate import generation
from scripts.benchmarks.learn import learning
from scripts.benchmarks.train import lengths, training

SHAPE = ("d_model", "n_layers", "n_heads", "vocabulary", "rows", "seq_len")
MACHINE = ("threads", "device")
USES = {  # the settings of each action
    "train": ("shape", *SHAPE, "rounds", "seconds", *MACHINE, "peer", "json"),
    "length": ("shape", "seq_lens", "rounds", "seconds", *MACHINE, "json"),
    "learn": ("overrides", "seconds", "seeds", "source", "peer", "picture", "json"),
    "generate": ("new_tokens", "batch", "far", "rounds", *MACHINE, "peer", "json"),
    "data": ("source", "megabytes", "rounds", "json"),
}
ROUNDS = {"train": 5, "length": 5, "generate": 3, "data": 3}
SECONDS = {"train": 2.0, "length": 2.0, "learn": 300.0}


@entry_point("benchmark", Benchmark, USES)
def main(cfg: Benchmark, action: str):
    check_output("json", cfg.json)
    check_output("picture", cfg.picture)
    if cfg.peer is not None and not Path(cfg.peer).is_dir():
        raise ValueError(f"peer must be a folder with a checkout, got {cfg.peer}")
    peer = None if cfg.peer is None else Path(cfg.peer)
    threads = cfg.threads or torch.get_num_threads()
    torch.set_num_threads(threads)
    rounds, seconds = cfg.rounds or ROUNDS.get(action), cfg.seconds or SECONDS.get(action)
    if action == "data":
        results = data(cfg.source, cfg.megabytes, rounds)
    elif action == "generate":
        results = generation(cfg.new_tokens, cfg.batch, cfg.far, rounds, threads, cfg.device, peer)
    elif action == "length":
        results = lengths(cfg.shape, cfg.seq_lens, rounds, seconds, cfg.device)
    elif action == "learn":
        picture = None if cfg.picture is None else Path(cfg.picture)
        results = learning(seconds, cfg.seeds, cfg.source, peer, cfg.overrides, picture)
    else:
        changes = {name: value for name in SHAPE if (value := getattr(cfg, name)) is not None}
        results = training(cfg.shape, changes, rounds, seconds, cfg.device, peer)
    if cfg.json is not None:
        machine = {"cores": len(os.sched_getaffinity(0)), "torch": torch.__version__}
        Path(cfg.json).write_text(json.dumps(machine | {"results": results}, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
