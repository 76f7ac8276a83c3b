"""Why a trained model says what it says.  python -m scripts.explain checkpoint=runs/NAME -- To be, or not"""

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from conf.entry import check_output, entry_point
from conf.schema import Explain
from data.readers import unescape
from data.tokenizer import Tokenizer, load_tokenizer
from insight import attribution, maps
from insight.lens import logit_lens
from insight.page import write_page
from insight.patching import (
    Score,
    ablate,
    branches,
    everything,
    heads,
    last_logits,
    patch,
    patch_each_position,
    rank_correlation,
    record,
    recovered,
    score_of,
    swaps,
)
from model import GPT
from model.hooks import Site
from training import auto, checkpoint, estimate

LOOK = 0.3  # a weight from here on is a look, if it is twice an even share; one below a tenth of it is none
LARGE, SMALL = 0.25, 0.05  # shares of the largest effect: from here on there is one, below there is none
ABLATED = {"zero": "zeros", "mean": "its mean over the text"}


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
            raise ValueError(f"{cfg.json} is not written: the explanation holds numbers that are not finite") from None
        Path(cfg.json).write_text(content, encoding="utf-8")
    for path in (cfg.plot, cfg.page, cfg.json):
        if path is not None:
            print(path)


def check_memory(cfg: Explain, model: GPT, s: int):
    """ValueError where a batch of texts of `s` tokens is more than this machine holds; of a GPU torch says it."""
    gradients = cfg.method == "integrated_gradients"
    texts = min(cfg.batch, max(s, cfg.max_steps) if gradients else s)
    n_bytes = 8 * texts * s * model.arguments["d_model"] * (model.arguments["n_layers"] if gradients else 1)
    if model.embedding.weight.device.type == "cpu":
        estimate.check_fits(f"batch: {texts:,} texts of {s:,} tokens at once", n_bytes)


def warn(text: str):
    print(text, file=sys.stderr)


# --- what is asked --------------------------------------------------------------------------------------------------


@dataclass
class Case:
    """A model, what it reads, and the answer whose cause is sought."""

    model: GPT
    tokenizer: Tokenizer
    tokens: Tensor  # (1 s)
    corrupted: Tensor | None  # (1 s)
    logits: Tensor  # (1 vocab), behind the text
    answer: int
    against: int | None
    baseline: Tensor  # (d_model,): what stands for a token that is taken away

    @property
    def score(self) -> Score:
        return score_of(self.answer, self.against)

    def judge(self, logits: Tensor) -> tuple[float, float]:
        """logits (1 vocab) -> the score and the answer's probability."""
        return self.score(logits).item(), logits.softmax(-1)[0, self.answer].item()

    def loss(self, logits: Tensor) -> float:
        """What the score loses if the logits (1 vocab) are the model's."""
        return (self.score(self.logits) - self.score(logits)).item()

    def label(self, token: int) -> str:
        text = maps.visible(self.tokenizer.token_bytes(token))
        return text or ("<end>" if token == self.tokenizer.end_of_text else f"<{token}>")

    def best(self, logits: Tensor) -> str:
        """The most likely token of logits (1 vocab), and its probability."""
        p, token = logits.softmax(-1)[0].max(0)
        return f"{self.label(token.item())} {p:.4f}"

    @property
    def labels(self) -> list[str]:
        return [self.label(token) for token in self.tokens[0].tolist()]

    @property
    def places(self) -> list[str]:
        """The tokens with their numbers."""
        return [f"{i} {label}" for i, label in enumerate(self.labels)]

    def described(self) -> list[str]:
        (score, p), answer = self.judge(self.logits), self.label(self.answer)
        meaning = f"log p({answer})"
        if self.against is not None:
            meaning += f" - log p({self.label(self.against)}), the difference of their logits"
        lines = [f"text        {len(self.labels)} tokens: {''.join(self.labels)}"]
        if self.corrupted is not None:
            where = (self.tokens != self.corrupted)[0].nonzero().flatten().tolist()
            changes = [f"{self.places[i]} > {self.label(self.corrupted[0, i].item())}" for i in where]
            lines.append(f"corrupted   {'; '.join(changes)}")
        rival = "" if self.logits.argmax() == self.answer else f"; the most likely is {self.best(self.logits)}"
        return [*lines, f"answer      {answer}, probability {p:.4f}{rival}", f"score       {score:.4f} nats: {meaning}"]

    @property
    def title(self) -> str:
        """The same, on a picture."""
        _, *lines, answer, score = (" ".join(line.split()) for line in self.described())
        lines = ["".join(self.labels), *lines]  # perhaps the corrupted text
        lines = [line if len(line) <= 90 else f"{line[:42]} ... {line[-42:]}" for line in lines]
        return "\n".join([*lines, f"{answer}, {score}"])

    def facts(self) -> dict:
        score, p = self.judge(self.logits)
        known = {"tokens": self.tokens[0].tolist(), "labels": self.labels, "answer": self.answer}
        known |= {"answer_label": self.label(self.answer), "probability": p, "score": score, "against": self.against}
        if self.corrupted is not None:
            known["corrupted"] = self.corrupted[0].tolist()
        return known


