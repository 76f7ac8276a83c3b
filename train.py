"""Trains a GPT: the story of a run, from top to bottom.  python train.py --help"""

import os
import time
from dataclasses import asdict
from pathlib import Path

import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from conf.entry import entry_point
from conf.schema import Train
from data.batches import make_batches
from data.prepare import planned_vocabulary, prepare
from model import GPT, generate
from training import auto, checkpoint, estimate, tracking
from training.compilation import compile_forward
from training.evaluation import evaluate
from training.metrics import MetricsLog, Screen, Stopwatch, check_finite
from training.optimizer import build_optimizer
from training.run_folder import describe, differences
from training.schedule import learning_rate
from training.step import train_step


@entry_point("train", Train)
def main(cfg: Train):
    train(cfg, run=Path(os.path.relpath(HydraConfig.get().runtime.output_dir)))


def train(cfg: Train, run: Path):
    """Trains as `cfg` says; `run` is the folder of this run."""
    if cfg.dry_run:
        return print(estimate.report(asdict(cfg), *planned_vocabulary(asdict(cfg.data), asdict(cfg.tokenizer))))

    # --- from the beginning, or from a checkpoint ---
    start, saved = 0, {}
    if (folder := find_start(cfg.resume, run)) is not None:
        start, saved = checkpoint.read_about(folder)["step"], checkpoint.load_training(folder)
        print(f"resuming from {folder}: {start} steps are done")
        for difference in differences(saved["config"], asdict(cfg)):
            print(f"a setting has changed: {difference}")
    end = min(cfg.steps, cfg.stop_after or cfg.steps)
    if start >= end:
        raise ValueError(f"nothing left to do: {start} steps are done, the run ends at {end}; give more steps")
    if cfg.resume != "auto" and checkpoint.steps(run):
        raise ValueError(f"{run} already holds checkpoints: resume=auto goes on with them; or take another folder")

    # --- the text ---
    corpus = prepare(asdict(cfg.data), asdict(cfg.tokenizer))
    corpus.check_length(cfg.seq_len)
    tokenizer, token_lengths = corpus.tokenizer, corpus.tokenizer.token_lengths()
    batches = make_batches(corpus, cfg.batch_tokens // cfg.seq_len, cfg.seq_len, cfg.seed, cfg.packing)
    if saved and saved["corpus"] != corpus.fingerprint():
        raise ValueError(f"{folder} has learned from another text than {corpus.folder}, or with another tokenizer")
    try:
        prompt = tokenizer.prompt(cfg.sample.prompt)
    except ValueError as error:
        raise ValueError(f"sample.prompt: {error}") from error

    # --- the model ---
    torch.manual_seed(cfg.seed)
    device = auto.choose_device(cfg.device)
    model = GPT(tokenizer.vocab_size, **asdict(cfg.model)).to(device)
    choices = auto.choose(
        precision=cfg.precision,
        compile=cfg.compile,
        attention=cfg.attention,
        micro_batch=cfg.micro_batch,
        device=device,
        rows=batches.rows,
        seq_len=cfg.seq_len,
        vocab_size=tokenizer.vocab_size,
        soft_cap=cfg.model.soft_cap,
        flops=6 * model.n_parameters() * cfg.batch_tokens * cfg.steps,
        saved=saved.get("choices", {}),
    )
    model.use_attention(choices["attention"])
    autocast = auto.autocast(device, choices["precision"])

    # --- what changes its weights ---
    o, s = cfg.optimizer, cfg.schedule
    optimizer = build_optimizer(model, lr=o.lr, betas=o.betas, eps=o.eps, weight_decay=o.weight_decay)
    scaler = torch.amp.GradScaler(device.type, enabled=choices["precision"] == "fp16")
    samples = []
    if folder is not None:
        checkpoint.check_same_model(folder, model)
        checkpoint.load_weights(folder, model)
        settings = optimizer.state_dict()["param_groups"]  # what it remembers is restored, how it is set is ours
        optimizer.load_state_dict({**saved["optimizer"], "param_groups": settings})
        if saved["scaler"]:
            scaler.load_state_dict(saved["scaler"])
        checkpoint.set_rng_state(saved["rng"])
        samples = saved["samples"]

    # --- where its story is told ---
    run.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(OmegaConf.create(asdict(cfg)), run / "config.yaml")
    if cfg.resume == "auto":
        checkpoint.set_aside(run, start)
    log = MetricsLog(run / "metrics.jsonl", start)
    wandb_run = tracking.start(
        cfg.tracking.mode,
        project=cfg.tracking.project,
        timeout=cfg.tracking.timeout,
        folder=run,
        config=asdict(cfg) | choices,
        run_id=saved["wandb_id"] if saved and cfg.resume == "auto" else None,
        warn=print,
    )
    (run / "README.txt").write_text(describe(run, tracking.where(wandb_run)), encoding="utf-8")

    def validate(limit: int | None) -> dict:
        result = evaluate(
            model,
            corpus.validation.read,
            len(corpus.validation),
            token_lengths,
            seq_len=cfg.seq_len,
            batch=choices["micro_batch"],
            limit=limit,
            autocast=autocast,
        )
        values = {"validation_loss": result.loss, "perplexity": result.perplexity}
        return values | {"bits_per_byte": result.bits_per_byte}

    def write_sample(step: int) -> str:
        c = cfg.sample
        options = {"temperature": c.temperature, "top_k": c.top_k, "top_p": c.top_p, "seeds": [cfg.seed]}
        model.eval()
        with autocast:
            start_from = torch.tensor([prompt], device=device)
            columns = list(generate(model, start_from, c.tokens, **options, overflow="slide"))
        model.train()
        text = c.prompt + "".join(tokenizer.stream(torch.cat(columns).tolist(), after=prompt))
        samples.append({"step": step, "prompt": c.prompt, "text": text})
        tracking.log_samples(wandb_run, samples)
        return text

    def save(step: int, row: dict) -> Path:
        target = run / "checkpoints" / f"step_{step:08}"
        results = {name: row[name] for name in ("loss", "validation_loss", "bits_per_byte") if name in row}
        about = {"step": step, "seq_len": cfg.seq_len, "precision": choices["precision"], "data": asdict(cfg.data)}
        about |= {"tokenizer": asdict(cfg.tokenizer), "tokenizer_hash": tokenizer.fingerprint()}
        state = {"optimizer": optimizer.state_dict(), "scaler": scaler.state_dict(), "rng": checkpoint.rng_state()}
        state |= {
            "config": asdict(cfg),
            "corpus": corpus.fingerprint(),
            "choices": choices,
            "samples": samples,
            "wandb_id": wandb_run.id,
        }
        checkpoint.save(target, model, tokenizer.save, about | results, state)
        return target

    epochs = batches.epoch(end) - batches.epoch(start)
    print(f"run       {run}")
    print(f"text      {len(corpus.train):,} tokens to learn from, {len(corpus.validation):,} held out, {corpus.folder}")
    print(f"model     {model.n_parameters():,} parameters, vocabulary {tokenizer.vocab_size:,}")
    print(f"steps     {end - start} of {cfg.batch_tokens:,} tokens, {epochs:.1f} epochs")
    print(f"device    {device}, " + ", ".join(f"{name} {value}" for name, value in choices.items()), flush=True)

    # --- training ---
    model.train()
    forward = model
    if choices["compile"]:
        print("compiling, once", flush=True)
        began = time.perf_counter()
        some = {name: rows[: choices["micro_batch"]].to(device) for name, rows in batches.batch(start).items()}
        forward = compile_forward(model, some, autocast, warn=print)
        choices["compile"] = forward is not model
        print(f"{time.perf_counter() - began:.0f} s of compiling", flush=True)

    watch = Stopwatch()
    last_step, last_seconds = start, 0.0
    with Screen(cfg.steps) as screen:
        for step, batch in enumerate(batches.stream(start, end, device), start):
            lr = learning_rate(step, steps=cfg.steps, peak=o.lr, warmup=s.warmup, decay=s.decay, final=s.final)
            loss, norm = train_step(
                forward,
                optimizer,
                scaler,
                batch,
                micro_batch=choices["micro_batch"],
                lr=lr,
                clip=o.clip,
                autocast=autocast,
            )

            done = step + 1
            due = {what: done % every == 0 or done == cfg.steps for what, every in asdict(cfg.every).items()}
            due["checkpoint"] |= done == end
            if not any(due.values()):
                continue
            row = {"step": done, "tokens": done * cfg.batch_tokens, "epoch": batches.epoch(done)}
            row |= {"loss": loss.item(), "lr": lr, "grad_norm": norm.item()}
            seconds = watch.seconds()
            with watch:
                if due["evaluate"]:
                    row |= validate(limit=None if done == cfg.steps else cfg.evaluation_tokens)
                check_finite(row, fp16=scaler.is_enabled(), lr=o.lr, run=run)
                if due["log"] or due["evaluate"]:
                    speed = (done - last_step) * cfg.batch_tokens / (seconds - last_seconds)
                    last_step, last_seconds = done, seconds
                    row["clock"] = {"seconds": seconds, "tokens_per_second": speed}
                    log.write(row)
                    tracking.log(wandb_run, row)
                    screen.report(done, row, (end - done) * cfg.batch_tokens / speed, keep=due["evaluate"])
                if due["sample"]:
                    screen.say(f"\n{write_sample(done)}\n")
                if due["checkpoint"]:
                    folder = save(done, row)
    wandb_run.finish()

    print(f"checkpoint  {folder}")
    print(f"next        python -m scripts.generate checkpoint={run} -- To be, or not")
    print(f"tracked     {tracking.where(wandb_run)}")


def find_start(resume: str | None, run: Path) -> Path | None:
    """The checkpoint to go on from. With resume=auto, the run folder is the newest run that has one, or a new one."""
    if resume is None:
        return None
    if resume != "auto":
        return checkpoint.find(resume, for_training=True)
    if not checkpoint.steps(run):
        print("resume=auto: no run of this name has a checkpoint, beginning a new one")
        return None
    return checkpoint.find(run, for_training=True)


if __name__ == "__main__":
    main()
