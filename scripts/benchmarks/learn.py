"""learn: the validation loss after a given time, next to nanoGPT, each with its own program."""

import importlib.util
import json
import math
import pickle
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from conf.entry import REPOSITORY
from data.corpus import Corpus
from insight.drawing import pyplot
from model.functional import cross_entropy
from scripts.benchmarks.measure import prepared, table
from training.evaluation import evaluate

# nanoGPT's recipe for a CPU, from its README; the number of iterations is chosen to fill the time
NANOGPT = {"batch_size": 12, "block_size": 64, "n_layer": 4, "n_head": 4, "n_embd": 128, "dropout": 0.0}
NANOGPT |= {"eval_iters": 20, "log_interval": 10, "compile": False, "device": "cpu", "dtype": "float32"}
COLORS = {"inkling": "tab:blue", "nanoGPT": "tab:orange"}


def learning(
    seconds: float, seeds: list[int], source: str, peer: Path | None, overrides: list[str], picture: Path | None
) -> list[dict]:
    """Runs train.py with its defaults and these overrides, and nanoGPT's recipe on the same text as characters."""
    runs: dict[str, list[dict]] = {"inkling": []}
    _, characters = prepared(source, "chars")
    prepared(source, "bpe")  # before the time starts
    root = Path("runs") / f"learn-{time.strftime('%Y%m%d-%H%M%S')}"
    for seed in seeds:
        if peer is not None:
            print(f"nanoGPT, seed {seed}", file=sys.stderr)
            with tempfile.TemporaryDirectory() as folder:
                runs.setdefault("nanoGPT", []).append(nanogpt(peer, characters, seconds, seed, Path(folder)))
        print(f"inkling, seed {seed}", file=sys.stderr)
        settings = [f"data={source}", f"max_time={seconds:.0f}s", f"seed={seed}", *overrides]
        runs["inkling"].append(ours(settings, root / str(seed)))

    results = []
    for name, unit in (("val_bpb", "bits per byte"), ("val_loss", "nats per token"), ("seconds", "s")):
        values = {who: [run[name] for run in of_one] for who, of_one in runs.items()}
        results.append(table(f"validation text, {source}", unit, values, "nanoGPT" if peer else None, digits=4))
    print(f"inkling's loss on the last batches {[run['training_loss'] for run in runs['inkling']]}")
    if peer is not None:
        goal = statistics.median(run["val_bpb"] for run in runs["nanoGPT"])
        reached = [next((at for at, _, bits in run["curve"] if bits <= goal), math.inf) for run in runs["inkling"]]
        took = [run["seconds"] for run in runs["nanoGPT"]]
        what = f"seconds to {goal:.3f} bits per byte, evaluations included"
        results.append(table(what, "s", {"nanoGPT": took, "inkling": reached}, "nanoGPT"))
    if picture is not None:
        draw(runs, picture)
    return [*results, {"runs": runs}]


def draw(runs: dict[str, list[dict]], path: Path):
    """Plots validation bits per byte over seconds and over tokens."""
    figure, axes = pyplot().subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
    for axis, x, label in ((axes[0], 0, "seconds since the program was started"), (axes[1], 1, "tokens, millions")):
        for who, of_one in runs.items():
            for i, run in enumerate(of_one):
                at = [point[x] / (1e6 if x else 1) for point in run["curve"]]
                bits = [point[2] for point in run["curve"]]
                axis.plot(at, bits, color=COLORS[who], marker=".", markersize=4, label=who if i == 0 else None)
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("bits per byte, validation text")
    axes[0].set_ylim(
        top=min(4.5, max(point[2] for of_one in runs.values() for run in of_one for point in run["curve"]))
    )
    axes[0].legend()
    figure.savefig(path, dpi=110)
    pyplot().close(figure)


def lines(command: list, folder: Path, log: Path) -> Iterator[tuple[float, str]]:
    """Yields (seconds since the start, line) for the output of a command; ValueError if it fails."""
    began = time.perf_counter()
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            [str(part) for part in command], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for line in process.stdout:
            file.write(line)
            yield time.perf_counter() - began, line
        if process.wait():
            raise ValueError(f"{' '.join(map(str, command))} failed, see {log}")