@torch.no_grad()
def read_case(cfg: Explain, model: GPT, tokenizer: Tokenizer) -> Case:
    prompt = cfg.prompt
    if prompt is None:
        try:
            prompt = "" if sys.stdin.isatty() else sys.stdin.read().removesuffix("\n")
        except UnicodeDecodeError as error:
            raise ValueError(f"the prompt, by standard input, is not UTF-8: {error}") from error
    if not prompt:
        raise ValueError("there is no text to explain: give one behind --, such as -- To be, or not")
    ids = encode(tokenizer, prompt)
    if len(ids) > model.max_seq_len:
        raise ValueError(f"the text has {len(ids)} tokens, the model reads max_seq_len {model.max_seq_len}: shorten it")
    if cfg.key is not None and cfg.key >= len(ids):
        raise ValueError(f"key must be the number of a token, at most {len(ids) - 1}, got {cfg.key}")
    device = model.embedding.weight.device
    tokens, corrupted = torch.tensor([ids], device=device), None
    logits = last_logits(model, tokens)
    if not logits.isfinite().all():
        raise ValueError("the model's logits are not numbers (NaN): did its training diverge?")
    answer = logits.argmax().item() if cfg.answer is None else one_token(tokenizer, "answer", cfg.answer)
    against = None if cfg.against is None else one_token(tokenizer, "against", cfg.against)
    if cfg.corrupted is not None:
        corrupted = torch.tensor([read_corrupted(tokenizer, unescape(cfg.corrupted), ids)], device=device)
        said = last_logits(model, corrupted).argmax().item()
        against = said if against is None and said != answer else against
    if against == answer:
        raise ValueError(f"answer and against must be two tokens, got {tokenizer.decode([answer])!r} for both")
    if cfg.replacement is None:
        baseline = attribution.mean_embedding(model)
    else:
        token = one_token(tokenizer, "replacement", cfg.replacement)
        baseline = attribution.embed(model, torch.tensor(token, device=device))
    return Case(model, tokenizer, tokens, corrupted, logits, answer, against, baseline)


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    try:
        return tokenizer.prompt(text)
    except UnicodeEncodeError as error:
        raise ValueError(f"the text is not UTF-8, got {text!r}") from error


def read_corrupted(tokenizer: Tokenizer, text: str, clean: list[int]) -> list[int]:
    ids = encode(tokenizer, text)
    if len(ids) != len(clean):
        raise ValueError(
            f"corrupted must have as many tokens as the text, got {len(ids)} and {len(clean)}: "
            f"{split(tokenizer, ids)} and {split(tokenizer, clean)}"
        )
    if ids == clean:
        raise ValueError(f"corrupted must differ from the text, got the same tokens: {split(tokenizer, ids)}")
    return ids


