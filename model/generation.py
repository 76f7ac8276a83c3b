"""Generation: one column of tokens after the other, each drawn from the logits of the one before."""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from model.cache import KVCache
from model.functional import softmax
from model.gpt import GPT

PROMPT_CHUNK = 2048  # tokens of a prompt that one forward reads
READ_EVERY = 16  # columns between two checks whether all rows have ended
RANDOM_BLOCK = 256  # random numbers drawn at once for a row
OVERFLOWS = ("error", "slide", "extend")

# --- from logits (b vocab) to tokens: pure functions, row by row, that never wait for the device --------------------


def penalise_repetition(logits: Tensor, counts: Tensor, penalty: float) -> Tensor:
    """Divides the logits of tokens that occurred (counts (b vocab) > 0) by the penalty; multiplies negative ones.

    "CTRL: A Conditional Transformer Language Model for Controllable Generation" (2019), section 4.1.
    """
    return torch.where(counts > 0, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def penalise_frequency(logits: Tensor, counts: Tensor, penalty: float) -> Tensor:
    """Lowers each logit by the penalty for each occurrence of its token so far (counts (b vocab))."""
    return logits - penalty * counts


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """Sets all but the k largest logits of each row to -inf; keeps ties with the k-th, and all if k > vocab."""
    kth = logits.topk(min(k, logits.shape[-1])).values[:, -1:]
    return logits.masked_fill(logits < kth, -math.inf)


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    """Keeps the smallest set of most likely tokens whose probabilities reach p; never empty; of ties, the lowest ids.

    Nucleus sampling, "The Curious Case of Neural Text Degeneration" (2019).
    """
    ordered, order = logits.sort(descending=True, stable=True)
    probabilities = softmax(ordered)
    before = probabilities.cumsum(-1) - probabilities  # the probability of all more likely tokens
    drop = (before >= p).scatter(-1, order, before >= p)
    drop.scatter_(-1, order[:, :1], False)
    return logits.masked_fill(drop, -math.inf)


def keep_min_p(logits: Tensor, p: float) -> Tensor:
    """Keeps tokens at least p times as likely as the most likely one ("Turning Up the Heat: Min-p Sampling", 2024)."""
    return logits.masked_fill(logits < logits.amax(-1, keepdim=True) + math.log(p), -math.inf)


def check_temperature(temperature: float):
    """ValueError unless it is 0, or large enough to divide by."""
    if temperature == math.inf:
        raise ValueError("temperature must be finite, got inf")
    if temperature != 0 and not temperature >= 1e-5:
        raise ValueError(f"temperature must be 0, or at least 1e-5, got {temperature}")


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn, in this order; ValueError for invalid settings.

    1. repetition_penalty, then frequency_penalty: against tokens that occurred, the prompt included.
    2. temperature: logits are divided by it; 0 takes the most likely token (of ties the first) and skips the rest.
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
        """Whether sampling needs the number of occurrences of each token."""
        return self.repetition_penalty != 1 or self.frequency_penalty != 0

    def logits(self, logits: Tensor, counts: Tensor | None = None) -> Tensor:
        """The model's logits (b vocab) -> the logits to draw from; penalties need the counts (b vocab)."""
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
        """logits (b vocab) and a uniform number in [0, 1) per row (b,) -> tokens (b,)."""
        logits = self.logits(logits, counts)
        return logits.argmax(-1) if self.temperature == 0 else invert(logits, uniform)


def invert(logits: Tensor, uniform: Tensor) -> Tensor:
    """The tokens (b,) at which the cumulative distribution of logits (b vocab) exceeds each row's number (b,)."""
    cumulative = softmax(logits).double().cumsum(-1)
    # the first token whose cumulative probability exceeds the number; a token of probability 0 never is
    tokens = torch.searchsorted(cumulative, uniform.double()[:, None] * cumulative[:, -1:], right=True)[:, 0]
    return tokens.clamp(max=logits.shape[-1] - 1)  # for logits that are NaN


def uniform_numbers(seeds: Sequence[int], device: torch.device | None = None) -> Iterator[Tensor]:
    """Yields columns (b,) of numbers in [0, 1); row i depends on seeds[i] only. Drawn in blocks, on the CPU."""
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

    Each row gets the tokens that it would get alone, whatever the other rows are (in float32; bfloat16 rounds
    differently in batches of different size). Filters and drawing never wait for the device; with `stops`, every 16th
    column waits once, to check whether all rows have ended.

    Args:
        prompts: (b s), or a list of rows of different lengths; at least one token each.
        seeds: one per row; None: 0, 1, 2, ... The same seed and prompt give the same row.
        stops: a row that has drawn one of these tokens has ended, and repeats it until all rows have ended.
        overflow: what to do when the text outgrows max_seq_len. "error" refuses before any work. "slide" encodes the
            last max_seq_len // 2 tokens of the row again, from position 0, and continues. (Cached keys cannot slide:
            from the second layer on they depend on the dropped tokens.) "extend" extends the context as far as the
            longest row needs, for all rows, see GPT.extended.
        log_probabilities: yield pairs of tokens (b,) and their log-probabilities (b,) under the model itself, in nats,
            before penalties, temperature and filters; 0 after a stop.
        step: a faster replacement of next_logits.
        sampling: see Sampling.
    """
    how = Sampling(**sampling)
    rows = [torch.as_tensor(row, dtype=torch.long) for row in prompts]
    seeds = list(range(len(rows))) if seeds is None else seeds
    if not rows or min(len(row) for row in rows) == 0:
        raise ValueError("the prompt must have at least one token, got 0: start with a BOS or end-of-text token")
    low, high = min(int(row.min()) for row in rows), max(int(row.max()) for row in rows)
    if low < 0 or high >= model.vocab_size:
        raise ValueError(f"the prompt's tokens must be in 0 .. {model.vocab_size - 1}, got {low} .. {high}")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be 1 or more, got {max_new_tokens}")
    if len(seeds) != len(rows):
        raise ValueError(f"there must be one seed per row, got {len(seeds)} seeds and {len(rows)} rows")
    if overflow not in OVERFLOWS:
        raise ValueError(f"overflow must be one of {', '.join(OVERFLOWS)}, got {overflow}")
    longest = max(len(row) for row in rows)
    needed = longest + max_new_tokens - 1  # the last token drawn is not read
    if overflow == "error" and needed > model.max_seq_len:
        raise ValueError(
            f"{longest} prompt tokens and {max_new_tokens} new ones exceed max_seq_len {model.max_seq_len}: "
            "give fewer, or overflow=slide"
        )
    if overflow == "extend":
        model = model.extended(needed)
    columns = _generate(model, rows, max_new_tokens, how, seeds, stops, log_probabilities, step or next_logits)
    return columns if log_probabilities else (tokens for tokens, _ in columns)


def next_logits(model: GPT, tokens: Tensor, cache: KVCache) -> Tensor:
    """The next token of each row (b, 1) -> the logits (b vocab) of what follows it. The cache is not advanced."""
    return model.read(tokens, cache=cache)[:, -1]


def encode(model: GPT, rows: list[Tensor], capacity: int) -> tuple[Tensor, KVCache]:
    """Reads rows (s,) of different lengths, in one forward or in chunks -> the logits (b vocab) of what follows each.

    Rows are padded on the right, where causality hides the padding; the tokens drawn next overwrite it.
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
    generated: list[Tensor] = []  # the columns so far

    def end_of(i: int) -> Tensor:
        """The last half window of row i, which is encoded again when the row has filled the window."""
        return torch.cat([rows[i], *(column[i : i + 1] for column in generated[-half:])])[-half:]

    # the length of each row in the cache, known without a wait for the device
    lengths = [len(row) if len(row) <= window else half for row in rows]
    capacity = min(window, max(map(len, rows)) + max_new_tokens - 1)
    with torch.inference_mode():
        logits, cache = encode(model, [row if len(row) <= window else row[-half:] for row in rows], capacity)
    while True:
        with torch.inference_mode():
            tokens = how.draw(logits, next(numbers), counts)
            if generated and len(stops):
                tokens = torch.where(ended, generated[-1], tokens)
            of_tokens = None
            if log_probabilities:
                of_tokens = logits.float().log_softmax(-1).gather(1, tokens.unsqueeze(1))[:, 0].masked_fill(ended, 0.0)
            if counts is not None:
                counts.scatter_add_(1, tokens.unsqueeze(1), torch.ones_like(tokens).unsqueeze(1))
            if len(stops):
                ended = ended | torch.isin(tokens, stops)
            generated.append(tokens)
        yield tokens, of_tokens
        if len(generated) == max_new_tokens or (len(stops) and len(generated) % READ_EVERY == 0 and ended.all()):
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
            if full:  # their part of the step does not count
                cache.replace(full, cache_of_full)
                cache.set_lengths(lengths)
                logits = logits.index_copy(0, torch.tensor(full, device=device), logits_of_full)
