"""Checkpoints: folders that exist whole or not at all.

    RUN/checkpoints/step_00001000/
        model.safetensors   the weights; a tied head once
        model.json          what GPT(...) needs to build it again, and where the run stood
        tokenizer/          what load_tokenizer needs
        training.pt         what resuming needs besides: optimizer, RNG states, choices
        manifest.json       size and sha256 of every file above; written last

A folder is written beside, flushed to the disk and renamed in. A reader checks every file against the manifest; for
sampling, training.pt may be missing.
"""

import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from model.gpt import GPT

FORMAT = 1


def save(
    folder: Path,
    model: GPT,
    save_tokenizer: Callable[[Path], None],
    about: dict,
    training: dict | None = None,
):
    """Writes the step folder. `about` goes into model.json, `training` (plain types and tensors) into training.pt.

    Without `training`, as for a model that came from elsewhere, there is no training.pt and nothing to resume.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = folder.parent / f".{folder.name}.{secrets.token_hex(4)}"
    replaced = beside.with_name(f"{beside.name}.old")
    beside.mkdir()
    try:
        _save_weights(beside / "model.safetensors", model)
        _write_json(beside / "model.json", {"format": FORMAT, "arguments": model.arguments, **about})
        save_tokenizer(beside / "tokenizer")
        if training is not None:
            torch.save(training, beside / "training.pt")
        files = sorted(path for path in beside.rglob("*") if path.is_file())
        _write_json(
            beside / "manifest.json",
            {"format": FORMAT, "files": {path.relative_to(beside).as_posix(): _facts(path) for path in files}},
        )
        for path in [*files, beside / "manifest.json", *(p for p in beside.rglob("*") if p.is_dir()), beside]:
            _flush(path)
        if folder.exists():  # the same step again, from a run resumed before it
            os.rename(folder, replaced)
        os.rename(beside, folder)
        _flush(folder.parent)
        shutil.rmtree(replaced, ignore_errors=True)
    finally:
        shutil.rmtree(beside, ignore_errors=True)  # only there if something failed


def _save_weights(path: Path, model: GPT):
    weights = model.state_dict()
    if model.arguments["tied"]:
        del weights["head.weight"]
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, path)


def _write_json(path: Path, content: dict):
    path.write_text(json.dumps(content, indent=2), encoding="utf-8")


def _facts(path: Path) -> dict:
    with path.open("rb") as file:
        return {"size": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _flush(path: Path):
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- reading --------------------------------------------------------------------------------------------------------


def check(folder: Path, for_training: bool = True):
    """ValueError unless every file is what the manifest says; without for_training, training.pt may be anything."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        files, found = manifest["files"], manifest["format"]
    except FileNotFoundError:
        raise ValueError(f"{folder} is no checkpoint: manifest.json is missing") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder}/manifest.json is damaged: {error}") from None
    if found != FORMAT:
        raise ValueError(f"{folder} has format {found}, this version reads {FORMAT}")
    for name in dict.fromkeys(["model.safetensors", "model.json", "training.pt", *files]):
        path = folder / name
        if name == "training.pt" and not for_training:
            continue
        if name not in files or not path.is_file():
            raise ValueError(f"{path} is missing")
        if (facts := _facts(path)) != files[name]:
            raise ValueError(f"{path} is damaged: it is {facts}, the manifest has {files[name]}")


def steps(run: Path) -> list[Path]:
    """The step folders of a run, the newest first."""
    found = [p for p in (run / "checkpoints").glob("step_*") if re.fullmatch(r"step_\d+", p.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step_")), reverse=True)


def find(path: str | Path, for_training: bool = False, warn: Callable[[str], None] = print) -> Path:
    """The step folder that `path` means: itself, or a run folder's newest valid one; what is damaged is named.

    for_training: training.pt must be there and whole too.
    """
    path = Path(path)
    if not path.is_dir():
        raise ValueError(f"there is no checkpoint at {path}: give a run folder or a step folder")
    if (path / "model.json").exists() or (path / "manifest.json").exists():
        check(path, for_training)
        return path
    candidates = steps(path)
    for candidate in candidates:
        try:
            check(candidate, for_training)
            return candidate
        except ValueError as error:
            warn(f"skipping a checkpoint: {error}")
    what = f"{len(candidates)} there, none valid" if candidates else "no checkpoints/step_* in it"
    raise ValueError(f"there is no checkpoint in {path}: {what}")


def read_about(folder: Path) -> dict:
    """model.json: `arguments`, `seq_len`, `step` and more."""
    return json.loads((folder / "model.json").read_text(encoding="utf-8"))


def load_weights(folder: Path, model: GPT):
    """Into a model of the same shape."""
    weights = load_file(folder / "model.safetensors")
    if model.arguments["tied"]:
        weights["head.weight"] = weights["embedding.weight"]
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise ValueError(f"{folder} holds another model: {' '.join(str(error).split())}") from error


def load_model(path: str | Path, device: str | torch.device = "cpu", **changes) -> GPT:
    """The model of a run or step folder, in evaluation mode. Needs no corpus, no tokenizer and no training.pt.

    `changes`: arguments of GPT in the place of the saved ones, such as those that let a model with RoPE read four times
    as far as it was trained: max_seq_len=512, rope_scaling="yarn", rope_factor=4.0.
    """
    folder = find(path)
    model = GPT(**{**read_about(folder)["arguments"], **changes})
    load_weights(folder, model)
    return model.to(device).eval()


def check_same_model(folder: Path, model: GPT):
    """ValueError unless the model is that of the checkpoint, but for its dropout."""
    with torch.device("meta"):
        saved = GPT(**read_about(folder)["arguments"]).arguments
    for name, value in model.arguments.items():
        if name != "dropout" and saved[name] != value:
            raise ValueError(f"{folder} has model.{name} {saved[name]}, this run {value}: they must be the same")


def set_aside(run: Path, step: int):
    """Hides what a run saved after `step`, where it goes on from there."""
    for folder in steps(run):
        if int(folder.name.removeprefix("step_")) > step:
            folder.rename(folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.old"))


def load_training(folder: Path) -> dict:
    """training.pt; a pickle that holds more than plain types and tensors is refused, not run."""
    return torch.load(folder / "training.pt", map_location="cpu", weights_only=True)


def rng_state() -> dict:
    """Every random state that training draws from."""
    return {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []}


def set_rng_state(state: dict):
    torch.set_rng_state(state["cpu"])
    if len(state["cuda"]) == torch.cuda.device_count() > 0:
        torch.cuda.set_rng_state_all(state["cuda"])