def one_token(tokenizer: Tokenizer, name: str, text: str) -> int:
    ids = tokenizer.encode(unescape(text)).tolist()
    if len(ids) != 1:
        raise ValueError(f"{name} must be one token, got {len(ids)} in {text!r}: {split(tokenizer, ids) or 'none'}")
    return ids[0]


def split(tokenizer: Tokenizer, ids: list[int]) -> str:
    return " | ".join(maps.visible(tokenizer.token_bytes(token)) for token in ids)


# --- attention ------------------------------------------------------------------------------------------------------


def explain_attention(cfg: Explain, case: Case) -> dict:
    """All maps, and a table that puts where the last token's heads look beside what they cause."""
    weights = maps.attention_maps(case.model, case.tokens).cpu()  # (n_layers, h, q, k)
    key = find_key(cfg, case)
    rows = [head_row(cfg, case, weights, site, key) for site in heads(case.model)]
    if case.corrupted is not None:
        for row, share in zip(rows, patch_heads(case), strict=True):
            row["recovered"] = share
    largest = max(1e-9, *(abs(row["effect"]) for row in rows))
    for row in rows:
        row["remark"] = remark(row, largest, len(case.labels))
    correlation = rank_correlation([row["weight"] for row in rows], [abs(row["effect"]) for row in rows])

    last = len(case.labels) - 1
    print(f"where the heads look from the last token, {last} ({case.labels[-1]})")
    print(f"weight: on token {key} ({case.labels[key]}), {because(cfg)}\n")
    show(
        ["head", "weight", "looks most at", "with", "effect", "p(answer)", *rows[0].keys() & {"recovered"}, ""],
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
        left={"looks most at", ""},
    )
    print(
        f"\neffect: what the score loses, in nats, when the head says {ABLATED[cfg.ablation]}; p(answer) is that then"
    )
    if case.corrupted is not None:
        print(
            "recovered: how far the score comes back when this head, reading the corrupted text, says what it says here"
        )
    if correlation is not None:
        print(f"rank correlation, over the heads, of weight and size of effect: {correlation:+.2f}")
    print("A weight is not a cause: it says where a head looks, not whether what it reads there changes the answer.")
    if cfg.plot is not None:
        effects = torch.tensor([row["effect"] for row in rows]).view(weights.shape[:2])
        maps.draw_attention(cfg.plot, weights, case.labels, effects, case.title)
    if cfg.page is not None:
        lines = [f"checkpoint  {cfg.checkpoint}", *case.described()[1:]]  # the text is there anyhow
        about = {"lines": lines, "key": key, "because": because(cfg), "ablated": ABLATED[cfg.ablation]}
        write_page(cfg.page, weights, case.labels, rows, about)
    return {"key": key, "heads": rows, "rank_correlation": correlation, "weights": weights.tolist()}


def find_key(cfg: Explain, case: Case) -> int:
    """The number of the token that matters: of those before the last, the one whose occlusion moves the score most."""
    if cfg.key is not None:
        return cfg.key
    try:
        effects = attribution.occlusion(case.model, case.tokens, case.score, case.baseline, cfg.batch)
    except attribution.CaptumMissingError as error:
        raise ValueError(f"{error}; or say which token matters, key=0 for the first") from error
    return effects.abs()[:-1].argmax().item() if len(effects) > 1 else 0


def because(cfg: Explain) -> str:
    return "as key says" if cfg.key is not None else "whose occlusion moves the score most, of those before the last"


def head_row(cfg: Explain, case: Case, weights: Tensor, site: Site, key: int) -> dict:
    last = weights[site.layer, site.head, -1]
    logits = ablate(case.model, case.tokens, [site], cfg.ablation)
    row = {"layer": site.layer, "head": site.head, "weight": last[key].item(), "looks_at": last.argmax().item()}
    return row | {"most": last.max().item(), "effect": case.loss(logits), "probability": case.judge(logits)[1]}


