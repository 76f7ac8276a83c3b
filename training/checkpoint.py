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

import contextlib
import hashlib
import json
import math
import os
import pickle
import re
import secrets
import shutil
from collections.abc import Callable
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NotRequired, get_args, get_type_hints

import torch
from pydantic import Field, FiniteFloat, InstanceOf
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from typing_extensions import TypedDict

from data.config import DataConfig, TokenizerConfig
from data.files import check_shape, read_json
from data.older import renamed, weight_name
from model import GPT, ModelConfig
from training import estimate
from training.distributed import gather_full
from training.run_folder import override

FORMAT = 2
OLDER = (1,)  # with other names, see data/older.py

# --- what stands in the files ---------------------------------------------------------------------------------------

Whole = Annotated[int, Field(ge=0, lt=2**63)]
Count = Annotated[int, Field(ge=1, lt=2**63)]
Precision = Literal["fp32", "bf16", "fp16"]


class Facts(TypedDict):
    size: Whole
    sha256: str


class Manifest(TypedDict):
    format: int
    files: dict[str, Facts]


FIELDS = fields(ModelConfig)


def _shape_of_arguments() -> Any:
    """Of what model.json calls a model's arguments: the size of its vocabulary, and ModelConfig, whose rules follow."""
    stricter = {int: Count, int | None: Count | None, float: FiniteFloat, float | None: FiniteFloat | None, bool: bool}
    kinds = get_type_hints(ModelConfig).items()
    words = {name: str | None if type(None) in get_args(kind) else str for name, kind in kinds}
    shapes: dict[str, Any] = {name: stricter.get(kind, words[name]) for name, kind in kinds}
    needed = {one.name for one in FIELDS if one.default is MISSING}
    shapes = {name: kind if name in needed else NotRequired[kind] for name, kind in shapes.items()}
    return TypedDict("Arguments", {"vocab_size": Count, **shapes})  # type: ignore[operator]


if TYPE_CHECKING:
    Arguments = dict[str, Any]
else:  # from its fields, which no type checker reads
    Arguments = _shape_of_arguments()


class LearnedFrom(TypedDict):
    folder: str
    fingerprint: str


class About(TypedDict):
    """model.json, as far as it is read here."""

    arguments: Arguments  # see model_of and arguments_of
    step: Whole
    seq_len: Count
    precision: Precision
    loss: NotRequired[float]
    val_loss: NotRequired[float]
    compared_loss: NotRequired[float]
    data: NotRequired[dict | None]
    tokenizer: NotRequired[dict]
    tokenizer_hash: NotRequired[str]
    batch_order: NotRequired[int]
    corpus: NotRequired[LearnedFrom]


class OptimizerState(TypedDict):
    state: dict[Whole, dict[str, Any]]
    param_groups: list[dict[str, Any]]


class OptimizerSettings(TypedDict):
    name: str


class Settings(TypedDict):
    optimizer: OptimizerSettings


class RNG(TypedDict):
    cpu: InstanceOf[Tensor]
    cuda: list[InstanceOf[Tensor]]


class Sample(TypedDict):
    step: Whole
    prompt: str
    text: str


class GuardState(TypedDict, total=False):
    """training.gate.Guard; older ones lack some."""

    losses: list[FiniteFloat]
    skip: list[Whole]
    skipped: Whole
    in_a_row: Whole
    spikes: Whole
    rollbacks: Whole
    lowest: float
    lowest_step: Whole | None
    waited: Whole


class Choices(TypedDict, total=False):
    precision: Precision
    kernels: bool
    compile: bool
    attention: str
    micro_batch: Count


class Training(TypedDict):
    """training.pt."""

    optimizer: OptimizerState
    scaler: dict[str, Any]
    rng: list[RNG]
    samples: list[Sample]
    guard: GuardState
    choices: Choices
    corpus: str
    config: Settings
    wandb_id: str | None


# --- writing --------------------------------------------------------------------------------------------------------


