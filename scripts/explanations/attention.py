"""Where the heads of the last token attend, and what they cause."""

import torch
from torch import Tensor

from conf.scripts import Explain
from insight import attribution, maps
from insight.page import write_page
from insight.patching import ablate, heads, patch, rank_correlation, record, recovered
from model.hooks import Site
from scripts.explanations.case import ABLATED, LARGE, SMALL, Case, both_scores
from scripts.terminal import percent, show

LOOK = 0.3  # a weight of at least this, and twice a uniform one, counts as attending; below a tenth of it does not


def explain_attention(cfg: Explain, case: Case) -> dict:
    """All maps, and a table: where the heads of the last token attend, and what they cause."""
    weights = maps.attention_maps(case.model, case.tokens).cpu()  # (n_layers, h, q, k)
    key = find_key(cfg, case)
    rows = head_table(cfg, case, weights, key)
    correlation = rank_correlation([row["weight"] for row in rows], [abs(row["effect"]) for row in rows])

    last = len(case.labels) - 1
    print(f"where the heads attend from the last token, {last} ({case.labels[-1]})")
    print(f"weight: on token {key} ({case.labels[key]}), {because(cfg)}\n")
    show(
        ["head", "weight", "attends most to", "with", "effect", "p(answer)", *rows[0].keys() & {"recovered"}, ""],
        [
            [
                f"{row['layer']}.{row['head']}",
                f"{row['weight']:.4f}",
                case.places[row["looks_at"]],
                f"{row['most']:.4f}",
                f"{row['effect']:+.4f}",
                f"{row['probability']:.4f}",
                *([percent(row["recovered"])] if "recovered" in row else []),
                row["remark"],
            ]
            for row in rows
        ],
        left={"attends most to", ""},
    )
    print(f"\neffect: loss of score, in nats, if the output of the head is {ABLATED[cfg.ablation]}; p(answer): then")
    if case.corrupted is not None:
        print("recovered: share of the score that returns if, on the corrupted text, this head has its output of here")
    if correlation is not None:
        print(f"rank correlation, over the heads, of weight and size of effect: {correlation:+.2f}")
    print("A weight is not a cause: it says where a head attends, not whether that changes the answer.")
    if cfg.plot is not None:
        effects = torch.tensor([row["effect"] for row in rows]).view(weights.shape[:2])
        maps.draw_attention(cfg.plot, weights, case.labels, effects, case.title)
    if cfg.page is not None:
        lines = [f"checkpoint  {cfg.checkpoint}", *case.described()[1:]]  # the page shows the text itself
        about = {"lines": lines, "key": key, "because": because(cfg), "ablated": ABLATED[cfg.ablation]}
        write_page(cfg.page, weights, case.labels, rows, about)
    return {"key": key, "heads": rows, "rank_correlation": correlation, "weights": weights.tolist()}


def head_table(cfg: Explain, case: Case, weights: Tensor, key: int) -> list[dict]:
    """One row for each head: where it attends, what it causes, and a remark if the two differ."""
    rows = [head_row(cfg, case, weights, site, key) for site in heads(case.model)]
    if case.corrupted is not None:
        for row, share in zip(rows, patch_heads(case), strict=True):
            row["recovered"] = share
    largest = max(1e-9, *(abs(row["effect"]) for row in rows))
    for row in rows:
        row["remark"] = remark(row, largest, len(case.labels))
    return rows


def find_key(cfg: Explain, case: Case) -> int:
    """Index of the token that matters: of those before the last, the one whose occlusion changes the score most."""
    if cfg.key is not None:
        return cfg.key
    try:
        effects = attribution.occlusion(case.model, case.tokens, case.score, case.baseline, cfg.batch)
    except attribution.CaptumMissingError as error:
        raise ValueError(f"{error}; or say which token matters, key=0 for the first") from error
    return effects.abs()[:-1].argmax().item() if len(effects) > 1 else 0


def because(cfg: Explain) -> str:
    return "given by key" if cfg.key is not None else "of those before the last, its occlusion changes the score most"


def head_row(cfg: Explain, case: Case, weights: Tensor, site: Site, key: int) -> dict:
    last = weights[site.layer, site.head, -1]
    logits = ablate(case.model, case.tokens, [site], cfg.ablation)
    row = {"layer": site.layer, "head": site.head, "weight": last[key].item(), "looks_at": last.argmax().item()}
    return row | {"most": last.max().item(), "effect": case.loss(logits), "probability": case.judge(logits)[1]}


def remark(row: dict, largest: float, n: int) -> str:
    """A remark if weight and effect differ, in a text of n tokens."""
    if row["most"] >= max(LOOK, 2 / n) and abs(row["effect"]) < SMALL * largest:
        return "attends, no effect"
    if row["weight"] < LOOK / 10 and abs(row["effect"]) >= LARGE * largest:
        return "effect, without attending there"
    return ""


def patch_heads(case: Case) -> list[float]:
    """Share of the score that each head alone recovers."""
    ends, source = both_scores(case), record(case.model, case.tokens, heads(case.model))
    logits = [patch(case.model, case.corrupted, {site: x}) for site, x in source.items()]
    return recovered(case.score(torch.cat(logits)), *ends).tolist()