def remark(row: dict, largest: float, n: int) -> str:
    """Where weight and effect part, in a text of n tokens."""
    if row["most"] >= max(LOOK, 2 / n) and abs(row["effect"]) < SMALL * largest:
        return "looks, no effect"
    if row["weight"] < LOOK / 10 and abs(row["effect"]) >= LARGE * largest:
        return "effect, without looking there"
    return ""


# --- tokens ---------------------------------------------------------------------------------------------------------


def explain_occlusion(cfg: Explain, case: Case) -> dict:
    effects = attribution.occlusion(case.model, case.tokens, case.score, case.baseline, cfg.batch)
    what = "the average embedding" if cfg.replacement is None else f"{cfg.replacement!r}"
    return show_tokens(cfg, case, effects, f"effect: what the score loses, in nats, when {what} stands for the token")


def explain_gradient(cfg: Explain, case: Case) -> dict:
    effects = attribution.gradient_x_input(case.model, case.tokens, case.score)
    return show_tokens(
        cfg,
        case,
        effects,
        "effect: gradient of the score by the embedding, times the embedding; true for small changes",
    )


def explain_integrated_gradients(cfg: Explain, case: Case) -> dict:
    baseline, start = case.baseline, "the average embedding in all places"
    if case.corrupted is not None:
        baseline, start = attribution.embed(case.model, case.corrupted), "the corrupted text"
    elif cfg.replacement is not None:
        start = f"{cfg.replacement!r} in all places"
    found = attribution.integrated_gradients(
        case.model, case.tokens, case.score, baseline, max_steps=cfg.max_steps, batch=cfg.batch
    )
    figures = show_tokens(
        cfg, case, found.attributions, f"effect: the token's share of what the score gains on the way from {start}"
    )
    share = abs(found.error) / max(abs(found.difference), 1e-12)
    total = found.difference + found.error
    print(
        f"{'complete' if found.complete else 'NOT COMPLETE'}: the shares add up to {total:.4f}, the score gains "
        f"{found.difference:.4f}; an error of {share:.2%} with {found.steps} steps"
    )
    known = {"difference": found.difference, "error": found.error, "steps": found.steps, "complete": found.complete}
    return figures | known


def show_tokens(cfg: Explain, case: Case, effects: Tensor, meaning: str) -> dict:
    """A bar a token, in the terminal and as a picture."""
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
    """Each token that the corrupted text changes, changed alone, and then all."""
    where, prompts = swaps(case.tokens, case.corrupted)
    with torch.no_grad():
        logits = torch.cat([last_logits(case.model, some) for some in prompts.split(cfg.batch)])
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
    print("\neffect: what the score loses, in nats, when this token alone is swapped, and when all are")
    if cfg.plot is not None:
        names = [f"{case.places[row['place']]} > {row['token']}" for row in rows[:-1]]
        maps.draw_bars(
            cfg.plot, [row["effect"] for row in rows], [*names, "all"], case.title, "what the score loses, nats"
        )
    return {"swaps": rows}


# --- parts ----------------------------------------------------------------------------------------------------------


def explain_ablation(cfg: Explain, case: Case) -> dict:
    """What each head, each branch and each whole block is worth to the answer."""
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
    print(f"\neffect: what the score loses, in nats, when the part says {ABLATED[cfg.ablation]}")
    if cfg.plot is not None:
        draw_parts(cfg, case, {row["part"]: row["effect"] for row in rows}, [], "what the score loses, nats")
    return {"parts": rows}


def explain_patching(cfg: Explain, case: Case) -> dict:
    """The corrupted text is read, with parts of the model saying what they said of the clean one."""
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
        f"\nrecovered: of the way from the corrupted text's score, {corrupted_score:.4f}, back to the clean one's; "
        "* marks what is corrupted"
    )
    if cfg.plot is not None:
        grid = ("the stream, at one token", torch.tensor(stream).T, case.places, names)
        draw_parts(cfg, case, parts, [grid], "recovered, 1 = all")
    return {"parts": parts, "stream": stream}


