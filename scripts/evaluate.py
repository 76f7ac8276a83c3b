"""Measures a trained model on held-out text.  python -m scripts.evaluate checkpoint=runs/NAME"""

import sys
from dataclasses import asdict
from pathlib import Path

from rich.progress import track

from conf.entry import entry_point
from conf.schema import Evaluate
from data import sources
from data.corpus import Tokens
from data.prepare import prepare, saved_tokenizer
from data.tokenizer import load_tokenizer
from model.few_rows import for_few_rows
from training import auto, checkpoint
from training.evaluation import evaluate


@entry_point("evaluate", Evaluate)
def main(cfg: Evaluate):
    folder = checkpoint.find(cfg.checkpoint)
    about = checkpoint.read_about(folder)
    model = checkpoint.load_model(folder, auto.choose_device(cfg.device))
    if cfg.quantize == "int8":
        model = for_few_rows(model, int8=True, warn=lambda text: print(text, file=sys.stderr))
    tokenizer = load_tokenizer(folder / "tokenizer")

    if cfg.data is not None and cfg.data.source == "files":  # all that is named is meant
        documents = sources.documents(asdict(cfg.data), cache=Path("corpora/downloads"))
        texts = [document.text for document in documents]
        if not texts:
            raise ValueError(f"data.paths: the files are empty: {', '.join(cfg.data.paths)}")
        text = Tokens([tokenizer.documents(texts)])
        name = ", ".join(cfg.data.paths)
    else:
        data = about.get("data") if cfg.data is None else asdict(cfg.data)
        if data is None or (cfg.data is None and "tokenizer" not in about):
            raise ValueError(f"{folder} names no text of its own: give one, as data=files data.paths='[my.txt]'")
        settings = about["tokenizer"] if cfg.data is None else None
        if settings is None or settings["path"] is not None:  # a file that may be elsewhere by now
            settings = saved_tokenizer(folder / "tokenizer")
        corpus = prepare(data, settings)
        if corpus.tokenizer.fingerprint() != tokenizer.fingerprint():
            raise ValueError(f"{corpus.folder} has another tokenizer than {folder}: is it the same text?")
        text, name = corpus.validation, f"held out in {corpus.folder}"

    seq_len = about["seq_len"] if cfg.seq_len is None else cfg.seq_len
    stride = seq_len if cfg.stride is None else cfg.stride
    if seq_len > model.max_seq_len:
        raise ValueError(f"seq_len must be at most the model's max_seq_len, got {seq_len} and {model.max_seq_len}")
    if stride > seq_len:
        raise ValueError(f"stride must be at most seq_len, got {stride} and {seq_len}")
    result = evaluate(
        model,
        text.read,
        len(text),
        tokenizer.token_lengths(),
        seq_len=seq_len,
        stride=stride,
        batch=cfg.batch,
        autocast=auto.autocast(model.embedding.weight.device, about["precision"]),
        progress=lambda batches: track(batches, "evaluating", transient=True, disable=not sys.stderr.isatty()),
    )
    print(f"checkpoint     {folder}, {about['step']} steps")
    print(f"text           {name}: {len(text):,} tokens, {result.bytes:,} bytes")
    print(f"windows        {seq_len} tokens, at least {seq_len - stride} of them context")
    print(f"loss           {result.loss:.4f} nats per token")
    print(f"perplexity     {result.perplexity:.2f}")
    print(f"bits per byte  {result.bits_per_byte:.4f}")


if __name__ == "__main__":
    main()
