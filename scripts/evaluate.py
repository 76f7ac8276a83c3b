"""Measures a trained model on validation text.  python -m scripts.evaluate checkpoint=runs/NAME"""

import json
import math
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

from rich.progress import track

from conf.console import visible
from conf.entry import check_output, entry_point
from conf.scripts import Evaluate
from data import sources
from data.config import DataConfig, TokenizerConfig
from data.corpus import Corpus, Tokens, learned_from
from data.prepare import encode_documents, prepare, saved_tokenizer
from data.tokenizer import Tokenizer, load_tokenizer
from insight import ngrams, report
from insight.drawing import pyplot
from kernels.decoding import pack_for_decoding
from model import GPT
from scripts.terminal import console, warn
from training import auto, checkpoint, estimate
from training.evaluation import Evaluation, evaluate, windows

A_TOKEN = 32  # bytes per token for sorting n-grams, at least


@entry_point("evaluate", Evaluate)
def main(cfg: Evaluate):
    folder = checkpoint.find(cfg.checkpoint)
    about = checkpoint.read_about(folder)
    files = {kind: output(cfg, kind, folder) for kind in ("json", "plot")} if cfg.report else {}
    model = checkpoint.load_model(folder, auto.choose_device(cfg.device))
    if cfg.quantize == "int8":
        model = pack_for_decoding(model, int8=True, warn=warn)
    tokenizer = load_tokenizer(folder / "tokenizer")

    if cfg.data is not None and cfg.data.source == "files":  # all of the text, not only its validation part
        documents = sources.documents(cfg.data, cache=Path("corpora/downloads"))
        documents = list(documents)
        if not documents:
            raise ValueError(f"data.paths {', '.join(cfg.data.paths)}: {sources.nothing(cfg.data)}")
        tokens, loss_mask = encode_documents(documents, tokenizer)
        text = Tokens([tokens], loss_mask=None if loss_mask is None else Tokens([loss_mask]))
        name = ", ".join(cfg.data.paths)
    else:
        corpus = trained_on(folder, tokenizer) if cfg.data is None else prepared(folder, tokenizer, cfg.data)
        text, name = corpus.validation, f"validation text of {corpus.folder}"

    seq_len = about["seq_len"] if cfg.seq_len is None else cfg.seq_len
    stride = seq_len if cfg.stride is None else cfg.stride
    if seq_len > model.max_seq_len:
        raise ValueError(f"seq_len must be at most the model's max_seq_len, got {seq_len} and {model.max_seq_len}")
    if stride > seq_len:
        raise ValueError(f"stride must be at most seq_len, got {stride} and {seq_len}")
    check_memory(cfg, model, len(text), seq_len, stride)
    how = {
        "batch": cfg.batch,
        "autocast": auto.autocast(model.embedding.weight.device, about["precision"]),
        "progress": bar("evaluating"),
    }
    if cfg.report and text.loss_mask is not None:
        raise ValueError(
            "report=true measures every token of a text, but of conversations only answers count: give report=false"
        )
    if cfg.report:
        training = training_text(folder, tokenizer)
        figures = {"checkpoint": str(folder), "step": about["step"], "text": name, "seq_len": seq_len, "stride": stride}
        figures |= measure(cfg, model, tokenizer, text, training, seq_len, stride, how)
        result = Evaluation(figures["nats"], figures["tokens"], figures["bytes"])
    else:
        how |= {"seq_len": seq_len, "stride": stride, "loss_mask": text.loss_mask}
        result = evaluate(model, text.read, len(text), tokenizer.bytes_per_token(), **how)
    if not math.isfinite(result.nats):  # finite weights may still overflow
        raise ValueError(f"the loss of {folder} is {result.nats}, not finite: did the training diverge?")
    print(f"checkpoint     {folder}, {about['step']} steps")
    print(f"text           {name}: {len(text):,} tokens, {result.bytes:,} bytes")
    print(f"windows        {seq_len} tokens, at least {seq_len - stride} of them context")
    print(f"loss           {result.loss:.4f} nats per token")
    print(f"perplexity     {result.perplexity:.2f}")
    print(f"bits per byte  {result.bits_per_byte:.4f}")
    if cfg.report:
        found = figures["by_document"]
        documents = [row | {"begins": visible(row["begins"])} for row in found["documents"]]
        shown = figures | {"by_document": found | {"documents": documents}}
        report.show(shown, console())
        save(figures, files)


