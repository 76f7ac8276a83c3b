"""Trains a GPT: the story of a run, from top to bottom.  python train.py --help"""

from conf import console  # first: from here on Ctrl-C ends it quietly

# isort: split
import math
import os
import sys
import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import OmegaConf

from conf.entry import entry_point
from conf.schema import Train, check_warmup
from data.batches import ORDER, make_batches
from data.corpus import learned_from
from data.files import naming
from data.prepare import planned_vocabulary, prepare
from kernels import build
from model import GPT, generate
from model.gpt import checkpoint_activations
from training import auto, checkpoint, distributed, estimate, guards, interruption, tracking
from training.backend import choose_ops
from training.compilation import compile_forward
from training.evaluation import evaluate
from training.interruption import Interruption
from training.metrics import MetricsLog, Screen, Stopwatch, peak_memory
from training.optimizer import build_optimizer
from training.run_folder import as_before, check_same_settings, describe, differences, record_environment
from training.schedule import rate_factor, row_length, row_lengths
from training.step import compute_gradients, gradient_norm, micro_batches, update


@entry_point("train", Train)
def main(cfg: Train):
    distributed.start(cfg.rank_timeout)
    job = HydraConfig.get()
    group = Path(job.sweep.dir).name if job.mode == RunMode.MULTIRUN else None
    code = train(cfg, run=Path(os.path.relpath(job.runtime.output_dir)), group=group)
    distributed.stop()
    if code:
        sys.exit(code)


def train(cfg: Train, run: Path, group: str | None = None) -> int:
    """Trains as `cfg` says -> the exit code. Of several ranks the first speaks.

    `run` is the folder of this run, `group` the name of its sweep.
    """
    if cfg.dry_run:
        print(estimate.report(asdict(cfg), *planned_vocabulary(asdict(cfg.data), asdict(cfg.tokenizer))))
        return 0
    began, run = time.monotonic(), distributed.broadcast(run)
    with checkpoint.taken(run, distributed.rank() == 0), naming(run):
        return _train(cfg, run, group, began)


