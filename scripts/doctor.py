"""Reports what is wrong with a model, and where.  python -m scripts.doctor checkpoint=runs/NAME"""

import json
import math
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

import torch
from hydra.core.hydra_config import HydraConfig
from rich.progress import track
from torch import Tensor

from conf.entry import check_output, entry_point
from conf.scripts import Doctor
from data.corpus import learned_from, open_corpus
from data.files import check_shape
from data.prepare import corpus_folder, prepare
from data.tokenizer import Tokenizer, load_tokenizer
from insight import doctor
from insight.doctor import CHECKS, Finding, Patient, Result
from kernels import build
from model import GPT, generate
from training import auto, checkpoint
from training.backend import choose_ops
from training.gradients import compute_gradients, gradient_norm
from training.optimizer import OptimizerConfig, build_optimizer
from training.step import update

ROWS = 8  # rows of the examined batch
CHARACTERS = 2000  # characters of text that are encoded and decoded
WITH_CHECKPOINT = ("checkpoint", "json", "device")  # the settings that may be given with a checkpoint


@entry_point("doctor", Doctor)
def main(cfg: Doctor):
    check_output("json", cfg.json)
    if cfg.checkpoint is None:
        patient = new_model(cfg)
    else:
        given = [override.lstrip("+~") for override in HydraConfig.get().overrides.task]
        if unused := [one for one in given if one.split("=")[0].split("@")[0] not in WITH_CHECKPOINT]:
            raise ValueError(f"a checkpoint has its own settings: {unused[0]} has no effect with {cfg.checkpoint}")
        patient = trained_model(cfg.checkpoint, cfg.device)
    if examine(patient, cfg.json):
        sys.exit(1)


def examine(patient: Patient, json_file: str | None = None) -> list[Finding]:
    """Prints the findings of each check, and saves them to a file."""
    results = []
    for result in doctor.run(patient):
        results.append(result)
        print(describe(result), flush=True)
    findings = [finding for result in results for finding in result.findings]
    made = sum(result.not_checked is None for result in results)
    print(f"\n{len(findings) or 'no'} finding{'s' * (len(findings) != 1)} in {made} checks")
    if json_file is not None:
        checks = [asdict(result) | {"findings": len(result.findings)} for result in results]
        content = {"findings": [as_json(finding) for finding in findings], "checks": checks}
        Path(json_file).write_text(json.dumps(content, indent=2, ensure_ascii=False), encoding="utf-8")
    return findings


def new_model(cfg: Doctor) -> Patient:
    """The model that train.py would start from, and the first rows of its text."""
    corpus = prepare(cfg.data, cfg.tokenizer)
    corpus.check_length(cfg.seq_len)
    torch.manual_seed(cfg.seed)
    device = auto.choose_device(cfg.device)
    model = GPT(corpus.tokenizer.vocab_size, cfg.model).to(device).eval()
    choices = auto.choose(
        cfg,
        device=device,
        rows=cfg.batch_tokens // cfg.seq_len,
        seq_len=cfg.seq_len,
        vocab_size=model.vocab_size,
        soft_cap=cfg.model.soft_cap,
        flops=6 * model.n_parameters() * cfg.batch_tokens * (cfg.steps or 0),
        saved={},
    )
    use_what_trains(model, choices.attention, choices.kernels)
    print(f"model  new, {model.n_parameters():,} parameters, vocabulary {model.vocab_size:,}")
    print(f"text   {corpus.folder}\n")
    ids = torch.from_numpy(corpus.train.read(0, min(len(corpus.train), ROWS * cfg.seq_len + 1)).astype("int64"))
    return Patient(
        model,
        *rows(ids.to(device), cfg.seq_len),
        trained=False,
        tokenizer=corpus.tokenizer,
        text=corpus.tokenizer.decode(ids.tolist())[:CHARACTERS],
        fingerprint=corpus.manifest["tokenizer"],
        start_training=training_by(cfg.optimizer),
        progress=progress,
    )


