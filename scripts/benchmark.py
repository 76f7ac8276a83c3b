"""How fast the parts are, beside others in the same run.  python -m scripts.benchmark --help"""

import argparse
import json
import os
import sys
from pathlib import Path

import torch

from conf.console import guard_output
from scripts.benchmarks.data import data
from scripts.benchmarks.generate import generation
from scripts.benchmarks.learn import learning
from scripts.benchmarks.train import SHAPES, lengths, training


def whole(text: str) -> int:
    """A number of the command line, from 1."""
    if not (text.isdecimal() and 1 <= int(text) <= 10**9):
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 to 10^9, got {text}")
    return int(text)


def seconds(text: str) -> float:
    """Of the command line, more than none."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1e7:
        raise argparse.ArgumentTypeError(f"must be seconds, above 0 and at most 10^7, got {text}")
    return value


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="what", required=True)

    def command(name: str, help: str, rounds: int | None = 3) -> argparse.ArgumentParser:
        one = commands.add_parser(name, help=help, description=help)
        one.add_argument("--json", type=Path, help="writes every measurement here")
        if rounds is not None:
            one.add_argument("--rounds", type=whole, default=rounds, help="measurements of each, taken in turn")
        return one

    train = command("train", "tokens per second and memory of a training step", rounds=5)
    for name in ("d_model", "n_layers", "n_heads", "vocabulary", "rows", "seq_len"):
        train.add_argument(f"--{name.replace('_', '-')}", type=whole, help="in place of the shape's")

    length = command("length", "the cost of a training step as rows grow longer, at equal tokens", rounds=5)
    length.add_argument("--seq-lens", type=whole, nargs="+", default=[128, 256, 512, 1024])
    for one in (train, length):
        one.add_argument("--shape", choices=SHAPES, default="small")
        one.add_argument("--seconds", type=seconds, default=2.0, help="of each measurement")

    learn = command("learn", "bits per byte of held-out text after so many seconds", rounds=None)
    learn.add_argument("--seconds", type=seconds, default=300.0)
    learn.add_argument("--seeds", type=int, nargs="+", default=[0])
    learn.add_argument("--source", default="shakespeare", help="a choice of the group data, see conf/data")
    learn.add_argument("--picture", type=Path, help="draws the loss against seconds and tokens (extra: plots)")
    learn.add_argument("overrides", nargs="*", help="of train.py, such as model.n_layers=6")

    generate = command("generate", "tokens per second of writing, llama2.c's shape")
    generate.add_argument("--new-tokens", type=whole, default=256, help="in each row")
    generate.add_argument("--batch", type=whole, default=16, help="rows at once, beside one")
    generate.add_argument("--far", type=whole, default=2000, help="a position to compare with 100")

    of_data = command("data", "text to shards to batches")
    of_data.add_argument("--source", default="shakespeare", help="a choice of the group data, see conf/data")
    of_data.add_argument("--megabytes", type=whole, default=100, help="of text")

    for one in (train, length, generate):
        one.add_argument("--threads", type=whole, default=torch.get_num_threads(), help="of the CPU")
        one.add_argument("--device", default="cpu", help="cpu or cuda")
    for one, whose in ((train, "nanoGPT"), (learn, "nanoGPT"), (generate, "llama2.c")):
        one.add_argument("--peer", type=Path, help=f"a checkout of {whose} to race against")

    a = parser.parse_args()
    guard_output()
    for path in (a.json, getattr(a, "picture", None)):
        if path is not None and (path.is_dir() or not os.access(path.parent, os.W_OK)):
            parser.error(f"{path} cannot be written: give a file in a folder that is there")
    if a.what in ("train", "length", "generate"):
        torch.set_num_threads(a.threads)
    if getattr(a, "peer", None) is not None and not a.peer.is_dir():
        sys.exit(f"error: --peer must be a folder with a checkout, got {a.peer}")
    if a.what == "data":
        results = data(a.source, a.megabytes, a.rounds)
    elif a.what == "generate":
        results = generation(a.new_tokens, a.batch, a.far, a.rounds, a.threads, a.device, a.peer)
    elif a.what == "length":
        results = lengths(a.shape, a.seq_lens, a.rounds, a.seconds, a.device)
    elif a.what == "learn":
        results = learning(a.seconds, a.seeds, a.source, a.peer, a.overrides, a.picture)
    else:
        given = ("d_model", "n_layers", "n_heads", "vocabulary", "rows", "seq_len")
        changes = {name: getattr(a, name) for name in given if getattr(a, name) is not None}
        results = training(a.shape, changes, a.rounds, a.seconds, a.device, a.peer)
    if a.json is not None:
        machine = {"cores": len(os.sched_getaffinity(0)), "torch": torch.__version__}
        a.json.write_text(json.dumps(machine | {"results": results}, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
