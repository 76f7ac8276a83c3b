"""What is explained: a model, its text, and an answer."""

import sys
from dataclasses import dataclass

import torch
from torch import Tensor

from conf.scripts import Explain
from data.readers import unescape
from data.tokenizer import Tokenizer
from insight import attribution, maps
from insight.patching import Score, last_logits, score_of
from model import GPT

LARGE, SMALL = 0.25, 0.05  # shares of the largest effect: at least LARGE is an effect, less than SMALL is none
ABLATED = {"zero": "zeros", "mean": "its mean over the text"}


@dataclass
class Case:
    """A model, its text, and the answer to explain."""

    model: GPT
    tokenizer: Tokenizer
    tokens: Tensor  # (1 s)
    corrupted: Tensor | None  # (1 s)
    logits: Tensor  # (1 vocab), after the text
    answer: int
    against: int | None
    baseline: Tensor  # (d_model,): the embedding that replaces a removed token

    @property
    def score(self) -> Score:
        return score_of(self.answer, self.against)

    def judge(self, logits: Tensor) -> tuple[float, float]:
        """logits (1 vocab) -> the score and the answer's probability."""
        return self.score(logits).item(), logits.softmax(-1)[0, self.answer].item()

    def loss(self, logits: Tensor) -> float:
        """Loss of score with these logits (1 vocab)."""
        return (self.score(self.logits) - self.score(logits)).item()

    def label(self, token: int) -> str:
        text = maps.visible(self.tokenizer.token_bytes(token))
        return text or ("<end>" if token == self.tokenizer.eos_id else f"<{token}>")

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
        """The same, for a picture."""
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
        raise ValueError("there is no text to explain: give one after --, such as -- To be, or not")
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


@torch.no_grad()
def both_scores(case: Case) -> tuple[float, float]:
    """Scores of the clean and the corrupted text; ValueError if they are equal, with nothing to recover."""
    clean, corrupted = case.score(case.logits).item(), case.score(last_logits(case.model, case.corrupted)).item()
    if abs(clean - corrupted) < 1e-4:
        raise ValueError(
            f"corrupted must change the score of the answer, got {clean:.4f} and {corrupted:.4f}: change a token "
            "that matters "
            "(method=occlusion lists them)"
        )
    return clean, corrupted