def save(
    folder: Path,
    weights: dict[str, Tensor],
    save_tokenizer: Callable[[Path], None],
    about: dict,
    training: dict | None = None,
):
    """Writes the step folder. `about` goes into model.json, `training` (plain types and tensors) into training.pt.

    `weights` and about["arguments"] are those of a model, see `snapshot`. Without `training`, as for a model that came
    from elsewhere, there is no training.pt and nothing to resume.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = folder.parent / f".{folder.name}.{secrets.token_hex(4)}"
    replaced = beside.with_name(f"{beside.name}.old")
    beside.mkdir()
    try:
        save_file(weights, beside / "model.safetensors")
        _write_json(beside / "model.json", {"format": FORMAT, **about})
        save_tokenizer(beside / "tokenizer")
        if training is not None:
            torch.save(training, beside / "training.pt")
        files = sorted(path for path in beside.rglob("*") if path.is_file())
        for path in files:
            flush(path)
        _write_json(
            beside / "manifest.json",
            {"format": FORMAT, "files": {path.relative_to(beside).as_posix(): _facts(path) for path in files}},
        )
        for path in [beside / "manifest.json", *(p for p in beside.rglob("*") if p.is_dir()), beside]:
            flush(path)
        if os.path.lexists(folder):  # the same step again, from a run resumed before it
            rename(folder, replaced)
        rename(beside, folder)
        flush(folder.parent)
        with contextlib.suppress(OSError):
            remove(replaced)
    finally:
        shutil.rmtree(beside, ignore_errors=True)  # only there if something failed


def snapshot(model: GPT) -> tuple[dict[str, Tensor], dict]:
    """(weights, {"arguments": ...}) of a model as they are now, on the CPU and whole, for `save`; a tied head once."""
    weights = model.state_dict()
    if model.config.tied:
        del weights["head.weight"]
    return gather_full({name: tensor.contiguous() for name, tensor in weights.items()}), {
        "arguments": arguments_of(model)
    }


def arguments_of(model: GPT) -> dict[str, Any]:
    """What model.json says of how a model is built."""
    c = model.config
    dropout = c.dropout if c.attention_dropout is None else c.attention_dropout
    return {"vocab_size": model.vocab_size, **asdict(c), "attention_dropout": dropout}


def model_of(arguments: dict[str, Any]) -> tuple[int, ModelConfig]:
    """The size of the vocabulary, and the rest, of what model.json says."""
    config = dict(arguments)
    return config.pop("vocab_size"), ModelConfig(**config)


# Every moment at which the disk changes its mind passes through these two, so that tests can kill a process there.


def flush(path: Path):
    """Waits until the disk has a file, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename(before: Path, after: Path):
    os.rename(before, after)