def check_memory(cfg: Evaluate, model: GPT, n_tokens: int, seq_len: int, stride: int):
    """ValueError if the evaluation does not fit into this machine's memory; on a GPU torch reports it."""
    if model.embedding.weight.device.type != "cpu":
        return
    rows = min(cfg.batch, -(-n_tokens // stride))
    if not cfg.report:  # the report splits its batches
        logits = 8 * rows * seq_len * model.vocab_size  # and their log-softmax
        estimate.check_fits(f"batch: {rows:,} windows of {seq_len:,} tokens at once", logits)
        return
    a_sample = min(seq_len // 2 + cfg.sample_tokens, model.max_seq_len)
    samples = min(cfg.samples, n_tokens // (seq_len // 2 + cfg.sample_tokens))  # of a short text fewer
    what = f"samples: {samples:,} of {cfg.sample_tokens:,} tokens at once"
    estimate.check_fits(what, estimate.keys_and_values(model, samples * a_sample))


def trained_on(folder: Path, tokenizer: Tokenizer) -> Corpus:
    """The corpus that a checkpoint was trained on."""
    about = checkpoint.read_about(folder)
    if (text := checkpoint.text_of(about, folder)) is None:
        raise ValueError(f"{folder} does not name its training text: give one, as data=files data.paths='[my.txt]'")
    data, settings = text
    movable = settings.path is not None  # a file that may have been moved
    return prepared(folder, tokenizer, data, None if movable else settings)


def prepared(folder: Path, tokenizer: Tokenizer, data: DataConfig, settings: TokenizerConfig | None = None) -> Corpus:
    """A corpus in the checkpoint's tokenizer; `settings` are the tokenizer's, by default those of the saved one."""
    about = checkpoint.read_about(folder)
    its_own = about.get("data") or {}  # older versions lack some settings
    known = learned_from(about, folder) if its_own and its_own.items() <= asdict(data).items() else None
    corpus = prepare(data, saved_tokenizer(folder / "tokenizer") if settings is None else settings, known=known)
    if corpus.tokenizer.fingerprint() != tokenizer.fingerprint():
        raise ValueError(f"{corpus.folder} has another tokenizer than {folder}: was the text changed?")
    return corpus


# --- the report -----------------------------------------------------------------------------------------------------


def training_text(folder: Path, tokenizer: Tokenizer) -> Tokens | None:
    """The training text of a checkpoint; None, with a warning, if it is unknown (an imported model) or gone."""
    try:
        return trained_on(folder, tokenizer).train
    except (ValueError, FileNotFoundError) as error:
        warn(f"without its training text there are no n-grams, frequencies and copies: {error}")
        return None


def measure(
    cfg: Evaluate,
    model: GPT,
    tokenizer: Tokenizer,
    text: Tokens,
    training: Tokens | None,
    seq_len: int,
    stride: int,
    how: dict,
) -> dict:
    """The numbers of the report, for JSON."""
    counts = baseline = None
    figures: dict = {"training_tokens": None}
    if training is not None:
        n = min(cfg.ngram_tokens, len(training))
        estimate.check_fits(f"ngram_tokens: counting n-grams in {n:,} tokens", A_TOKEN * n)
        counts = report.count(training, tokenizer.vocab_size, bar("counting tokens"))
        baseline = ngrams.fit(training.read(0, n), tokenizer.vocab_size, cfg.ngram_order, bar("counting n-grams"))
        figures = {"training_tokens": len(training), "ngram_tokens": n}
    bounds, _ = tokenizer.document_bounds(text)
    plan = windows(len(text), seq_len, stride)
    figures |= report.losses(
        model,
        text,
        plan,
        tokenizer.bytes_per_token(),
        bounds,
        tokenizer.decode,
        counts=counts,
        baseline=baseline,
        **how,
    )
    if training is not None:
        figures["copying"] = report.copies(
            model,
            text,
            training,
            tokenizer.decode,
            samples=cfg.samples,
            sample_tokens=cfg.sample_tokens,
            prompt_tokens=seq_len // 2,
            temperature=cfg.temperature,
            seed=cfg.seed,
            writing=bar("generating"),
            searching=bar("looking for copies"),
        )
    return figures


def output(cfg: Evaluate, kind: str, folder: Path) -> Path | None:
    """The path of a file of the report, or None; ValueError, before any work, if it cannot be written."""
    path = getattr(cfg, kind)
    if path is None:
        return None
    if kind == "plot":
        try:
            pyplot()
        except ValueError as error:
            if path != "auto":
                raise
            warn(str(error))
            return None
    if path == "auto":
        place = folder.parent.parent if folder.parent.name == "checkpoints" else Path()
        path = place / f"report_{folder.name}{'.png' if kind == 'plot' else '.json'}"
    check_output(kind, path)
    return Path(path)


def save(figures: dict, files: dict[str, Path | None]):
    if files["json"] is not None:
        content = json.dumps(figures, indent=1, ensure_ascii=False, allow_nan=False)
        files["json"].write_text(content + "\n", encoding="utf-8")
    if files["plot"] is not None:
        report.plot(figures, files["plot"])
    print()
    for name, path in (("figures", files["json"]), ("picture", files["plot"])):
        if path is not None:
            print(f"{name}        {path}")


def bar(title: str) -> Callable:
    """A progress bar over items, on a terminal."""
    return partial(track, description=title, transient=True, disable=not sys.stderr.isatty())


if __name__ == "__main__":
    main()
