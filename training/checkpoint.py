"""The checkpoint format: folders that are either complete or absent.

    RUN/checkpoints/step_00001000/
        model.safetensors   the weights; a tied head once
        model.json          the model's arguments, and where the run stood
        tokenizer/          what load_tokenizer needs
        training.pt         what resuming needs besides: optimizer, RNG states, choices
        manifest.json       size and sha256 of every file above; written last

A folder is written under a temporary name next to its place, flushed to the disk and renamed. A reader checks every
file against the manifest; for sampling, training.pt may be missing.
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

# --- the content of the files ---------------------------------------------------------------------------------------

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
    """The type of `arguments` in model.json: vocab_size and ModelConfig's fields, whose rules are checked later."""
    stricter = {int: Count, int | None: Count | None, float: FiniteFloat, float | None: FiniteFloat | None, bool: bool}
    kinds = get_type_hints(ModelConfig).items()
    words = {name: str | None if type(None) in get_args(kind) else str for name, kind in kinds}
    shapes: dict[str, Any] = {name: stricter.get(kind, words[name]) for name, kind in kinds}
    needed = {one.name for one in FIELDS if one.default is MISSING}
    shapes = {name: kind if name in needed else NotRequired[kind] for name, kind in shapes.items()}
    return TypedDict("Arguments", {"vocab_size": Count, **shapes})  # type: ignore[operator]


if TYPE_CHECKING:
    Arguments = dict[str, Any]
else:  # made from ModelConfig's fields, which a type checker cannot follow
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
    """training.gate.Guard; older checkpoints lack some of these."""

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

    `weights` and about["arguments"] are what `snapshot` returns. Without `training`, as for an imported model, there is
    no training.pt, and the checkpoint cannot be resumed.
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
    """(weights, {"arguments": ...}) of a model as it is now, gathered on the CPU, for `save`; a tied head once."""
    weights = model.state_dict()
    if model.config.tied:
        del weights["head.weight"]
    return gather_full({name: tensor.contiguous() for name, tensor in weights.items()}), {
        "arguments": arguments_of(model)
    }


def arguments_of(model: GPT) -> dict[str, Any]:
    """A model's entry `arguments` in model.json."""
    c = model.config
    dropout = c.dropout if c.attention_dropout is None else c.attention_dropout
    return {"vocab_size": model.vocab_size, **asdict(c), "attention_dropout": dropout}


def model_of(arguments: dict[str, Any]) -> tuple[int, ModelConfig]:
    """(vocab_size, ModelConfig) of the entry `arguments` in model.json."""
    config = dict(arguments)
    return config.pop("vocab_size"), ModelConfig(**config)


# Every change of the disk's state goes through these two functions, so that tests can kill a process there.


def flush(path: Path):
    """Waits until a file, or the names in a folder, are on the disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename(before: Path, after: Path):
    os.rename(before, after)


def remove(path: Path):
    """Removes a folder with its content; of a link only the link, since its target may belong to another run."""
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
    """ValueError unless every file, or `only` one, matches the manifest; training.pt is checked if for_training."""
    if not (folder / "manifest.json").exists():
        raise ValueError(f"{folder} is not a checkpoint: manifest.json is missing")
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
    """The validation loss that checkpoints are compared by, on the same part of the text; inf if unknown."""
    about = read_about(folder)
    loss = about.get("compared_loss", about.get("val_loss"))
    return loss if isinstance(loss, int | float) and math.isfinite(loss) else math.inf


def best_first(folders: list[Path], warn: Callable[[str], None] = lambda _: None) -> list[Path]:
    """The folders whose validation loss is known, the lowest first; `warn` reports damaged ones."""
    losses = {}
    for folder in folders:
        try:
            check(folder, only="model.json")
            losses[folder] = val_loss(folder)
        except ValueError as error:
            warn(f"skipping a checkpoint: {error}")
    return sorted((folder for folder, loss in losses.items() if loss < math.inf), key=losses.get)


def find(path: str | Path, for_training: bool = False, warn: Callable[[str], None] = print) -> Path:
    """The step folder that `path` names: itself, or a run folder's newest valid one; `warn` reports damaged ones.

    RUN:best is the valid one with the lowest validation loss, RUN:1200 the one after step 1200.
    for_training: training.pt must be valid too.
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
            warn(f"using the best of the others, {candidate}")
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
    """A line on a run's best checkpoint, how to name it, and whether the newest is clearly worse."""
    if (found := best_and_last(run)) is None:
        return None
    best, loss, last = found
    line = f"checkpoint={run}:best is step {step_of(best)}, validation loss {loss:.4f}; "
    if last == math.inf:
        return line + "the last was not evaluated"
    return line + f"the last, {last:.4f}, is " + ("clearly worse" if last > CLEARLY * loss else "not much worse")


def read_about(folder: Path) -> About:
    """Reads model.json."""
    path = folder / "model.json"
    about = renamed(read_json(path, About))
    if unknown := set(about["arguments"]) - {"vocab_size", *(one.name for one in FIELDS)}:
        raise ValueError(f"{path} is from another version: this one's models have no argument {unknown.pop()!r}")
    return about


