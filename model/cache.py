"""Keys and values of what was read already, so that a new token costs one column and not the whole square."""

import torch
from einops import rearrange
from torch import Tensor
from torch.nn.functional import pad

BUCKET = 128  # slots that a cache begins with; it grows by doubling


class KVCache:
    """One pair of tensors (b h slots d) a layer, filled from the left: slot i of a row holds what the row read i-th.

    Where new tokens go, which positions they have and what they may see all come from one place, `lengths`, which a
    forward moves once, at its end: (b,), or (1,) while all rows are of the same length. `length` is the longest row's.
    The cache belongs to the caller, not to the model: `model(tokens, cache=cache)` appends to it.

    Memory follows what is used: slots come in buckets of 128, 256, 512, ..., up to `capacity`.
    """

    def __init__(self, n_layers: int, capacity: int):
        self.capacity = capacity
        self.rows = self.length = self.n_slots = 0
        self.lengths: Tensor | None = None
        self.k: list[Tensor | None] = [None] * n_layers
        self.v: list[Tensor | None] = [None] * n_layers
        self.token_positions: Tensor | None = None  # (b slots), for a scheme that compares them

    def reserve(self, rows: int, s: int, device: torch.device):
        """Makes room for s more tokens in each of so many rows; ValueError if that is beyond the capacity."""
        if self.rows not in (0, rows):
            raise ValueError(f"the cache was begun with {self.rows} rows, got {rows}: make a new one")
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
        """(b s) or (1 s): where the next s tokens go, which is also their position unless another is given."""
        return self.lengths.unsqueeze(1) + torch.arange(s, device=self.lengths.device)

    def seen(self, s: int) -> int:
        """How many slots a forward of s tokens looks at: those in use, or compiled all, so that its shapes stay."""
        return self.k[0].shape[2] if torch.compiler.is_compiling() else self.length + s

    def layer(self, i: int, slots: Tensor) -> "LayerCache":
        return LayerCache(self, i, slots)

    def append_positions(self, token_positions: Tensor, slots: Tensor) -> Tensor:
        """Keeps those of new tokens, (s,) or (b s), which go to `slots` -> those of everything seen so far (b k)."""
        s = slots.shape[1]
        if self.token_positions is None:
            self.token_positions = torch.zeros(self.rows, self.n_slots, dtype=torch.long, device=slots.device)
        rows = torch.arange(self.rows, device=slots.device).unsqueeze(1)
        self.token_positions[rows, slots] = token_positions.expand(self.rows, s)
        return self.token_positions[:, : self.seen(s)]

    def advance(self, s: int):
        """Counts s tokens more in every row."""
        self.lengths = self.lengths + s
        self.length += s

    def set_lengths(self, lengths: list[int]):
        """Forgets what each row holds behind so many tokens: it is not seen any more, and written over."""
        self.lengths = torch.tensor(lengths, device=self.lengths.device)
        self.length = max(lengths)

    def replace(self, rows: list[int], other: "KVCache"):
        """Gives some rows the content of another cache, row for row; `set_lengths` then says how much of it counts."""
        n = other.length
        for ours, theirs in ((self.k, other.k), (self.v, other.v)):
            for tensor, new in zip(ours, theirs, strict=True):
                tensor[rows, :, :n] = new[:, :, :n]
        if self.token_positions is not None:
            self.token_positions[rows, :n] = other.token_positions[:, :n]


class LayerCache:
    """A layer's share of a KVCache in one forward, whose tokens go to `slots` (b s) or (1 s)."""

    def __init__(self, cache: KVCache, i: int, slots: Tensor):
        self.cache, self.i, self.slots = cache, i, slots

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """k, v (b h s d) of the new tokens -> those of everything seen so far (b h k d), the new ones included.

        Heads, width, type and device are those of the first keys that come.
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
    """The least number of slots that holds n: BUCKET, twice that, four times that, ..., at most the capacity."""
    size = BUCKET
    while size < n:
        size *= 2
    return min(size, capacity)
