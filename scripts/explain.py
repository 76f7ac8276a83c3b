"""Explains a prediction of a trained model.  python -m scripts.explain checkpoint=runs/NAME -- To be, or not"""

import json
from pathlib import Path

from conf.entry import check_output, entry_point
from conf.scripts import Explain
from data.tokenizer import load_tokenizer
from model import GPT
from scripts.explanations import attention, parts, tokens
from scripts.explanations.case import read_case
from scripts.terminal import warn
from training import auto, checkpoint, estimate

METHODS = {
    "attention": attention.explain_attention,
    "occlusion": tokens.explain_occlusion,
    "swap": tokens.explain_swap,
    "gradient": tokens.explain_gradient,
    "integrated_gradients": tokens.explain_integrated_gradients,
    "ablation": parts.explain_ablation,
    "patching": parts.explain_patching,
    "lens": parts.explain_lens,
}


@entry_point("explain", Explain)
def main(cfg: Explain):
    explain(cfg)


def explain(cfg: Explain):
    for setting in ("json", "plot", "page"):
        check_output(setting, getattr(cfg, setting))
    folder = checkpoint.find(cfg.checkpoint, warn=warn)
    model = checkpoint.load_model(folder, auto.choose_device(cfg.device))
    case = read_case(cfg, model, load_tokenizer(folder / "tokenizer"))
    check_memory(cfg, model, case.tokens.shape[1])
    print(f"checkpoint  {folder}, {checkpoint.read_about(folder)['step']} steps")
    for line in case.described():
        print(line)
    print()
    figures = METHODS[cfg.method](cfg, case)
    if cfg.json is not None:
        facts = {"checkpoint": str(folder), "method": cfg.method, **case.facts(), **figures}
        try:
            content = json.dumps(facts, ensure_ascii=False, allow_nan=False)
        except ValueError:
            raise ValueError(f"{cfg.json} is not written: some numbers of the explanation are not finite") from None
        Path(cfg.json).write_text(content, encoding="utf-8")
    for path in (cfg.plot, cfg.page, cfg.json):
        if path is not None:
            print(path)


def check_memory(cfg: Explain, model: GPT, s: int):
    """ValueError if a batch of texts of `s` tokens does not fit into memory; on a GPU torch reports it."""
    gradients = cfg.method == "integrated_gradients"
    texts = min(cfg.batch, max(s, cfg.max_steps) if gradients else s)
    n_bytes = 8 * texts * s * model.config.d_model * (model.config.n_layers if gradients else 1)
    if model.embedding.weight.device.type == "cpu":
        estimate.check_fits(f"batch: {texts:,} texts of {s:,} tokens at once", n_bytes)


if __name__ == "__main__":
    main()
