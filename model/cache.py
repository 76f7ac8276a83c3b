"""The KV cache: keys and values of the tokens so far, so that a new token costs one column, not the full square."""

import torch
from einops import rearrange
from torch import Tensor
from torch.nn.functional import pad

BUCKET = 128  # the initial number of slots; it grows by doubling


class KVCache:
    """A pair of tensors (b h slots d) per layer, filled from the left: slot i of a row holds the row's i-th token.

    The slots of new tokens, their default positions and what they may attend to all follow from `lengths`: (b,), or
    (1,) while all rows have the same length. A forward advances it once, at its end. `length` is the longest row's.
    The cache belongs to the caller, not to the model: `model(tokens, cache=cache)` appends to it.

    Memory grows with use: 128 slots, then 256, 512, ..., up to `capacity`.
    """

    def __init__(self, n_layers: int, capacity: int):
        self.capacity = capacity
        self.rows = self.length = self.n_slots = 0
        self.lengths: Tensor | None = None
        self.k: list[Tensor | None] = [None] * n_layers
        self.v: list[Tensor | None] = [None] * n_layers
        self.token_positions: Tensor | None = None  # (b slots), for ALiBi, which compares them

    def reserve(self, rows: int, s: int, device: torch.device):
        """Makes room for s more tokens in each of `rows` rows; ValueError if that exceeds the capacity."""
        if self.rows not in (0, rows):
            raise ValueError(f"the cache was started with {self.rows} rows, got {rows}: make a new one")
        needed = self.length + s
        if needed > self.capacity:
            raise ValueError(f"{needed} tokens are more than the cache's capacity {self.capacity}: make a larger one")
        if self.lengths is None:
            self.rows, self.lengths = rows, torch.zeros(1, dtype=torch.long, device=device)
        if needed > self.n_slots:
            more = bucket(needed, self.capacity) - self.n_slots
            self.n_slots += more
            for tensors in (self.k, self.v):
                tensors[:] = [None if tensor is None else pad(tensor, (0, 0, 0, more)) for tensor in tensors]
            if self.token_positions is not None:
                self.token_positions = pad(self.token_positions, (0, more))

    def next_slots(self, s: int) -> Tensor:
        """(b s) or (1 s): the slots of the next s tokens, which are also their default positions."""
        return self.lengths.unsqueeze(1) + torch.arange(s, device=self.lengths.device)

    def seen(self, s: int) -> int:
        """The number of slots that a forward of s tokens reads: those in use; compiled, all, for constant shapes."""
        return self.k[0].shape[2] if torch.compiler.is_compiling() else self.length + s

    def layer(self, i: int, slots: Tensor) -> "LayerCache":
        return LayerCache(self, i, slots)

    def append_positions(self, token_positions: Tensor, slots: Tensor) -> Tensor:
        """Stores the positions of new tokens, (s,) or (b s), in `slots` -> the positions of all tokens so far (b k)."""
        s = slots.shape[1]
        if self.token_positions is None:
            self.token_positions = torch.zeros(self.rows, self.n_slots, dtype=torch.long, device=slots.device)
        rows = torch.arange(self.rows, device=slots.device).unsqueeze(1)
        self.token_positions[rows, slots] = token_positions.expand(self.rows, s)
        return self.token_positions[:, : self.seen(s)]

    def advance(self, s: int):
        """Counts s more tokens in every row."""
        self.lengths = self.lengths + s
        self.length += s

    def set_lengths(self, lengths: list[int]):
        """Truncates each row to this many tokens: what follows is masked, and overwritten later."""
        self.lengths = torch.tensor(lengths, device=self.lengths.device)
        self.length = max(lengths)

    def replace(self, rows: list[int], other: "KVCache"):
        """Copies the rows of another cache into these rows; `set_lengths` then says how much of them counts."""
        n = other.length
        for ours, theirs in ((self.k, other.k), (self.v, other.v)):
            for tensor, new in zip(ours, theirs, strict=True):
                tensor[rows, :, :n] = new[:, :, :n]
        if self.token_positions is not None:
            self.token_positions[rows, :n] = other.token_positions[:, :n]


class LayerCache:
    """One layer of a KVCache during one forward, whose tokens go to `slots` (b s) or (1 s)."""

    def __init__(self, cache: KVCache, i: int, slots: Tensor):
        self.cache, self.i, self.slots = cache, i, slots

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """k, v (b h s d) of the new tokens -> keys and values of all tokens so far (b h k d), the new ones included.

        Heads, width, type and device are those of the first keys.
        """
        rows = torch.arange(len(k), device=k.device).unsqueeze(1)
        seen = self.cache.seen(k.shape[2])
        result = []
        for tensors, new in ((self.cache.k, k), (self.cache.v, v)):
            if tensors[self.i] is None:  # zeros, never garbage: 0 * NaN would leak through a mask
                b, h, _, d = new.shape
                tensors[self.i] = new.new_zeros(b, h, self.cache.n_slots, d)
            tensors[self.i][rows, :, self.slots] = rearrange(new, "b h s d -> b s h d")
            result.append(tensors[self.i][:, :, :seen])
        return tuple(result)


def bucket(n: int, capacity: int) -> int:
    """The smallest number of slots that holds n tokens: BUCKET times a power of two, at most the capacity."""
    size = BUCKET
    while size < n:
        size *= 2
    return min(size, capacity)
