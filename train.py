"""Trains a GPT: the story of a run, from top to bottom.  python train.py --help"""

import math
import os
import time
from dataclasses import asdict
from pathlib import Path

import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from conf.entry import entry_point
from conf.schema import Train
from data.batches import Batches
from data.prepare import prepare
from model import GPT, generate
from training import auto, checkpoint, tracking
from training.compilation import compile_forward
from training.evaluation import evaluate
from training.metrics import MetricsLog, Screen, Stopwatch
from training.optimizer import build_optimizer
from training.run_folder import describe
from training.schedule import learning_rate
from training.step import train_step


@entry_point("train", Train)
def main(cfg: Train):
    train(cfg, run=Path(os.path.relpath(HydraConfig.get().runtime.output_dir)))


def train(cfg: Train, run: Path):
    """Trains as `cfg` says; `run` is the folder of this run."""
    # --- from the beginning, or from a checkpoint ---
    start, saved = 0, {}
    if (folder := find_start(cfg.resume, run)) is not None:
        start, saved = checkpoint.read_about(folder)["step"], checkpoint.load_training(folder)
        print(f"resuming from {folder}: {start} steps are done")
    end = min(cfg.steps, cfg.stop_after or cfg.steps)
    if start >= end:
        raise ValueError(f"nothing left to do: {start} steps are done, the run ends at {end}; give more steps")

    # --- the text ---
    corpus = prepare(asdict(cfg.data), asdict(cfg.tokenizer))
    corpus.check_length(cfg.seq_len)
    tokenizer, token_lengths = corpus.tokenizer, corpus.tokenizer.token_lengths()
    batches = Batches(corpus.train, cfg.batch_tokens // cfg.seq_len, cfg.seq_len, cfg.seed)

    # --- the model ---
    torch.manual_seed(cfg.seed)
    device = auto.choose_device(cfg.device)
    if device.type == "cpu":  # only so does compiled code repeat bit for bit; it costs nothing there
        torch.use_deterministic_algorithms(True)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
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
        flops=6 * model.n_parameters() * cfg.batch_tokens * cfg.steps,
        saved=saved.get("choices", {}),
    )
    model.use_attention(choices["attention"])
    autocast = auto.autocast(device, choices["precision"])

    # --- what changes its weights ---
    o = cfg.optimizer
    optimizer = build_optimizer(model, lr=o.lr, betas=o.betas, eps=o.eps, weight_decay=o.weight_decay)
    scaler = torch.amp.GradScaler(device.type, enabled=choices["precision"] == "fp16")
    samples = []
    if folder is not None:
        checkpoint.load_weights(folder, model)
        optimizer.load_state_dict(saved["optimizer"])
        scaler.load_state_dict(saved["scaler"])
        checkpoint.set_rng_state(saved["rng"])
        samples = saved["samples"]

    # --- where its story is told ---
    run.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(OmegaConf.create(asdict(cfg)), run / "config.yaml")
    log = MetricsLog(run / "metrics.jsonl", start)
    same_run = folder is not None and folder.parent.parent.resolve() == run.resolve()
    t = cfg.tracking
    wandb_run = tracking.start(
        t.mode, t.project, t.timeout, run, asdict(cfg) | choices, saved["wandb_id"] if same_run else None, warn=print
    )
    (run / "README.txt").write_text(describe(run, tracking.how_to_sync(wandb_run)), encoding="utf-8")

    def validate(limit: int | None) -> dict:
        text = corpus.validation
        result = evaluate(
            model, text.read, len(text), token_lengths, seq_len=cfg.seq_len, limit=limit, autocast=autocast
        )
        values = {"validation_loss": result.loss, "perplexity": result.perplexity}
        return values | {"bits_per_byte": result.bits_per_byte}

    def write_sample(step: int) -> str:
        s = cfg.sample
        prompt = tokenizer.encode(s.prompt).tolist() or [tokenizer.beginning]
        model.eval()
        with autocast:
            options = {"temperature": s.temperature, "top_k": s.top_k, "top_p": s.top_p, "overflow": "slide"}
            columns = list(
                generate(model, torch.tensor([prompt], device=device), s.tokens, seeds=[cfg.seed], **options)
            )
        model.train()
        text = s.prompt + tokenizer.decode(torch.cat(columns).tolist())
        samples.append({"step": step, "prompt": s.prompt, "text": text})
        tracking.log_samples(wandb_run, samples)
        return text

    def save(step: int, row: dict) -> Path:
        target = run / "checkpoints" / f"step_{step:08}"
        results = {name: row[name] for name in ("loss", "validation_loss", "bits_per_byte") if name in row}
        about = {"step": step, "seq_len": cfg.seq_len, "data": asdict(cfg.data), **results}
        state = {"optimizer": optimizer.state_dict(), "scaler": scaler.state_dict(), "rng": checkpoint.rng_state()}
        state |= {"choices": choices, "samples": samples, "wandb_id": wandb_run.id}
        checkpoint.save(target, model, tokenizer.save, about, state)
        return target

    print(f"run       {run}")
    print(
        f"text      {len(corpus.train):,} tokens to learn from, {len(corpus.validation):,} held out, in {corpus.folder}"
    )
    print(f"model     {model.n_parameters():,} parameters, vocabulary {tokenizer.vocab_size:,}")
    epochs = batches.epoch(end) - batches.epoch(start)
    print(f"steps     {end - start} of {cfg.batch_tokens:,} tokens, {epochs:.1f} epochs")
    print(f"device    {device}, " + ", ".join(f"{name} {value}" for name, value in choices.items()), flush=True)

    # --- training ---
    model.train()
    forward = model
    if choices["compile"]:
        print("compiling, once", end="", flush=True)
        began = time.perf_counter()
        some = [piece[: choices["micro_batch"]].to(device) for piece in batches.batch(start)]
        forward = compile_forward(model, *some, autocast, warn=print)
        print(f": {time.perf_counter() - began:.0f} s")

    s = cfg.schedule
    watch = Stopwatch()
    with Screen(cfg.steps, start) as screen:
        last_seconds, last_step = 0.0, start
        for step in range(start, end):
            tokens, targets = (piece.to(device, non_blocking=True) for piece in batches.batch(step))
            lr = learning_rate(step, steps=cfg.steps, peak=o.lr, warmup=s.warmup, decay=s.decay, final=s.final)
            loss, norm = train_step(
                forward,
                optimizer,
                scaler,
                tokens,
                targets,
                micro_batch=choices["micro_batch"],
                lr=lr,
                clip=o.clip,
                autocast=autocast,
            )

            done = step + 1
            finished = done == end

            def due(every: int, done=done, finished=finished) -> bool:
                return done % every == 0 or finished

            if not any(due(every) for every in asdict(cfg.every).values()):
                continue
            row = {"step": done, "loss": loss.item(), "lr": lr, "grad_norm": norm.item()}
            row |= {"tokens": done * cfg.batch_tokens, "epoch": batches.epoch(done)}
            if not math.isfinite(row["loss"]):
                raise ValueError(
                    f"the loss of step {done} is {row['loss']}: try a lower optimizer.lr than {o.lr}; "
                    f"the last checkpoints are in {run}/checkpoints"
                )
            seconds = watch.seconds()
            speed = (done - last_step) * cfg.batch_tokens / (seconds - last_seconds)
            last_seconds, last_step = seconds, done
            with watch:
                if due(cfg.every.evaluate):
                    row |= validate(limit=None if done == cfg.steps else cfg.evaluation_tokens)
                row["clock"] = {"seconds": seconds, "tokens_per_second": speed}
                log.write(row)
                tracking.log(wandb_run, row)
                left = (end - done) * cfg.batch_tokens / speed
                screen.report(done, row, left, keep=due(cfg.every.evaluate))
                if due(cfg.every.sample):
                    screen.say(f"\n{write_sample(done)}\n")
                if due(cfg.every.checkpoint):
                    folder = save(done, row)
    wandb_run.finish()

    print(f"checkpoint  {folder}")
    print(f"next        python -m scripts.generate checkpoint={run} -- To be, or not")
    if command := tracking.how_to_sync(wandb_run):
        print(f"tracked     offline; {command}")


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
