"""The causal effect of a part of the model: replace its output, and measure how the answer changes.

`editing` replaces the activation at a site. Ablation replaces it by zeros or a mean, patching by the activation for
another prompt ("Investigating Gender Bias in Language Models Using Causal Mediation Analysis", 2020; "Locating and
Editing Factual Associations in GPT", 2022).
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from model import GPT
from model.hooks import Site, editing, recording

Score = Callable[[Tensor], Tensor]  # logits (b vocab) -> (b,), in nats


def heads(model: GPT) -> list[Site]:
    return [Site("head", i, h) for i, block in enumerate(model.blocks) for h in range(block.attention.n_heads)]


def branches(model: GPT) -> list[Site]:
    return [Site(kind, i) for i in range(len(model.blocks)) for kind in ("attention", "feed_forward")]


def everything(model: GPT) -> list[Site]:
    """All sites that write into the residual stream, head by head: patching them all replaces the prompt completely."""
    return [Site("embedding"), *heads(model), *(site for site in branches(model) if site.kind == "feed_forward")]


@torch.no_grad()
def record(model: GPT, tokens: Tensor, sites: Iterable[Site]) -> dict[Site, Tensor]:
    """The activations (b s d) at each site for tokens (b s)."""
    with recording(model, sites) as found:
        model(tokens)
    return found


# --- the answer -----------------------------------------------------------------------------------------------------


def last_logits(model: GPT, tokens: Tensor) -> Tensor:
    """tokens (b s) -> the logits after each row, (b vocab)."""
    return model(tokens, at=torch.full((len(tokens),), tokens.shape[1] - 1, device=tokens.device))


def score_of(answer: int, against: int | None = None) -> Score:
    """The score of an answer, in nats: log p(answer), or log p(answer) - log p(against).

    The latter is the difference of two logits: it changes only if one of them does, not if a third token takes
    probability from both.
    """

    def score(logits: Tensor) -> Tensor:
        if against is not None:
            return logits[:, answer] - logits[:, against]
        return logits.log_softmax(-1)[:, answer]

    return score


# --- ablation -------------------------------------------------------------------------------------------------------

ABLATIONS = {
    "zero": torch.zeros_like,
    "mean": lambda x: x.mean(1, keepdim=True).expand_as(x),  # of the prompt's own positions
}


@torch.no_grad()
def ablate(model: GPT, tokens: Tensor, sites: Iterable[Site], how: str = "zero") -> Tensor:
    """The logits (b vocab) after tokens (b s) if the activations at the sites are "zero", or their own "mean"."""
    with editing(model, dict.fromkeys(sites, ABLATIONS[how])):
        return last_logits(model, tokens)


# --- patching -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def patch(model: GPT, tokens: Tensor, source: dict[Site, Tensor], where: Tensor | None = None) -> Tensor:
    """The logits (b vocab) after tokens (b s) if the activations at some sites are those of `source`, (1 s d) or (s d).

    where (b s): True at the positions that are patched; None: all.
    """

    def put(there: Tensor):
        def edit(x: Tensor) -> Tensor:
            return there.expand_as(x) if where is None else torch.where(where.unsqueeze(-1), there, x)

        return edit

    with editing(model, {site: put(there) for site, there in source.items()}):
        return last_logits(model, tokens)


def patch_each_position(model: GPT, tokens: Tensor, source: dict[Site, Tensor], batch: int = 64) -> Tensor:
    """Patches a prompt (1 s) at one position at a time: the logits (s vocab), `batch` positions per forward."""
    s = tokens.shape[1]
    alone = torch.eye(s, dtype=torch.bool, device=tokens.device).split(batch)
    return torch.cat([patch(model, tokens.expand(len(where), s), source, where) for where in alone])


def recovered(score: Tensor, clean: float, corrupted: float) -> Tensor:
    """The fraction of the difference between the corrupted and the clean prompt's score that a patch recovers."""
    return (score - corrupted) / (clean - corrupted)


def rank_correlation(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Spearman's rank correlation, with mean ranks for ties; None if one of the two is constant."""
    ranks = torch.stack([_ranks(torch.tensor(values, dtype=torch.float64)) for values in (x, y)])
    centred = ranks - ranks.mean(1, keepdim=True)
    length = centred.norm(dim=1)
    return None if (length == 0).any() else (centred[0] @ centred[1] / length.prod()).item()


def _ranks(x: Tensor) -> Tensor:
    return (x.unsqueeze(1) > x).sum(1) + 0.5 * (x.unsqueeze(1) == x).sum(1)


# --- counterfactual swap --------------------------------------------------------------------------------------------


def swaps(clean: Tensor, other: Tensor) -> tuple[list[int], Tensor]:
    """Two prompts (1 s) -> the positions where they differ, and prompts (n s) with the other's token at one of these.

    ValueError if the prompts have different lengths.
    """
    if clean.shape != other.shape:
        raise ValueError(f"two prompts to swap must be of equal length, got {clean.shape[1]} and {other.shape[1]}")
    where = torch.diag((clean != other)[0])
    rows = where[where.any(1)]
    return rows.int().argmax(1).tolist(), torch.where(rows, other, clean)