def trained_model(path: str, device: str) -> Patient:
    """A checkpoint's model and tokenizer, with validation text if its corpus is here, else with generated text."""
    folder = checkpoint.find(path)
    about, device = checkpoint.read_about(folder), auto.choose_device(device)
    model, tokenizer = checkpoint.load_model(folder, device, finite=False), load_tokenizer(folder / "tokenizer")
    seq_len = min(about["seq_len"], model.max_seq_len)
    text, ids, where = validation_text(about, folder, tokenizer)
    if ids is None:
        beginnings = [[tokenizer.eos_id]] * ROWS
        columns = list(generate(model, beginnings, seq_len, overflow="slide"))
        ids = torch.stack([torch.tensor([tokenizer.eos_id] * ROWS).to(device), *columns], dim=1).flatten()
    settings = None
    if (folder / "training.pt").exists():
        checkpoint.check(folder)
        saved = checkpoint.load_training(folder)
        others = dict.fromkeys(("lr_embedding", "lr_head", "lr_norm"), saved["config"]["optimizer"]["lr"])
        known = others | saved["config"]["optimizer"]  # the oldest runs have only lr
        settings = check_shape(known, OptimizerConfig, f"optimizer in {folder / 'training.pt'}")
        use_what_trains(model, saved["choices"]["attention"], saved["choices"]["kernels"])
    print(f"checkpoint  {folder}, {about['step']} steps")
    print(f"text        {where}\n")
    return Patient(
        model,
        *rows(ids.to(device), seq_len),
        trained=about["step"] > 0 or "imported" in about,
        tokenizer=tokenizer,
        text=text,
        fingerprint=about.get("tokenizer_hash"),
        start_training=None if settings is None else training_by(settings),
        progress=progress,
    )


def use_what_trains(model: GPT, attention: str, kernels: bool):
    """Makes the model compute with the functions that its run trains with."""
    on_cpu = model.embedding.weight.device.type == "cpu"
    model.use(choose_ops(attention, kernels and on_cpu and build.load("training", warn=print)))


def validation_text(
    about: dict, checkpoint_folder: Path, tokenizer: Tokenizer
) -> tuple[str | None, Tensor | None, str]:
    """(text, its ids in the checkpoint's tokenizer, where it is from); None for what is not available."""
    if (settings := checkpoint.text_of(about, checkpoint_folder)) is None:
        return None, None, "generated by the model, whose checkpoint names no text"
    known, why = learned_from(about, checkpoint_folder), None
    try:
        folder = corpus_folder(*settings, Path("corpora"))
        corpus = open_corpus(folder) if folder.exists() else known and known.find()
        why = f"{folder} does not exist; scripts.prepare makes it"
    except ValueError as error:
        corpus, why = known and known.find(), error
    if corpus is None:
        return None, None, f"generated by the model: {why}"
    folder = corpus.folder
    text = corpus.tokenizer.decode(corpus.validation.read(0, min(len(corpus.validation), 2**14)))
    try:
        ids = torch.from_numpy(tokenizer.encode(text).astype("int64"))
    except ValueError as error:
        return text[:CHARACTERS], None, f"generated by the model, whose tokenizer cannot read {folder}: {error}"
    return text[:CHARACTERS], ids if len(ids) > 1 else None, f"validation text of {folder}"


def rows(ids: Tensor, seq_len: int) -> tuple[Tensor, Tensor]:
    """tokens and targets (b seq_len), consecutive rows of ids; a single shorter row if they do not fill one."""
    seq_len = min(seq_len, len(ids) - 1)
    b = min(ROWS, (len(ids) - 1) // seq_len)
    return ids[: b * seq_len].view(b, seq_len), ids[1 : b * seq_len + 1].view(b, seq_len)


def training_by(config: OptimizerConfig) -> Callable[[GPT], Callable[[Tensor, Tensor], float]]:
    """start(model) -> step(tokens, targets) -> loss: training as in train.py, at the initial learning rate."""

    def start(model: GPT) -> Callable[[Tensor, Tensor], float]:
        optimizer = build_optimizer(model, config)
        scaler = torch.amp.GradScaler(enabled=False)

        def step(tokens: Tensor, targets: Tensor) -> float:
            batch, count = {"tokens": tokens, "targets": targets}, targets.numel()
            whole = {"micro_batch": len(tokens), "count": count, "autocast": nullcontext()}
            loss = compute_gradients(model, scaler, batch, **whole)
            update(optimizer, scaler, factor=1.0, norm=gradient_norm(optimizer, scaler), clip=config.grad_clip)
            return loss.item() / count

        return step

    return start


def progress(steps):
    return track(steps, "  learning", transient=True, disable=not sys.stderr.isatty())


def as_json(finding: Finding) -> dict:
    """A finding for JSON, which has no NaN and no infinity: they become strings."""
    numbers = {name: getattr(finding, name) for name in ("value", "bound")}
    words = {name: str(x) for name, x in numbers.items() if x is not None and not math.isfinite(x)}
    return asdict(finding) | words


def describe(result: Result) -> str:
    """A line for the check, and some for each finding."""
    name = f"{result.check:<{max(map(len, CHECKS))}}"
    if result.not_checked is not None:
        return f"{name}  not checked: {result.not_checked}"
    if not result.findings:
        return f"{name}  ok"
    lines = [f"{name}  {len(result.findings)} found"]
    for finding in result.findings:
        lines.append(f"  {finding.where}: {finding.what}")
        if finding.value is not None:
            bound = "" if finding.bound is None else f", allowed {finding.bound:.4g}"
            lines.append(f"    measured {finding.value:.4g}{bound}")
        lines.append(f"    {finding.do}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
