"""Names that settings, metrics and weights had in earlier versions, so that saved files can still be read."""

from typing import Any

NAMES = {
    "evaluation_tokens": "eval_tokens",
    "clip": "grad_clip",
    "lr_gain": "lr_norm",
    "beginning": "bos_token",
    "validation_loss": "val_loss",
    "perplexity": "val_ppl",
    "bits_per_byte": "val_bpb",
    "tokens_per_second": "tok_per_sec",
    "peak": "initial_lr",
}
VALUES = {("attention", "written"): "math", ("name", "gains"): "norms"}


def renamed(saved: Any) -> Any:
    """Returns dicts, or lists of them, with former keys and values replaced by the current ones."""
    if isinstance(saved, list):
        return [renamed(item) for item in saved]
    if not isinstance(saved, dict):
        return saved
    current = {NAMES.get(key, key): renamed(value) for key, value in saved.items()}
    for (key, value), name in VALUES.items():
        if isinstance(current.get(key), str) and current[key] == value:
            current[key] = name
    return current


def weight_name(name: str) -> str:
    """Returns the current name of a weight: norms called theirs `gain`."""
    return name.removesuffix("gain") + "weight" if name.endswith(".gain") else name
