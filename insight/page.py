"""Attention as an HTML page: one file, without a network, with every head; it shows the number under the pointer."""

import base64
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

TEMPLATE = Path(__file__).with_name("page.html")
FULL = 65535  # a weight of 1, stored in two bytes


def write_page(path: str | Path, weights: Tensor, tokens: Sequence[str], heads: list[dict], about: dict):
    """Writes the page. weights (n_layers, h, q, k); `heads` are the rows of the table, in the same order.

    A row has `layer`, `head`, `weight` (on the token with index `key`), `looks_at` (the index of the most attended
    token), `most` (its weight), `effect`, `probability`, `remark` and perhaps `recovered`. `about` has `lines` for the
    top, `key`, `because` (why that token) and `ablated` (the output of an ablated head).
    """
    lower = torch.ones(weights.shape[-2:], dtype=torch.bool).tril()
    packed = (weights[..., lower] * FULL).round().cpu().numpy().astype("<u2")  # (n_layers, h, pairs)
    data = {
        "shape": [*weights.shape[:2], len(tokens)],
        "weights": base64.b64encode(np.ascontiguousarray(packed)).decode(),
        "full": FULL,
        "tokens": list(tokens),
        "heads": heads,
        **about,
    }
    safe = json.dumps(data, ensure_ascii=False).replace("<", "\\u003c")  # so that no token can end the script
    page = TEMPLATE.read_text(encoding="utf-8").replace("/* DATA */ null", safe)
    Path(path).write_text(page, encoding="utf-8")
