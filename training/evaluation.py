"""The loss of a model on a text."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from data.corpus import Corpus
from model.functional import IGNORE
from model.gpt import GPT
from training import distributed
from training.engine import Engine


@dataclass
class Evaluation:
    nats: float  # summed negative log-likelihood
    tokens: int  # predicted
    bytes: int  # of text in the predicted tokens

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700))

    @property
    def bits_per_byte(self) -> float:
        """Comparable across tokenizers. End-of-text tokens cost bits and have no bytes."""
        return self.nats / math.log(2) / self.bytes if self.bytes else math.inf


def windows(n_tokens: int, seq_len: int, stride: int) -> list[tuple[int, int, int]]:
    """(start, length, scored) of each window: it reads `length` tokens from `start` and scores the last `scored` ones.

    Together they score every token of a text but the first, once. From the second window on, each scored token has at
    least seq_len - stride tokens of context. stride = seq_len: no overlap.
    """
    plan, done = [], 0  # `done` targets are scored
    while done < n_tokens - 1:
        end = min(n_tokens - 1, done + (stride if done else seq_len))
        start = max(0, end - seq_len)
        plan.append((start, end - start, end - done))
        done = end
    return plan


@torch.inference_mode()
def evaluate(
    model: GPT,
    read: Callable[[int, int], np.ndarray],
    n_tokens: int,
    bytes_per_token: np.ndarray,
    *,
    loss_mask=None,
    seq_len: int,
    stride: int | None = None,
    batch: int = 32,
    limit: int | None = None,
    autocast: torch.autocast | None = None,
    progress: Callable = iter,
) -> Evaluation:
    """Scores a text of n_tokens tokens; read(start, length) returns a part of it. A collective: ranks share the work.

    bytes_per_token (vocab,): see Tokenizer. `limit`: about this many tokens, in evenly spaced windows; None: all.
    `loss_mask`: its read(start, length) is 0 for tokens that are not scored, see Tokens; windows without scored tokens
    are skipped. The model is in evaluation mode meanwhile; no random number is drawn.
    """
    device = next(model.parameters()).device
    if n_tokens < 2:
        raise ValueError(f"an evaluation needs at least 2 tokens, got {n_tokens}")
    plan = windows(n_tokens, seq_len, seq_len if stride is None else stride)
    if loss_mask is not None:
        plan = [one for one in plan if loss_mask.read(one[0] + one[1] - one[2] + 1, one[2]).any()]
        if not plan:
            raise ValueError("there is nothing to score: no answer is in the text")
    if limit is not None and limit < n_tokens:
        keep = max(1, limit // seq_len)
        plan = [plan[i * len(plan) // keep] for i in range(min(keep, len(plan)))]
    own = plan[distributed.rank() :: distributed.size()]
    start, length, _ = plan[-1]  # all ranks must call the model equally often: fill up with windows that score nothing
    own += [(start, length, 0)] * (-(-len(plan) // distributed.size()) - len(own))
    was_training = model.training
    model.eval()
    nats, tokens, size = torch.zeros((), dtype=torch.float64), 0, 0
    for part in progress([own[i : i + batch] for i in range(0, len(own), batch)]):
        inputs, targets = _rows(read, part, seq_len, loss_mask)
        size += int(bytes_per_token[targets[targets != IGNORE]].sum())
        with autocast or torch.autocast(device.type, enabled=False):
            loss, count = model(_to(inputs, device), targets=_to(targets, device))
        nats += loss.cpu().double()
        tokens += int(count)
    model.train(was_training)
    sums = map(sum, distributed.gather(nats.item(), tokens, size))
    return Evaluation(next(sums), int(next(sums)), int(next(sums)))


def validate(
    engine: Engine, corpus: Corpus, seq_len: int, tokens: int | None, last: bool
) -> tuple[dict[str, float], float]:
    """Evaluates a run's model on about `tokens` tokens of the validation text, or all of it after the last step.

    Returns the metrics for a row, and the loss on the part of the text that every evaluation of the run has scored: the
    one to compare steps by.
    """
    text = corpus.validation
    part = tokens if (tokens or 0) < len(text) else None

    def on(limit: int | None) -> Evaluation:
        return evaluate(
            engine.model,
            text.read,
            len(text),
            corpus.tokenizer.bytes_per_token(),
            loss_mask=text.loss_mask,
            seq_len=seq_len,
            batch=engine.choices.micro_batch,
            limit=limit,
            autocast=engine.autocast,
        )

    result = on(None if last else part)
    figures = {"val_loss": result.loss, "val_ppl": result.perplexity, "val_bpb": result.bits_per_byte}
    return figures, on(part).loss if last and part is not None else result.loss


def _rows(
    read: Callable, plan: list[tuple[int, int, int]], seq_len: int, loss_mask=None
) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets (rows, seq_len); a short window is padded at its end, where causality hides it."""
    inputs = np.zeros((len(plan), seq_len), np.int64)
    targets = np.full((len(plan), seq_len), IGNORE, np.int64)
    for row, (start, length, scored) in enumerate(plan):
        tokens = read(start, length + 1)
        inputs[row, :length] = tokens[:-1]
        targets[row, length - scored : length] = tokens[1:][length - scored :]
        if loss_mask is not None:
            targets[row, :length][loss_mask.read(start + 1, length) == 0] = IGNORE
    return inputs, targets


def _to(array: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device)
