"""Writes text with a trained model.  python -m scripts.generate checkpoint=runs/NAME -- To be, or not"""

import sys
from collections.abc import Iterator

import torch

from conf.entry import entry_point
from conf.schema import Generate
from data.tokenizer import load_tokenizer
from model import generate
from training import auto, checkpoint


@entry_point("generate", Generate)
def main(cfg: Generate):
    folder = checkpoint.find(cfg.checkpoint, warn=warn)
    model = checkpoint.load_model(folder, auto.choose_device(cfg.device))
    tokenizer = load_tokenizer(folder / "tokenizer")
    prompt = tokenizer.prompt(cfg.prompt)
    if len(prompt) + cfg.max_new_tokens - 1 > model.max_seq_len:
        half = model.max_seq_len // 2
        warn(f"longer than the context of {model.max_seq_len} tokens: when it is full, the last {half} are read again")

    def tokens(seed: int) -> Iterator[int]:
        columns = generate(
            model,
            torch.tensor([prompt], device=model.embedding.weight.device),
            cfg.max_new_tokens,
            temperature=cfg.temperature,
            top_k=cfg.top_k,
            top_p=cfg.top_p,
            seeds=[seed],
            overflow="slide",
        )
        for column in columns:
            if (token := column.item()) in tokenizer.stops:
                return
            yield token

    for i in range(cfg.num_samples):
        if cfg.num_samples > 1:
            print(f"--- {i + 1} of {cfg.num_samples}, seed {cfg.seed + i}")
        print(cfg.prompt, end="", flush=True)
        for piece in tokenizer.stream(tokens(cfg.seed + i), after=prompt):
            print(piece, end="", flush=True)
        print()


def warn(text: str):
    print(text, file=sys.stderr)


if __name__ == "__main__":
    main()
