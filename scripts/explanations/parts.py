"""What each part of the model contributes to the answer, and what the residual stream predicts after each block."""

from collections.abc import Iterable

import torch
from torch import Tensor

from conf.scripts import Explain
from insight import maps
from insight.lens import logit_lens
from insight.patching import ablate, branches, everything, heads, patch, patch_each_position, record, recovered
from model.hooks import Site
from scripts.explanations.case import ABLATED, SMALL, Case, both_scores
from scripts.terminal import percent, show


def explain_ablation(cfg: Explain, case: Case) -> dict:
    """The effect of each head, each branch and each block on the answer."""
    n_layers = len(case.model.blocks)
    groups = {str(site): [site] for site in (*heads(case.model), *branches(case.model))}
    groups |= {f"block {i}": [site for site in branches(case.model) if site.layer == i] for i in range(n_layers)}
    rows = []
    for part, sites in groups.items():
        logits = ablate(case.model, case.tokens, sites, cfg.ablation)
        effect, (_, p) = case.loss(logits), case.judge(logits)
        rows.append({"part": part, "effect": effect, "probability": p, "best": case.best(logits)})
    show(
        ["without", "effect", "p(answer)", "most likely"],
        [[row["part"], f"{row['effect']:+.4f}", f"{row['probability']:.4f}", row["best"]] for row in rows],
        left={"without", "most likely"},
    )
    print(f"\neffect: loss of score, in nats, if the output of the part is {ABLATED[cfg.ablation]}")
    if cfg.plot is not None:
        draw_parts(cfg, case, {row["part"]: row["effect"] for row in rows}, [], "loss of score, nats")
    return {"parts": rows}


def explain_patching(cfg: Explain, case: Case) -> dict:
    """Runs the model on the corrupted text, with the outputs of parts replaced by those on the clean text."""
    model, n_layers = case.model, len(case.model.blocks)
    streams = [Site("stream", i) for i in range(n_layers + 1)]
    clean = record(model, case.tokens, {*everything(model), *branches(model), *streams})
    clean_score, corrupted_score = both_scores(case)

    def shares(logits: Tensor) -> list[float]:
        return recovered(case.score(logits), clean_score, corrupted_score).tolist()

    def alone(sites: Iterable[Site]) -> list[float]:
        return shares(patch(model, case.corrupted, {site: clean[site] for site in sites}))

    parts = {"nothing": alone([])[0], "everything": alone(everything(model))[0]}
    parts |= {str(site): alone([site])[0] for site in (*heads(model), *branches(model))}
    stream = [shares(patch_each_position(model, case.corrupted, {site: clean[site]}, cfg.batch)) for site in streams]

    changed = (case.tokens != case.corrupted)[0].tolist()
    names = stream_names(n_layers)
    show(["patched", "recovered"], [[part, percent(share)] for part, share in parts.items()], left={"patched"})
    print("\nthe stream, at one token:")
    moved = [i for i in range(len(changed)) if changed[i] or max(abs(row[i]) for row in stream) >= SMALL]
    show(
        ["", *names],
        [[case.places[i] + (" *" if changed[i] else ""), *(percent(row[i]) for row in stream)] for i in moved],
        left={""},
    )
    if len(moved) < len(changed):
        print(f"the other {len(changed) - len(moved)} tokens recover less than {SMALL:.0%} anywhere")
    print(
        f"\nrecovered: share of the way from the score of the corrupted text, {corrupted_score:.4f}, to that "
        "of the clean text; "
        "* marks corrupted tokens"
    )
    if cfg.plot is not None:
        grid = ("the stream, at one token", torch.tensor(stream).T, case.places, names)
        draw_parts(cfg, case, parts, [grid], "recovered, 1 = all")
    return {"parts": parts, "stream": stream}


def stream_names(n_layers: int) -> list[str]:
    return ["embedding", *(f"block {i}" for i in range(n_layers))]


def draw_parts(cfg: Explain, case: Case, parts: dict[str, float], grids: list, unit: str):
    """Heads and branches as cells, one row per layer."""
    layers = range(len(case.model.blocks))
    n_heads = case.model.blocks[0].attention.n_heads
    columns = [*(f"head {h}" for h in range(n_heads)), "attention", "feed-forward"]
    cells = [
        [*(parts[f"head {i}.{h}"] for h in range(n_heads)), parts[f"attention {i}"], parts[f"feed-forward {i}"]]
        for i in layers
    ]
    grid = ("heads, all of a layer's heads, feed-forward", torch.tensor(cells), [f"block {i}" for i in layers], columns)
    maps.draw_cells(cfg.plot, [grid, *grids], case.title, unit)


def explain_lens(cfg: Explain, case: Case) -> dict:
    """What the model would predict if it ended after each block."""
    chances = logit_lens(case.model, case.tokens).softmax(-1)  # (n_layers + 1, s, vocab)
    p, best = chances.max(-1)  # (n_layers + 1, s)
    answer = chances[:, -1, case.answer]
    ranks = (chances[:, -1] > answer.unsqueeze(1)).sum(-1) + 1
    names, best_labels = stream_names(len(case.model.blocks)), [[case.label(t) for t in row] for row in best.tolist()]
    show(
        ["after", "most likely", "p", "p(answer)", "rank of the answer"],
        [
            [name, best_labels[i][-1], f"{p[i, -1]:.4f}", f"{answer[i]:.4f}", str(ranks[i].item())]
            for i, name in enumerate(names)
        ],
        left={"after", "most likely"},
    )
    print(
        "\nwhat the output head predicts from the stream of the last token; early layers may hold what it cannot read"
    )
    if cfg.plot is not None:
        maps.draw_lens(cfg.plot, best_labels, p.cpu(), case.places, case.title)
    found = {"best": best.tolist(), "best_labels": best_labels, "best_probability": p.tolist()}
    return found | {"answer_probability": answer.tolist(), "answer_rank": ranks.tolist()}