def remove(path: Path):
    """A folder with all that is in it; of a link the link alone, since what it points at may be another run's."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path)


def _write_json(path: Path, content: dict):
    path.write_text(json.dumps(content, indent=2), encoding="utf-8")


def _facts(path: Path) -> dict:
    with path.open("rb") as file:
        return {"size": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


# --- reading --------------------------------------------------------------------------------------------------------


def check(folder: Path, for_training: bool = True, only: str | None = None):
    """ValueError unless every file, or one, is what the manifest says; without for_training, training.pt may be any."""
    if not (folder / "manifest.json").exists():
        raise ValueError(f"{folder} is no checkpoint: manifest.json is missing")
    manifest = read_json(folder / "manifest.json", Manifest)
    files, found = manifest["files"], manifest["format"]
    if found not in (*OLDER, FORMAT):
        raise ValueError(f"{folder} has format {found}, this version reads formats up to {FORMAT}")
    for name in dict.fromkeys(["model.safetensors", "model.json", "training.pt", *files]) if only is None else [only]:
        path = folder / name
        if name == "training.pt" and not for_training:
            continue
        if name not in files or not path.is_file():
            raise ValueError(f"{path} is missing")
        if (facts := _facts(path)) != files[name]:
            raise ValueError(f"{path} is damaged: it is {facts}, the manifest has {files[name]}")


def step_folder(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step_{step:08}"


def steps(run: Path) -> list[Path]:
    """The step folders of a run, the newest first."""
    found = [p for p in (run / "checkpoints").glob("step_*") if re.fullmatch(r"step_\d+", p.name)]
    return sorted(found, key=step_of, reverse=True)


def val_loss(folder: Path) -> float:
    """What checkpoints are compared by, as model.json has it: the loss on the same part of the text; inf if unknown."""
    about = read_about(folder)
    loss = about.get("compared_loss", about.get("val_loss"))
    return loss if isinstance(loss, int | float) and math.isfinite(loss) else math.inf


def best_first(folders: list[Path], warn: Callable[[str], None] = lambda _: None) -> list[Path]:
    """Those whose validation loss is known, the lowest first; where it cannot be, that is said."""
    losses = {}
    for folder in folders:
        try:
            check(folder, only="model.json")
            losses[folder] = val_loss(folder)
        except ValueError as error:
            warn(f"skipping a checkpoint: {error}")
    return sorted((folder for folder, loss in losses.items() if loss < math.inf), key=losses.get)


def find(path: str | Path, for_training: bool = False, warn: Callable[[str], None] = print) -> Path:
    """The step folder that `path` means: itself, or a run folder's newest valid one; what is damaged is named.

    RUN:best is the one with the lowest validation loss, of those that are saved and valid, RUN:1200 that of a step.
    for_training: training.pt must be there and whole too.
    """
    path, which = Path(path), None
    if not path.exists() and (named := re.fullmatch(r"(.+):(best|\d+)", str(path))):
        path, which = Path(named[1]), named[2]
    if not path.is_dir():
        raise ValueError(f"there is no checkpoint at {path}: give a run folder or a step folder")
    if (path / "model.json").exists() or (path / "manifest.json").exists():
        if which is not None:
            raise ValueError(f"{path} is one checkpoint: give {path}, or RUN:{which} with the folder of a run")
        check(path, for_training)
        return path
    candidates = there = steps(path)
    if which == "best":
        candidates = best_first(there, warn)
        if there and not candidates:
            raise ValueError(f"no checkpoint of {path} has a validation loss: give {path}:STEP, {_steps(there)}")
    elif which is not None:
        candidates = [folder for folder in there if step_of(folder) == int(which)]
        if not candidates:
            raise ValueError(f"{path} has no checkpoint of step {which}: {_steps(there)}")
        check(candidates[0], for_training)
    for i, candidate in enumerate(candidates):
        try:
            check(candidate, for_training)
        except ValueError as error:
            warn(f"skipping a checkpoint: {error}")
            continue
        if which == "best" and i:
            warn(f"the best of the others is {candidate}")
        return candidate
    what = f"{len(candidates)} there, none valid" if candidates else "no checkpoints/step_* in it"
    raise ValueError(f"there is no checkpoint in {path}: {what}")


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step_"))


def _steps(folders: list[Path]) -> str:
    numbers = ", ".join(str(step_of(folder)) for folder in reversed(folders))
    return f"there are {numbers}" if folders else "there is none"


CLEARLY = 1.01  # times the lowest loss: more is clearly worse


def best_and_last(run: Path) -> tuple[Path, float, float] | None:
    """(the best checkpoint, its validation loss, that of the newest or inf); None if the newest is the best."""
    saved, ranked = steps(run), best_first(steps(run))
    if not ranked or ranked[0] == saved[0]:
        return None
    best = ranked[0]
    return best, val_loss(best), val_loss(saved[0]) if saved[0] in ranked else math.inf


def describe_best(run: Path) -> str | None:
    """In a line, the best checkpoint of a run, how to name it, and whether the newest is clearly worse."""
    if (found := best_and_last(run)) is None:
        return None
    best, loss, last = found
    line = f"checkpoint={run}:best is step {step_of(best)}, validation loss {loss:.4f}; "
    if last == math.inf:
        return line + "the last is not measured"
    return line + f"the last, {last:.4f}, is " + ("clearly worse" if last > CLEARLY * loss else "not much worse")


def read_about(folder: Path) -> About:
    """model.json: `arguments`, `seq_len`, `step` and more."""
    path = folder / "model.json"
    about = renamed(read_json(path, About))
    if unknown := set(about["arguments"]) - {"vocab_size", *(one.name for one in FIELDS)}:
        raise ValueError(f"{path} is of another version: a model has no argument {unknown.pop()!r}")
    return about


def text_of(about: About, folder: Path) -> tuple[DataConfig, TokenizerConfig] | None:
    """The settings of the text that a checkpoint has learned from; None where it names none. ValueError if damaged."""
    if about.get("data") is None or "tokenizer" not in about:
        return None
    where = folder / "model.json"
    data = check_shape(about["data"], DataConfig, f"data in {where}")
    return data, check_shape(about["tokenizer"], TokenizerConfig, f"tokenizer in {where}")


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Under the names that the model's parameters have; a tied head has the embedding's."""
    weights = {weight_name(name): tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    if "head.weight" not in weights:
        weights["head.weight"] = weights["embedding.weight"]
    return weights


def sizes(path: Path) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of a safetensors file, from its header; no tensor is read. ValueError if it is damaged.

    Of numbers with a fraction, in 2 bytes or more: others are no weights.
    """
    found = {}
    try:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                tensor = file.get_slice(name)
                if (kind := tensor.get_dtype()) not in ("F64", "F32", "F16", "BF16"):
                    raise ValueError(f"{path} is damaged: {name} holds {kind}, no weights")
                found[weight_name(name)] = tuple(tensor.get_shape())
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    return found


def check_arguments(arguments: dict[str, Any], found: dict[str, tuple[int, ...]], where: Path, mismatch: str):
    """ValueError unless their model has weights of the shapes `found`, and the memory of this machine suffices.

    Found out without building it, however large the arguments say that it is.
    """
    for name, most in (("n_layers", len(found)), ("d_model", sum(map(math.prod, found.values())))):
        if arguments[name] > most:
            raise ValueError(f"{mismatch}: {name} is {arguments[name]}, the weights are too few for more than {most}")
    try:
        vocab_size, config = model_of(arguments)
        model = estimate.meta_model(vocab_size, config)
    except (ValueError, RuntimeError) as error:  # RuntimeError: of torch, for more numbers than can be counted
        raise ValueError(f"{mismatch}: {str(error).splitlines()[0]}") from error
    check_sizes(found, model, mismatch)
    _, n_bytes = estimate.size(vocab_size, config)
    estimate.check_fits(f"the model of {where}, with max_seq_len {config.max_seq_len},", n_bytes)


def check_sizes(found: dict[str, tuple[int, ...]], model: GPT, mismatch: str):
    """ValueError unless `found`, the shapes of weights by their names, are the model's; which may be without numbers.

    A tied head is no weight of its own.
    """
    expected = {name: tuple(weight.shape) for name, weight in model.state_dict().items()}
    if model.config.tied:
        del expected["head.weight"]
    for name in [*expected, *found]:
        if found.get(name) != expected.get(name):
            there, wanted = (some.get(name, "missing") for some in (found, expected))
            wanted = f"the model's is {wanted}" if name in expected else "the model has none"
            raise ValueError(f"{mismatch}: {name} is {there}, {wanted}")


def load_weights(folder: Path, model: GPT):
    """Into a model of the same shape."""
    check_sizes(sizes(folder / "model.safetensors"), model, f"{folder} holds another model")
    model.load_state_dict(read_weights(folder))


def load_model(path: str | Path, device: str | torch.device = "cpu", *, finite: bool = True, **changes) -> GPT:
    """The model of a run or step folder, in evaluation mode. Needs no corpus, no tokenizer and no training.pt.

    finite: ValueError where a weight is NaN or infinite, since nothing can be told by such a model but that.
    `changes`: arguments of GPT in the place of the saved ones, such as those that let a model with RoPE read four times
    as far as it was trained: max_seq_len=512, rope_scaling="yarn", rope_factor=4.0.
    """
    folder = find(path)
    arguments = {**read_about(folder)["arguments"], **changes}
    check_arguments(arguments, sizes(folder / "model.safetensors"), folder, f"{folder} holds another model")
    model = GPT(*model_of(arguments))
    load_weights(folder, model)
    if finite and (name := not_finite(model)) is not None:
        raise ValueError(f"{folder}: {name} holds numbers that are not finite: did its training diverge?")
    return model.to(device).eval()


def not_finite(model: GPT) -> str | None:
    """The first weight that holds NaN or infinity."""
    return next((name for name, weight in model.named_parameters() if not weight.isfinite().all()), None)


def check_same_model(folder: Path, model: GPT):
    """ValueError unless the model is that of the checkpoint, but for its dropout and how new weights begin."""
    saved = {one.name: one.default for one in FIELDS} | read_about(folder)["arguments"]
    free = ("dropout", "attention_dropout", "zero_init")
    other = {name: value for name, value in arguments_of(model).items() if name not in free and saved[name] != value}
    if other:
        these, those = (" ".join(override(f"model.{name}", of[name]) for name in other) for of in (saved, other))
        raise ValueError(f"{folder} has {these}, this run {those}: they must be the same")


def check_same_tokenizer(folder: Path, tokenizer):
    """ValueError unless the checkpoint's gives the same ids."""
    about = read_about(folder)
    if about.get("tokenizer_hash") != tokenizer.fingerprint():
        raise ValueError(
            f"{folder} has learned with another tokenizer, of {about['arguments']['vocab_size']} tokens, than this "
            f"run's, of {tokenizer.vocab_size}: take tokenizer=saved tokenizer.path={folder / 'tokenizer'}"
        )


def load_training(folder: Path) -> Training:
    """training.pt; a pickle that holds more than plain types and tensors is refused, not run."""
    path = folder / "training.pt"
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        reason = " ".join(str(error).split("\n")[0].split())
        raise ValueError(f"{path} holds more than numbers and is not opened: {reason}") from error
    except Exception as error:  # of torch's reader of archives, of several kinds
        raise ValueError(f"{path} is damaged: {' '.join(str(error).split())}") from error
    return check_shape(renamed(saved), Training, str(path))
