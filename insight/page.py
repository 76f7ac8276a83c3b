"""Attention as a page: one file that needs no network, with every head, and the number under the pointer."""

import base64
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

TEMPLATE = Path(__file__).with_name("page.html")
FULL = 65535  # a weight of 1, in the two bytes that each takes


def write_page(path: str | Path, weights: Tensor, tokens: Sequence[str], heads: list[dict], about: dict):
    """weights (n_layers, h, q, k); `heads` are the rows of the table, in the maps' order; `about` is said at the top.

    A head's row has `layer`, `head`, `weight` (on the token number `key`), `looks_at` (a token's number), `most` (the
    weight there), `effect`, `probability`, `remark` and perhaps `recovered`; about has `lines` for the top, `key`,
    `because` (why that token) and `ablated` (what an ablated head says instead).
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
    safe = json.dumps(data, ensure_ascii=False).replace("<", "\\u003c")  # no token ends the script
    page = TEMPLATE.read_text(encoding="utf-8").replace("/* DATA */ null", safe)
    Path(path).write_text(page, encoding="utf-8")