def ours(overrides: list[str], folder: Path) -> dict:
    """Runs train.py, from its first import to its end -> its seconds, its curve and its last validation loss."""
    command = [sys.executable, REPOSITORY / "train.py", "tracking.mode=disabled", f"hydra.run.dir={folder}", *overrides]
    folder.parent.mkdir(parents=True, exist_ok=True)
    curve = []
    for seconds, line in lines(command, Path.cwd(), folder.parent / f"{folder.name}.log"):
        if found := re.search(r"^step +(\d+)/.*\(([\d.]+) bpb\)", line):
            curve.append((seconds, int(found[1]), float(found[2])))
            print(f"  {seconds:6.0f} s  {curve[-1][2]:.3f} bits per byte", file=sys.stderr)
    row = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    tokens_per_step = row["tokens"] / row["step"]
    return {
        "seconds": seconds,
        "val_bpb": row["val_bpb"],
        "val_loss": row["val_loss"],
        "training_loss": row["loss"],
        "tokens": row["tokens"],
        "curve": [(s, step * tokens_per_step, bits) for s, step, bits in curve],
    }


def nanogpt(checkout: Path, corpus: Corpus, seconds: float, seed: int, folder: Path) -> dict:
    """Runs nanoGPT's train.py, with the recipe for a CPU from its README, on the same text as characters.

    A short run shows how many iterations fill the time; then the real one, whose learning rate decays over just these.
    """
    copy = folder / "nanoGPT"
    shutil.copytree(checkout, copy, ignore=shutil.ignore_patterns(".git"))
    text = copy / "data/plays"
    text.mkdir()
    for name, part in (("train", corpus.train), ("val", corpus.validation)):
        part.read(0, len(part)).astype("uint16").tofile(text / f"{name}.bin")
    (text / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": corpus.tokenizer.vocab_size}))
    size = corpus.tokenizer.bytes_per_token()[corpus.validation.read(0, len(corpus.validation))].sum()
    bits = len(corpus.validation) / size / math.log(2)  # per byte, for a nat per token
    # its seed is a number in its source
    source = re.sub(r"manual_seed\(\d+", f"manual_seed({1337 + seed}", (copy / "train.py").read_text())
    (copy / "train.py").write_text(source)

    def run(iterations: int, every: int) -> tuple[float, list]:
        settings = NANOGPT | {"max_iters": iterations, "lr_decay_iters": iterations, "eval_interval": every}
        command = [sys.executable, "train.py", "config/train_shakespeare_char.py", "--dataset=plays"]
        curve, last = [], 0.0
        for at, line in lines(
            command + [f"--{name}={value}" for name, value in settings.items()], copy, folder / "log"
        ):
            if found := re.match(r"step (\d+): train loss [\d.]+, val loss ([\d.]+)", line):
                tokens = int(found[1]) * settings["batch_size"] * settings["block_size"]
                curve.append((at, tokens, float(found[2]) * bits))
                print(f"  {at:6.0f} s  {curve[-1][2]:.3f} bits per byte (its estimate)", file=sys.stderr)
            last = at
        return last, curve

    trial = 300
    short, _ = run(1, 10**9)
    longer, _ = run(trial, 10**9)
    per_iteration, evaluations = (longer - short) / (trial - 1), 20
    iterations = int((seconds - short) / per_iteration * 0.97)  # the rest of the time is for its evaluations
    took, curve = run(iterations, max(1, iterations // evaluations))

    model = Peer(copy)
    result = evaluate(
        model,
        corpus.validation.read,
        len(corpus.validation),
        corpus.tokenizer.bytes_per_token(),
        seq_len=NANOGPT["block_size"],
    )
    return {
        "seconds": took,
        "val_bpb": result.bits_per_byte,
        "val_loss": result.loss,
        "tokens": iterations * NANOGPT["batch_size"] * NANOGPT["block_size"],
        "curve": curve,
    }


class Peer(nn.Module):
    """The best checkpoint of a finished run in a checkout of nanoGPT, with the signature of our models."""

    def __init__(self, checkout: Path):
        super().__init__()
        spec = importlib.util.spec_from_file_location("nanogpt", checkout / "model.py")
        code = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(code)
        saved = torch.load(checkout / "out-shakespeare-char/ckpt.pt", map_location="cpu", weights_only=True)
        self.model = code.GPT(code.GPTConfig(**saved["model_args"]))
        self.model.load_state_dict(saved["model"])

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits, _ = self.model(tokens, targets.clamp(min=0))  # without targets it computes only the last logits
        return cross_entropy(logits, targets)