def stream_names(n_layers: int) -> list[str]:
    return ["embedding", *(f"block {i}" for i in range(n_layers))]


@torch.no_grad()
def both_scores(case: Case) -> tuple[float, float]:
    """The clean text's and the corrupted one's; ValueError if there is nothing to recover."""
    clean, corrupted = case.score(case.logits).item(), case.score(last_logits(case.model, case.corrupted)).item()
    if abs(clean - corrupted) < 1e-4:
        raise ValueError(
            f"corrupted must change the score of the answer, got {clean:.4f} and {corrupted:.4f}: change what matters, "
            "method=occlusion says what does"
        )
    return clean, corrupted


def patch_heads(case: Case) -> list[float]:
    """What each head recovers, alone."""
    ends, source = both_scores(case), record(case.model, case.tokens, heads(case.model))
    logits = [patch(case.model, case.corrupted, {site: x}) for site, x in source.items()]
    return recovered(case.score(torch.cat(logits)), *ends).tolist()


def draw_parts(cfg: Explain, case: Case, parts: dict[str, float], grids: list, unit: str):
    """Heads and branches as cells, a row a layer."""
    layers = range(len(case.model.blocks))
    n_heads = case.model.blocks[0].attention.n_heads
    columns = [*(f"head {h}" for h in range(n_heads)), "attention", "feed-forward"]
    cells = [
        [*(parts[f"head {i}.{h}"] for h in range(n_heads)), parts[f"attention {i}"], parts[f"feed-forward {i}"]]
        for i in layers
    ]
    grid = ("heads, all of a layer's heads, feed-forward", torch.tensor(cells), [f"block {i}" for i in layers], columns)
    maps.draw_cells(cfg.plot, [grid, *grids], case.title, unit)


# --- lens -----------------------------------------------------------------------------------------------------------


def explain_lens(cfg: Explain, case: Case) -> dict:
    """What the model would say if it ended after each block."""
    chances = logit_lens(case.model, case.tokens).softmax(-1)  # (n_layers + 1, s, vocab)
    p, best = chances.max(-1)  # (n_layers + 1, s)
    answer = chances[:, -1, case.answer]
    ranks = (chances[:, -1] > answer.unsqueeze(1)).sum(-1) + 1
    names, best_labels = stream_names(len(case.model.blocks)), [[case.label(t) for t in row] for row in best.tolist()]
    show(
        ["behind", "most likely", "p", "p(answer)", "rank of the answer"],
        [
            [name, best_labels[i][-1], f"{p[i, -1]:.4f}", f"{answer[i]:.4f}", str(ranks[i].item())]
            for i, name in enumerate(names)
        ],
        left={"behind", "most likely"},
    )
    print("\nwhat the head reads in the stream of the last token; that an early layer is unreadable says nothing of it")
    if cfg.plot is not None:
        maps.draw_lens(cfg.plot, best_labels, p.cpu(), case.places, case.title)
    figures = {"best": best.tolist(), "best_labels": best_labels, "best_probability": p.tolist()}
    return figures | {"answer_probability": answer.tolist(), "answer_rank": ranks.tolist()}


METHODS = {
    "attention": explain_attention,
    "occlusion": explain_occlusion,
    "swap": explain_swap,
    "gradient": explain_gradient,
    "integrated_gradients": explain_integrated_gradients,
    "ablation": explain_ablation,
    "patching": explain_patching,
    "lens": explain_lens,
}


def percent(share: float) -> str:
    return f"{round(100 * share, 1) + 0.0:.1f} %"  # no -0.0


def show(columns: Sequence[str], rows: Iterable[Sequence[str]], left: set[str]):
    """A table; the columns in `left` are aligned there, the others at the right."""
    width = None if sys.stdout.isatty() else 1000  # in a file or a pipe nothing is folded
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console(width=width, highlight=False, markup=False, emoji=False).print(table)


if __name__ == "__main__":
    main()
