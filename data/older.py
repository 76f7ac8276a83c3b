"""What earlier versions called settings, figures and weights: what they saved is read under today's names."""

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
    """Dicts, and lists of them, with today's names for their keys and for the values that were renamed."""
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
    """Of a norm's weight, which was called its gain."""
    return name.removesuffix("gain") + "weight" if name.endswith(".gain") else name
