"""What each token of the text contributes to the answer."""

import torch
from torch import Tensor

from conf.scripts import Explain
from insight import attribution, maps
from insight.patching import last_logits, swaps
from scripts.explanations.case import Case
from scripts.terminal import show


def explain_occlusion(cfg: Explain, case: Case) -> dict:
    effects = attribution.occlusion(case.model, case.tokens, case.score, case.baseline, cfg.batch)
    what = "the average embedding" if cfg.replacement is None else f"{cfg.replacement!r}"
    return show_tokens(cfg, case, effects, f"effect: loss of score, in nats, if {what} replaces the token")


def explain_gradient(cfg: Explain, case: Case) -> dict:
    effects = attribution.gradient_x_input(case.model, case.tokens, case.score)
    return show_tokens(
        cfg,
        case,
        effects,
        "effect: gradient of the score with respect to the embedding, times the embedding; exact for small "
        "changes only",
    )


def explain_integrated_gradients(cfg: Explain, case: Case) -> dict:
    baseline, start = case.baseline, "the average embedding at all positions"
    if case.corrupted is not None:
        baseline, start = attribution.embed(case.model, case.corrupted), "the corrupted text"
    elif cfg.replacement is not None:
        start = f"{cfg.replacement!r} at all positions"
    found = attribution.integrated_gradients(
        case.model, case.tokens, case.score, baseline, max_steps=cfg.max_steps, batch=cfg.batch
    )
    figures = show_tokens(
        cfg, case, found.attributions, f"effect: share of the token in the gain of score from {start}"
    )
    share = abs(found.error) / max(abs(found.difference), 1e-12)
    total = found.difference + found.error
    print(
        f"{'complete' if found.complete else 'NOT COMPLETE'}: the shares sum to {total:.4f}, the gain of score is "
        f"{found.difference:.4f}; an error of {share:.2%} with {found.steps} steps"
    )
    known = {"difference": found.difference, "error": found.error, "steps": found.steps, "complete": found.complete}
    return figures | known


def show_tokens(cfg: Explain, case: Case, effects: Tensor, meaning: str) -> dict:
    """One bar per token, in the terminal and as a picture."""
    values, labels = effects.tolist(), case.labels
    far = max(map(abs, values)) or 1.0
    bars = [("+" if value >= 0 else "-") * round(20 * abs(value) / far) for value in values]
    show(
        ["", "token", "effect", " "],
        [[str(i), *row] for i, row in enumerate(zip(labels, (f"{value:+.4f}" for value in values), bars, strict=True))],
        left={"token", " "},
    )
    print(f"\n{meaning}")
    if cfg.plot is not None:
        maps.draw_bars(cfg.plot, values, case.places, case.title, f"{cfg.method.replace('_', ' ')}, nats")
    return {"effects": values}


def explain_swap(cfg: Explain, case: Case) -> dict:
    """Each token that the corrupted text changes, alone, and then all of them."""
    where, prompts = swaps(case.tokens, case.corrupted)
    with torch.no_grad():
        logits = torch.cat([last_logits(case.model, chunk) for chunk in prompts.split(cfg.batch)])
        whole = last_logits(case.model, case.corrupted)
    new = [case.label(token) for token in case.corrupted[0, where].tolist()]
    rows = []
    for place, token, one in zip([*where, None], [*new, None], [*logits.split(1), whole], strict=True):
        effect, (_, p) = case.loss(one), case.judge(one)
        rows.append({"place": place, "token": token, "effect": effect, "probability": p, "best": case.best(one)})
    show(
        ["token", "becomes", "effect", "p(answer)", "most likely"],
        [
            [
                "all" if row["place"] is None else case.places[row["place"]],
                row["token"] or "",
                f"{row['effect']:+.4f}",
                f"{row['probability']:.4f}",
                row["best"],
            ]
            for row in rows
        ],
        left={"token", "becomes", "most likely"},
    )
    print("\neffect: loss of score, in nats, if this token alone is swapped, and if all are")
    if cfg.plot is not None:
        names = [f"{case.places[row['place']]} > {row['token']}" for row in rows[:-1]]
        maps.draw_bars(cfg.plot, [row["effect"] for row in rows], [*names, "all"], case.title, "loss of score, nats")
    return {"swaps": rows}