def _train(cfg: Train, run: Path, group: str | None, began: float) -> int:
    """The same, in a folder that is ours alone; `began` is when the time for max_time began."""
    first = distributed.rank() == 0
    tracking.asked_mode(cfg.tracking.mode, cfg.tracking.project)

    # --- from the beginning, or from a checkpoint ---
    start, saved, order, waited = 0, {}, ORDER, 0
    folder, weights_of = distributed.agreed(find_start, cfg, run)
    if folder is not None:
        about, saved = checkpoint.read_about(folder), checkpoint.load_training(folder)
        start, order = about["step"], about.get("batch_order", 1)
        print(f"resuming from {folder}: {start} steps are done")
        check_same_settings(folder, saved["config"], asdict(cfg))
        for name, before, now in differences(saved["config"], asdict(cfg)):
            print(f"a setting has changed: {name} was {before}, is {now}")
        waited = restored(folder, saved, cfg).waited
    steps = planned_steps(cfg, saved)
    if steps is not None and nothing_left(cfg, steps, start, waited):
        return 0

    # --- the text ---
    known = learned_from(about, folder) if folder is not None else None
    corpus = prepare(asdict(cfg.data), asdict(cfg.tokenizer), known=known)
    corpus.check_length(cfg.seq_len)
    tokenizer, token_lengths = corpus.tokenizer, corpus.tokenizer.token_lengths()
    rows, ranks = cfg.batch_tokens // cfg.seq_len, distributed.size()
    batches = make_batches(corpus, rows, cfg.seq_len, cfg.seed, cfg.packing, distributed.rank(), ranks, order)
    if saved and saved["corpus"] != corpus.fingerprint():
        what = f"{folder} has learned from another text than {corpus.folder}, or with another tokenizer"
        again = as_before(saved["config"], asdict(cfg))
        raise ValueError(what + (f": give {again}" if again else ""))
    if steps is None:
        steps = batches.steps(cfg.epochs)
        check_warmup(cfg.schedule, steps)
        if nothing_left(cfg, steps, start, waited):
            return 0
    end = ends_at(cfg, steps)
    if weights_of is not None:
        checkpoint.check_same_tokenizer(weights_of, tokenizer)
    try:
        prompt = tokenizer.prompt(cfg.sample.prompt)
    except ValueError as error:
        raise ValueError(f"sample.prompt: {error}") from error

    # --- the model ---
    torch.manual_seed(cfg.seed)
    device = auto.choose_device(cfg.device, cfg.deterministic)
    n_parameters, n_bytes = estimate.size(tokenizer.vocab_size, **asdict(cfg.model))
    n_learning = 8 * n_parameters if device.type == "cpu" else 0  # gradients and a moment at least
    what = f"training {n_parameters:,} parameters with max_seq_len {cfg.model.max_seq_len:,}"
    estimate.check_fits(what, n_bytes + n_learning)
    model = GPT(tokenizer.vocab_size, **asdict(cfg.model)).to(device)
    if weights_of is not None:
        checkpoint.check_same_model(weights_of, model)
        checkpoint.load_weights(weights_of, model)
    choices = auto.choose(
        precision=cfg.precision,
        kernels=cfg.kernels,
        compile=cfg.compile,
        attention=cfg.attention,
        micro_batch=cfg.micro_batch,
        device=device,
        rows=rows // ranks,
        seq_len=cfg.seq_len,
        vocab_size=tokenizer.vocab_size,
        soft_cap=cfg.model.soft_cap,
        flops=6 * n_parameters * cfg.batch_tokens * steps,
        saved=saved.get("choices", {}),
    )
    if device.type == "cpu":
        pieces = f"{cfg.batch_tokens:,} tokens, {choices['micro_batch']} x {cfg.seq_len} at once,"
        least = estimate.least(model, rows // ranks, choices["micro_batch"], cfg.seq_len)
        estimate.check_fits(f"a step of {pieces}", least)
    choices["kernels"] = choices["kernels"] and build.load("training", warn=print)
    model.use(choose_ops(choices["attention"], choices["kernels"]))
    if cfg.activation_checkpointing:
        checkpoint_activations(model)
    autocast = auto.autocast(device, choices["precision"])
    peak = auto.peak_flops(device, asdict(cfg.device_spec), choices["precision"])

    epochs = batches.epoch(end) - batches.epoch(start)
    shared = f" on {ranks} ranks, {cfg.parallel}" if ranks > 1 else ""
    print(f"run       {run}")
    print(f"text      {len(corpus.train):,} tokens to learn from, {len(corpus.validation):,} held out, {corpus.folder}")
    print(f"model     {n_parameters:,} parameters, vocabulary {tokenizer.vocab_size:,}")
    length_of = partial(row_length, steps=steps, seq_len=cfg.seq_len, warmup=cfg.seq_len_warmup)
    lengths = row_lengths(start, end, steps, cfg.seq_len, cfg.seq_len_warmup)
    growing = f" in rows of {', then '.join(map(str, lengths))}" if len(lengths) > 1 else ""
    print(f"steps     {end - start} of {cfg.batch_tokens:,} tokens{growing}, {epochs:.1f} epochs")
    print(f"device    {device}{shared}, " + ", ".join(f"{name} {value}" for name, value in choices.items()), flush=True)

    some = {name: some[: choices["micro_batch"]].to(device) for name, some in batches.batch(start).items()}
    if cfg.micro_batch == "auto" and device.type == "cuda" and not saved:
        choices["micro_batch"] = auto.largest_that_fits(model, some, autocast)
    forward = model
    if choices["compile"]:
        print("compiling, once", flush=True)
        compiling = time.perf_counter()
        # FSDP's hooks are on the model itself
        regional = ranks == 1 or cfg.parallel == "ddp"
        of_each_length = [next(micro_batches(some, choices["micro_batch"], length)) for length in lengths]
        forward = compile_forward(model, of_each_length, autocast, warn=print, regional=regional)
        choices["compile"] = forward is not model
        print(f"{time.perf_counter() - compiling:.0f} s of compiling", flush=True)
    forward = distributed.spread(model, forward, cfg.parallel, choices["precision"])
    model.train()

    # --- what changes its weights, and what it remembers ---
    settings = asdict(cfg.optimizer)
    clip = settings.pop("clip")
    optimizer = build_optimizer(model, choices["precision"], **settings)
    scaler = torch.amp.GradScaler(device.type, enabled=choices["precision"] == "fp16")
    samples: list[dict] = []
    guard = guards.Guard()

    def remember(folder: Path, saved: dict):
        """Everything with memory, as a checkpoint has it."""
        nonlocal samples, guard
        try:
            distributed.load_optimizer(optimizer, saved["optimizer"])
            if saved["scaler"]:
                scaler.load_state_dict(saved["scaler"])
            if distributed.rank() < len(saved["rng"]):  # else there were fewer ranks
                checkpoint.set_rng_state(saved["rng"][distributed.rank()])
            samples, guard = list(saved["samples"]), restored(folder, saved, cfg)
        except (RuntimeError, TypeError, LookupError) as error:  # what torch says to another machine's or version's
            raise ValueError(f"{folder}/training.pt does not fit this program: {error!r}") from error

    if distributed.rank() > 0:  # other random numbers for dropout than rank 0's
        torch.manual_seed(cfg.seed + 1_000_003 * (distributed.rank() + ranks * start))
    if folder is not None:
        remember(folder, saved)
    guard.skip = sorted({*guard.skip, *cfg.skip_batches})

    def save(step: int, row: dict):
        if step - 1 not in guard.skip:
            guard.rollbacks = 0
        weights, about = checkpoint.snapshot(model)
        about |= {"step": step, "seq_len": cfg.seq_len, "precision": choices["precision"], "data": asdict(cfg.data)}
        about |= {"tokenizer": asdict(cfg.tokenizer), "tokenizer_hash": tokenizer.fingerprint(), "batch_order": order}
        about |= {"corpus": {"folder": str(corpus.folder), "fingerprint": corpus.fingerprint()}}
        figures = ("loss", "validation_loss", "bits_per_byte", "compared_loss")
        about |= {name: row[name] for name in figures if name in row}
        memory = {
            "optimizer": distributed.whole(optimizer.state_dict()),
            "scaler": scaler.state_dict(),
            "rng": distributed.gather_objects(checkpoint.rng_state()),
            "samples": list(samples),
            "guard": asdict(guard),
            "choices": dict(choices),
            "corpus": corpus.fingerprint(),
            "config": asdict(cfg),
            "steps": steps,
            "wandb_id": wandb_run.id,
        }
        if first:
            log.sync()
            saver.save(step, weights, tokenizer.save, about, memory)
            if cfg.tracking.artifacts:
                tracking.log_checkpoint(wandb_run, step, saver.folder, row.get("validation_loss"), saver.writing)

    def ensure_saved(step: int):
        """Where this step may or may not have been due."""
        saver.wait()
        if not distributed.agreed(checkpoint.step_folder(run, step).exists):
            save(step, {})

    def roll_back() -> int:
        """To the last checkpoint -> its step; what jumped, and is to be skipped, stays known. ValueError if none is."""
        saver.wait()
        folder, known = distributed.agreed(checkpoint.find, run, True), guard
        distributed.load_weights(model, checkpoint.read_weights(folder))
        remember(folder, checkpoint.load_training(folder))
        guard.skip, guard.spikes, guard.rollbacks = known.skip, known.spikes, known.rollbacks
        step = checkpoint.read_about(folder)["step"]
        if first:
            checkpoint.set_aside(run, step)
        return step

    def validate(limit: int | None) -> dict:
        result = evaluate(
            model,
            corpus.validation.read,
            len(corpus.validation),
            token_lengths,
            learned=corpus.validation.learned,
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

    def explain_nonfinite(step: int, batch: dict, length: int, loss: float, norm: float, rng: dict) -> str:
        """Finds out where, and writes it down with the text of the batch; training is as it was before the step."""
        pieces = list(micro_batches(batch, choices["micro_batch"], length))
        searchable = ranks == 1 or cfg.parallel == "ddp"  # under fsdp ranks would have to search in step
        origin = guards.find_origin(model, pieces, autocast, rng) if searchable else guards.NOWHERE
        checkpoint.set_rng_state(rng)
        texts = [tokenizer.decode(row) for row in batch["tokens"].tolist()]
        origins, texts = zip(*distributed.gather_objects((origin, texts)), strict=True)
        origin = next((one for one in origins if one["tensor"] is not None), guards.NOWHERE)
        path = run / f"nonfinite_{step:08}.json"
        if first:
            try:
                guards.report(path, step, loss, norm, origin, [text for some in texts for text in some])
            except OSError as error:
                screen.say(f"{path} cannot be written: {error.strerror}")
        return f"the loss of step {step + 1} is {loss}, its gradient norm {norm}: {guards.describe(origin)}; see {path}"

    # --- training ---
    with (
        checkpoint.Saver(run, cfg.keep, warn=print) as saver,
        Interruption(interruption.seconds(cfg.max_time), began) as interrupted,
        Screen(steps) as screen,
    ):
        facts = {"parameters": n_parameters, "tokens_per_step": cfg.batch_tokens, "steps": steps}
        if first:
            facts["environment"] = record_environment(run, device, **facts)
            OmegaConf.save(OmegaConf.create(asdict(cfg)), run / "config.yaml")
            if cfg.resume == "auto":
                checkpoint.set_aside(run, start)
        log = MetricsLog(run / "metrics.jsonl" if first else None, start, warn=screen.say)
        wandb_run = tracking.start(
            cfg.tracking.mode if first else None,
            project=cfg.tracking.project,
            name=cfg.tracking.name,
            timeout=cfg.tracking.timeout,
            finish_timeout=cfg.tracking.finish_timeout,
            folder=run,
            config=asdict(cfg) | choices | facts,
            run_id=saved["wandb_id"] if saved and cfg.resume == "auto" else None,
            warn=print,
            group=group,
        )
        if first:
            (run / "README.txt").write_text(describe(run, tracking.where(wandb_run)), encoding="utf-8")
        if cfg.on_spike == "rollback":
            ensure_saved(start)  # something to go back to

        watch = Stopwatch()
        step, last_step, last_seconds, reason, patient = start, start, 0.0, 0, True
        stream = batches.stream(step, end, device)
        while step < end and patient:
            with distributed.naming_the_late(step):
                count, batch = next(stream)
                counts, reasons = distributed.gather(count, interrupted.wanted())
            if reason := int(max(reasons)):
                break

            # a step: gradients, a look at them, the update
            due = {what: (step + 1) % n == 0 or step + 1 == steps for what, n in asdict(cfg.every).items()}
            due |= {"row": due["log"] or due["evaluate"], "checkpoint": due["checkpoint"] or step + 1 == end}
            factor = rate_factor(step, steps, **asdict(cfg.schedule))
            length = length_of(step)
            if length != length_of(max(0, step - 1)):
                guard.losses.clear()  # a token has more before it now
            row = {"step": step + 1, "tokens": (step + 1) * cfg.batch_tokens, "epoch": batches.epoch(step + 1)}
            row |= {"lr": factor * cfg.optimizer.lr}
            if step in guard.skip or sum(counts) == 0:  # there is nothing to learn
                guard.passed_over()
            else:
                rng = checkpoint.rng_state()
                with (
                    distributed.naming_the_late(step),
                    auto.explaining_memory(model, batch, choices["micro_batch"], autocast),
                ):
                    total = compute_gradients(
                        forward,
                        scaler,
                        batch,
                        micro_batch=choices["micro_batch"],
                        count=sum(counts),
                        autocast=autocast,
                        row_length=length,
                    )
                    norm = gradient_norm(optimizer, scaler)
                    loss = sum(distributed.gather(total.item())[0]) / sum(counts)
                healthy, before = guards.finite(loss, norm.item()), replace(guard)
                if not healthy and scaler.is_enabled() and guards.finite(loss) and scaler.get_scale() >= 1:
                    update(
                        optimizer, scaler, factor=factor, norm=norm, clip=clip
                    )  # fp16: the scaler skips it, and shrinks
                    guard.passed_over()
                elif not healthy:
                    what = explain_nonfinite(step, batch, length, loss, norm.item(), rng)
                    if cfg.on_nonfinite == "stop" or guard.in_a_row >= cfg.max_skips:
                        ensure_saved(step)  # which has not seen this batch
                        saver.wait()
                        there = f"step {step} is saved: " if not saver.failed else ""
                        hint = f"resume=auto with on_nonfinite=skip, or a lower optimizer.lr than {cfg.optimizer.lr}"
                        raise ValueError(f"{what}; {there}try {hint}")
                    guard.not_finite()
                    screen.say(f"{what}; the batch is skipped")
                    scaler.update()
                    optimizer.zero_grad(set_to_none=True)
                elif guard.is_spike(loss, cfg.spike_sigmas, cfg.spike_window) and cfg.on_spike == "rollback":
                    what = f"the loss of step {step + 1} jumped to {loss:.4f}"
                    scaler.update()
                    optimizer.zero_grad(set_to_none=True)
                    if guard.rollbacks >= cfg.max_skips:
                        guard = before  # it has not seen this batch
                        checkpoint.set_rng_state(rng)
                        ensure_saved(step)
                        saver.wait()
                        there = f"step {step} is saved: " if not saver.failed else ""
                        hint = f"resume=auto with on_spike=count, or a higher spike_sigmas than {cfg.spike_sigmas}"
                        raise ValueError(f"{what}, after max_skips={cfg.max_skips} times back; {there}try {hint}")
                    screen.say(f"{what}: back to the last checkpoint")
                    guard.skip, guard.rollbacks = sorted({*guard.skip, step}), guard.rollbacks + 1
                    try:
                        step = roll_back()
                    except ValueError as error:
                        screen.say(f"{error}: only the batch is skipped")
                        checkpoint.set_rng_state(rng)
                        guard.passed_over()
                    else:
                        log.rewind(step)
                        stream = batches.stream(step, end, device)
                        last_step, last_seconds = step, watch.seconds()
                        continue
                else:
                    ratio = update(optimizer, scaler, factor=factor, norm=norm, clip=clip, measure=due["row"])
                    row |= {"loss": loss, "grad_norm": norm.item()}
                    if due["row"]:
                        row["update_ratio"] = ratio.item()

            # what is due behind it
            step += 1
            if not any(due.values()):
                continue
            row |= {"skipped": guard.skipped, "spikes": guard.spikes}
            seconds = watch.seconds()
            with watch:
                if due["evaluate"]:
                    part = cfg.evaluation_tokens if (cfg.evaluation_tokens or 0) < len(corpus.validation) else None
                    row |= validate(limit=None if step == steps else part)
                    compared = row["validation_loss"]
                    if step == steps and part is not None:  # of the whole text; compared is what is like
                        compared = validate(part)["validation_loss"]
                    lower = guard.evaluated(step, compared)
                    if cfg.patience is not None:
                        patient = guard.waited < cfg.patience
                        due["checkpoint"] |= lower or not patient
                if due["row"]:
                    speed = (step - last_step) * cfg.batch_tokens / (seconds - last_seconds)
                    last_step, last_seconds = step, seconds
                    row["clock"] = {"seconds": seconds, "tokens_per_second": speed, "memory_gib": peak_memory(device)}
                    if peak is not None:
                        row["clock"]["mfu"] = estimate.flops_per_token(model, length) * speed / (peak * ranks)
                    log.write(row)
                    tracking.log(wandb_run, row)
                    screen.report(step, row, (end - step) * cfg.batch_tokens / speed, keep=due["evaluate"])
                if due["sample"]:
                    screen.say(f"\n{console.visible(write_sample(step))}\n")
                if due["checkpoint"]:
                    save(step, row | {"compared_loss": compared} if due["evaluate"] else row)

        if reason:
            ensure_saved(step)
        saver.wait()
        log.sync()
    tracking.finish(wandb_run)

    if reason:
        print(f"{interruption.describe(reason)}: ended after step {step}, resume=auto hydra.run.dir={run} goes on")
    if not patient:
        print(f"patience    ended after step {step}: {guard.waited} evaluations without a lower validation loss")
    print(f"checkpoint  {next(iter(checkpoint.steps(run)), None)}")
    if best := checkpoint.describe_best(run):
        print(f"best        {best}")
    lowest = guard.lowest_step
    if lowest is not None and not checkpoint.step_folder(run, lowest).exists():
        print(f"lowest      {guard.lowest:.4f} after step {lowest}, of which no checkpoint is left")
    print(f"next        python -m scripts.generate checkpoint={run} -- To be, or not")
    print(f"tracked     {tracking.where(wandb_run)}", flush=True)
    if saver.failed:
        raise ValueError(f"{saver.failed} checkpoints could not be saved, see above")
    if log.waiting:
        lost = f"from step {log.waiting[0]['step']} on"
        raise ValueError(f"{len(log.waiting)} rows of {log.path} could not be written, {lost}")
    return interruption.exit_code(reason)


def planned_steps(cfg: Train, saved: dict) -> int | None:
    """As set, or as epochs have come to before, on the text that a checkpoint knows; else they depend on the text."""
    measures = ("epochs", "batch_tokens", "seq_len", "packing")
    if cfg.steps is None and saved and all(saved["config"].get(name) == getattr(cfg, name) for name in measures):
        return saved["steps"]
    return cfg.steps


def ends_at(cfg: Train, steps: int) -> int:
    return min(steps, cfg.stop_after or steps)


def nothing_left(cfg: Train, steps: int, start: int, waited: int) -> bool:
    """Whether a run that is started again and again has come to its good end. ValueError for one that is not.

    waited: evaluations without a lower validation loss.
    """
    end = ends_at(cfg, steps)
    if start >= end:
        nothing = f"nothing left to do: {start} steps are done, the run ends at {end}; give more steps"
    elif cfg.patience is not None and waited >= cfg.patience:
        nothing = f"nothing left to do: {start} steps are done, and patience={cfg.patience} has ended; give more"
    else:
        return False
    if cfg.resume != "auto":
        raise ValueError(nothing)
    print(nothing)
    return True


def restored(folder: Path, saved: dict, cfg: Train) -> guards.Guard:
    """What a checkpoint remembers of its steps; of validation only what was measured as it is now."""
    try:
        guard = guards.Guard(**saved["guard"])
    except TypeError as error:  # of another version
        raise ValueError(f"{folder}/training.pt does not fit this program: {error!r}") from error
    if saved["config"].get("evaluation_tokens") != cfg.evaluation_tokens:
        guard.lowest, guard.lowest_step, guard.waited = math.inf, None, 0
    return guard


def find_start(cfg: Train, run: Path) -> tuple[Path | None, Path | None]:
    """The checkpoint to go on from, and that of which to take the weights: the same, or init_from's in a new run.

    With resume=auto, the run folder is the newest run that has one, or a new one.
    """
    if cfg.resume not in (None, "auto"):
        folder = checkpoint.find(cfg.resume, for_training=True)
        if checkpoint.steps(run):
            raise ValueError(f"{run} already holds checkpoints: take another folder, or resume=auto to go on with them")
        return folder, folder
    if checkpoint.steps(run):
        if cfg.resume is None:
            raise ValueError(f"{run} already holds checkpoints: resume=auto goes on with them; or take another folder")
        folder = checkpoint.find(run, for_training=True)
        return folder, folder
    if cfg.resume == "auto":
        print("resume=auto: no run of this name has a checkpoint, beginning a new one")
    return None, None if cfg.init_from is None else checkpoint.find(cfg.init_from)


if __name__ == "__main__":
    main()
