"""Writing: one column of tokens after the other, each from the logits of the last."""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from model.cache import KVCache
from model.functional import softmax
from model.gpt import GPT

PROMPT_CHUNK = 2048  # tokens of a prompt that one forward reads
READ_EVERY = 16  # columns between two looks at whether every row has ended
RANDOM_BLOCK = 256  # random numbers drawn at once for a row
OVERFLOWS = ("error", "slide", "extend")

# --- from logits to tokens: pure functions of a row's own logits (b vocab); none waits for the device --------------


def penalise_repetition(logits: Tensor, counts: Tensor, penalty: float) -> Tensor:
    """Logits of tokens that were there (counts (b vocab) > 0) divided by the penalty, or multiplied where negative.

    "CTRL: A Conditional Transformer Language Model for Controllable Generation" (2019), section 4.1.
    """
    return torch.where(counts > 0, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def penalise_frequency(logits: Tensor, counts: Tensor, penalty: float) -> Tensor:
    """Logits lowered by the penalty for each time that the token was there already (counts (b vocab))."""
    return logits - penalty * counts


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """All but the k largest of each row at -inf; ties with the k-th stay, and a k beyond the vocabulary keeps all."""
    kth = logits.topk(min(k, logits.shape[-1])).values[:, -1:]
    return logits.masked_fill(logits < kth, -math.inf)


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    """Only the smallest set of most likely tokens whose probabilities reach p; never empty; of ties, the first ids.

    Nucleus sampling, "The Curious Case of Neural Text Degeneration" (2019).
    """
    ordered, order = logits.sort(descending=True, stable=True)
    probabilities = softmax(ordered)
    before = probabilities.cumsum(-1) - probabilities  # what stands ahead of each token
    drop = (before >= p).scatter(-1, order, before >= p)
    drop.scatter_(-1, order[:, :1], False)
    return logits.masked_fill(drop, -math.inf)


def keep_min_p(logits: Tensor, p: float) -> Tensor:
    """Only tokens at least p times as likely as the most likely one ("Turning Up the Heat: Min-p Sampling", 2024)."""
    return logits.masked_fill(logits < logits.amax(-1, keepdim=True) + math.log(p), -math.inf)


def check_temperature(temperature: float):
    """ValueError for one that is neither 0 nor large enough to divide by."""
    if temperature == math.inf:
        raise ValueError("temperature must be finite, got inf")
    if temperature != 0 and not temperature >= 1e-5:
        raise ValueError(f"temperature must be 0, or at least 1e-5, got {temperature}")


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn, in this order; ValueError for what makes no sense.

    1. repetition_penalty, then frequency_penalty: against what stands in the text already, the prompt included.
    2. temperature: logits divided by it; 0 takes the most likely token (of ties the first), and ends here.
    3. top_k, top_p, min_p: filters, each on what the one before has left.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0

    def __post_init__(self):
        check_temperature(self.temperature)
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be 1 or more, got {self.top_k}")
        for name in ("top_p", "min_p"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= 1:
                raise ValueError(f"{name} must be above 0 and at most 1, got {value}")
        if not 1e-6 <= self.repetition_penalty <= 1e6:
            raise ValueError(f"repetition_penalty must lie in 1e-6 .. 1e6, got {self.repetition_penalty}")
        if not -1e6 <= self.frequency_penalty <= 1e6:
            raise ValueError(f"frequency_penalty must lie in -1e6 .. 1e6, got {self.frequency_penalty}")

    @property
    def counts(self) -> bool:
        """Whether it needs to know how often each token was there."""
        return self.repetition_penalty != 1 or self.frequency_penalty != 0

    def logits(self, logits: Tensor, counts: Tensor | None = None) -> Tensor:
        """The model's logits (b vocab) -> those to draw from; counts (b vocab) are needed for penalties."""
        logits = logits.float()
        if self.repetition_penalty != 1:
            logits = penalise_repetition(logits, counts, self.repetition_penalty)
        if self.frequency_penalty != 0:
            logits = penalise_frequency(logits, counts, self.frequency_penalty)
        if self.temperature == 0:
            return logits
        logits = logits / self.temperature
        if self.top_k is not None:
            logits = keep_top_k(logits, self.top_k)
        if self.top_p is not None:
            logits = keep_top_p(logits, self.top_p)
        if self.min_p is not None:
            logits = keep_min_p(logits, self.min_p)
        return logits

    def draw(self, logits: Tensor, uniform: Tensor, counts: Tensor | None = None) -> Tensor:
        """logits (b vocab) and one uniform number in [0, 1) a row -> tokens (b,)."""
        logits = self.logits(logits, counts)
        return logits.argmax(-1) if self.temperature == 0 else invert(logits, uniform)


def invert(logits: Tensor, uniform: Tensor) -> Tensor:
    """The token (b,) at which the cumulative distribution of each row of logits (b vocab) passes its number (b,)."""
    cumulative = softmax(logits).double().cumsum(-1)
    # the first token whose cumulative probability exceeds the number; one of probability 0 never is the first
    tokens = torch.searchsorted(cumulative, uniform.double()[:, None] * cumulative[:, -1:], right=True)[:, 0]
    return tokens.clamp(max=logits.shape[-1] - 1)  # where the logits are NaN; what comes then has a NaN probability


def uniform_numbers(seeds: Sequence[int], device: torch.device | None = None) -> Iterator[Tensor]:
    """Columns (b,) of numbers in [0, 1); row i depends on seeds[i] alone. Drawn in blocks, on the CPU."""
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    while True:
        block = torch.stack([torch.rand(RANDOM_BLOCK, generator=generator) for generator in generators], dim=1)
        yield from block.to(device)


# --- the loop -------------------------------------------------------------------------------------------------------

Step = Callable[[GPT, Tensor, KVCache], Tensor]


def generate(
    model: GPT,
    prompts: Tensor | Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    seeds: Sequence[int] | None = None,
    stops: Collection[int] = (),
    overflow: str = "error",
    log_probabilities: bool = False,
    step: Step | None = None,
    **sampling,
) -> Iterator[Tensor] | Iterator[tuple[Tensor, Tensor]]:
    """Continues prompts: yields columns (b,) of tokens, each as soon as it is drawn, at most max_new_tokens.

    Each row gets the tokens that it gets alone, whatever its neighbours (in float32; bfloat16 rounds otherwise in
    batches of another size). Filters and drawing never wait for the device; what does, where there are `stops`, is
    one look every 16 columns at whether all rows have ended.

    Args:
        prompts: (b s), or a list of rows of different lengths; at least one token each.
        seeds: one a row; None: 0, 1, 2, ... The same seed and prompt give the same row.
        stops: a row that has drawn one of these tokens has ended, and repeats it until all have.
        overflow: when the text outgrows max_seq_len, "error" refuses before any work. "slide" encodes the last
            max_seq_len // 2 tokens of the row again from position 0 and goes on. (Cached keys cannot slide themselves:
            from the second layer on they know of the tokens that were dropped.) "extend" stretches RoPE as far
            as the longest row needs, for all rows alike, see GPT.extended.
        log_probabilities: yields pairs of tokens (b,) and their log-probabilities (b,) under the model itself, before
            penalties, temperature and filters, in nats; 0 behind a stop.
        step: takes the place of next_logits, which it computes faster.
        sampling: see Sampling.
    """
    how = Sampling(**sampling)
    rows = [torch.as_tensor(row, dtype=torch.long) for row in prompts]
    seeds = list(range(len(rows))) if seeds is None else seeds
    if not rows or min(len(row) for row in rows) == 0:
        raise ValueError("the prompt must hold at least one token, got 0: start from a beginning or end-of-text token")
    low, high = min(int(row.min()) for row in rows), max(int(row.max()) for row in rows)
    if low < 0 or high >= model.vocab_size:
        raise ValueError(f"the prompt's tokens must lie in 0 .. {model.vocab_size - 1}, got {low} .. {high}")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be 1 or more, got {max_new_tokens}")
    if len(seeds) != len(rows):
        raise ValueError(f"there must be one seed a row, got {len(seeds)} seeds and {len(rows)} rows")
    if overflow not in OVERFLOWS:
        raise ValueError(f"overflow must be one of {', '.join(OVERFLOWS)}, got {overflow}")
    longest = max(len(row) for row in rows)
    needed = longest + max_new_tokens - 1  # the last token drawn is never read again, hence the -1
    if overflow == "error" and needed > model.max_seq_len:
        raise ValueError(
            f"{longest} prompt tokens and {max_new_tokens} new ones are more than max_seq_len {model.max_seq_len} "
            "reads: take fewer, or overflow=slide"
        )
    if overflow == "extend":
        model = model.extended(needed)
    columns = _generate(model, rows, max_new_tokens, how, seeds, stops, log_probabilities, step or next_logits)
    return columns if log_probabilities else (tokens for tokens, _ in columns)


def next_logits(model: GPT, tokens: Tensor, cache: KVCache) -> Tensor:
    """tokens (b, 1), one more in each row -> the logits (b vocab) of what follows. The cache is not advanced."""
    return model.read(tokens, cache=cache)[:, -1]


def encode(model: GPT, rows: list[Tensor], capacity: int) -> tuple[Tensor, KVCache]:
    """Reads rows (s,) of different lengths, in one forward or in chunks -> the logits (b vocab) of what follows each.

    Rows are filled up on the right, where causality hides it; what is drawn next is written over the filling.
    """
    lengths = [len(row) for row in rows]
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    last = torch.tensor(lengths, device=tokens.device) - 1
    cache, logits = model.new_cache(capacity), None
    for start in range(0, max(lengths), PROMPT_CHUNK):
        chunk = tokens[:, start : start + PROMPT_CHUNK]
        of_chunk = model(chunk, cache=cache, at=(last - start).clamp(0, chunk.shape[1] - 1))
        ends_here = (last >= start).unsqueeze(1)
        logits = of_chunk if logits is None else torch.where(ends_here, of_chunk, logits)
    cache.set_lengths(lengths)
    return logits, cache


def _generate(model, rows, max_new_tokens, how, seeds, stops, log_probabilities, step) -> Iterator[tuple]:
    device, window = model.embedding.weight.device, model.max_seq_len
    half = max(1, window // 2)
    rows = [row.to(device) for row in rows]
    numbers, stops = uniform_numbers(seeds, device), torch.tensor(sorted(stops), dtype=torch.long, device=device)
    ended = torch.zeros(len(rows), dtype=torch.bool, device=device)
    counts = torch.stack([row.bincount(minlength=model.vocab_size) for row in rows]) if how.counts else None
    written: list[Tensor] = []  # the columns so far

    def end_of(i: int) -> Tensor:
        """The last half window of row i, which is read again when it has outgrown the window."""
        return torch.cat([rows[i], *(column[i : i + 1] for column in written[-half:])])[-half:]

    # how much of each row the cache holds: known here without asking the device
    lengths = [len(row) if len(row) <= window else half for row in rows]
    capacity = min(window, max(map(len, rows)) + max_new_tokens - 1)
    with torch.inference_mode():
        logits, cache = encode(model, [row if len(row) <= window else row[-half:] for row in rows], capacity)
    while True:
        with torch.inference_mode():
            tokens = how.draw(logits, next(numbers), counts)
            if written and len(stops):
                tokens = torch.where(ended, written[-1], tokens)
            of_tokens = None
            if log_probabilities:
                of_tokens = logits.float().log_softmax(-1).gather(1, tokens.unsqueeze(1))[:, 0].masked_fill(ended, 0.0)
            if counts is not None:
                counts.scatter_add_(1, tokens.unsqueeze(1), torch.ones_like(tokens).unsqueeze(1))
            if len(stops):
                ended = ended | torch.isin(tokens, stops)
            written.append(tokens)
        yield tokens, of_tokens
        if len(written) == max_new_tokens or (len(stops) and len(written) % READ_EVERY == 0 and ended.all()):
            return
        full = [i for i, length in enumerate(lengths) if length == window]
        lengths = [half if length == window else length + 1 for length in lengths]
        with torch.inference_mode():
            if full:
                logits_of_full, cache_of_full = encode(model, [end_of(i) for i in full], window)
                if len(full) == len(rows):
                    logits, cache = logits_of_full, cache_of_full
                    continue
                cache.set_lengths([0 if i in full else length - 1 for i, length in enumerate(lengths)])
            cache.reserve(len(rows), 1, device)
            logits = step(model, tokens.unsqueeze(1), cache)
            cache.advance(1)
            if full:  # what they have read with the others does not count
                cache.replace(full, cache_of_full)
                cache.set_lengths(lengths)
                logits = logits.index_copy(0, torch.tensor(full, device=device), logits_of_full)