def text_of(about: About, folder: Path) -> tuple[DataConfig, TokenizerConfig] | None:
    """The settings of the text that a checkpoint was trained on; None if it has none. ValueError if damaged."""
    if about.get("data") is None or "tokenizer" not in about:
        return None
    where = folder / "model.json"
    data = check_shape(about["data"], DataConfig, f"data in {where}")
    return data, check_shape(about["tokenizer"], TokenizerConfig, f"tokenizer in {where}")


def read_weights(folder: Path) -> dict[str, Tensor]:
    """The weights by the names of the model's parameters; a tied head gets the embedding's."""
    weights = {weight_name(name): tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    if "head.weight" not in weights:
        weights["head.weight"] = weights["embedding.weight"]
    return weights


def sizes(path: Path) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of a safetensors file, from its header; no tensor is read.

    ValueError if the file is damaged, or a tensor is not of a floating-point type of at least 2 bytes.
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
    """ValueError unless a model of these arguments has weights of the shapes `found` and fits into memory.

    The model is not built, so that absurd sizes do no harm.
    """
    for name, most in (("n_layers", len(found)), ("d_model", sum(map(math.prod, found.values())))):
        if arguments[name] > most:
            raise ValueError(f"{mismatch}: {name} is {arguments[name]}, but the weights allow at most {most}")
    try:
        vocab_size, config = model_of(arguments)
        model = estimate.meta_model(vocab_size, config)
    except (ValueError, RuntimeError) as error:  # RuntimeError: of torch, for more numbers than can be counted
        raise ValueError(f"{mismatch}: {str(error).splitlines()[0]}") from error
    check_sizes(found, model, mismatch)
    _, n_bytes = estimate.size(vocab_size, config)
    estimate.check_fits(f"the model of {where}, with max_seq_len {config.max_seq_len},", n_bytes)


def check_sizes(found: dict[str, tuple[int, ...]], model: GPT, mismatch: str):
    """ValueError unless `found`, shapes by name, are those of the model's weights; the model may be on the meta device.

    A tied head does not count as a weight.
    """
    expected = {name: tuple(weight.shape) for name, weight in model.state_dict().items()}
    if model.config.tied:
        del expected["head.weight"]
    for name in [*expected, *found]:
        if found.get(name) != expected.get(name):
            there, needed = (shapes.get(name, "missing") for shapes in (found, expected))
            needed = f"the model's is {needed}" if name in expected else "the model has none"
            raise ValueError(f"{mismatch}: {name} is {there}, {needed}")


def load_weights(folder: Path, model: GPT):
    """Loads the weights into a model of the same shape."""
    check_sizes(sizes(folder / "model.safetensors"), model, f"{folder} holds another model")
    model.load_state_dict(read_weights(folder))


def load_model(path: str | Path, device: str | torch.device = "cpu", *, finite: bool = True, **changes) -> GPT:
    """The model of a run or step folder, in evaluation mode. Needs no corpus, no tokenizer and no training.pt.

    finite: raise a ValueError if a weight is NaN or infinite.
    `changes`: fields of ModelConfig that replace the saved ones; for example max_seq_len=512, rope_scaling="yarn",
    rope_factor=4.0 extend the context of a model with RoPE that was trained on 128 tokens.
    """
    folder = find(path)
    arguments = {**read_about(folder)["arguments"], **changes}
    check_arguments(arguments, sizes(folder / "model.safetensors"), folder, f"{folder} holds another model")
    model = GPT(*model_of(arguments))
    load_weights(folder, model)
    if finite and (name := not_finite(model)) is not None:
        raise ValueError(f"{folder}: {name} holds numbers that are not finite: did the training diverge?")
    return model.to(device).eval()


def not_finite(model: GPT) -> str | None:
    """The name of the first weight that holds NaN or infinity, or None."""
    return next((name for name, weight in model.named_parameters() if not weight.isfinite().all()), None)


def check_same_model(folder: Path, model: GPT):
    """ValueError unless the model's arguments are the checkpoint's; dropout and initialisation may differ."""
    saved = {one.name: one.default for one in FIELDS} | read_about(folder)["arguments"]
    free = ("dropout", "attention_dropout", "zero_init")
    other = {name: value for name, value in arguments_of(model).items() if name not in free and saved[name] != value}
    if other:
        these, those = (" ".join(override(f"model.{name}", of[name]) for name in other) for of in (saved, other))
        raise ValueError(f"{folder} has {these}, this run {those}: they must be the same")


def check_same_tokenizer(folder: Path, tokenizer):
    """ValueError unless the checkpoint's tokenizer gives the same ids."""
    about = read_about(folder)
    if about.get("tokenizer_hash") != tokenizer.fingerprint():
        raise ValueError(
            f"{folder} was trained with another tokenizer, of {about['arguments']['vocab_size']} tokens, than this "
            f"run's, of {tokenizer.vocab_size}: give tokenizer=saved tokenizer.path={folder / 'tokenizer'}"
        )


def load_training(folder: Path) -> Training:
    """Reads training.pt. A pickle with anything but plain types and tensors is refused; its code never runs."""
    path = folder / "training.pt"
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        reason = " ".join(str(error).split("\n")[0].split())
        raise ValueError(f"{path} holds more than plain types and tensors and is not opened: {reason}") from error
    except Exception as error:  # raised by torch's reader of archives, of several types
        raise ValueError(f"{path} is damaged: {' '.join(str(error).split())}") from error
    return check_shape(renamed(saved), Training, str(path))
