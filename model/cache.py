"""Keys and values of what was read already, so that a new token costs one column and not the whole square."""

import torch
from torch import Tensor


class KVCache:
    """One pair of tensors (b h capacity d) a layer, filled from the left; `length` slots are in use.

    The cache belongs to the caller, not to the model: `model(tokens, cache=cache)` appends to it and moves `length`
    once, after the last layer, so that positions and mask of a forward come from one number.
    """

    def __init__(self, n_layers: int, capacity: int):
        self.capacity = capacity
        self.length = 0
        self.layers = [LayerCache(self) for _ in range(n_layers)]
        self.token_positions: Tensor | None = None  # of the slots, for a scheme that compares them

    def append_positions(self, token_positions: Tensor) -> Tensor:
        """Those of the new tokens, (s,) or (b, s) -> those of everything seen so far, (k,) or (b, k)."""
        if self.token_positions is not None and self.length > 0:
            seen = self.token_positions[..., : self.length]
            rows = torch.broadcast_shapes(seen.shape[:-1], token_positions.shape[:-1])
            token_positions = torch.cat([x.expand(*rows, -1) for x in (seen, token_positions)], dim=-1)
        self.token_positions = token_positions
        return token_positions


class LayerCache:
    """A layer's share of a KVCache; takes batch, heads, width, dtype and device from the first keys it is given."""

    def __init__(self, cache: KVCache):
        self.cache = cache
        self.k: Tensor | None = None
        self.v: Tensor | None = None

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """k, v (b h s d) of the new tokens -> keys and values of everything seen so far, the new ones included."""
        if self.k is None:  # zeros, never garbage: 0 * NaN would leak through a mask
            b, h, _, d = k.shape
            self.k = k.new_zeros(b, h, self.cache.capacity, d)
            self.v = v.new_zeros(b, h, self.cache.capacity, d)
        start, end = self.cache.length, self.cache.length + k.shape[2]
        if len(k) != len(self.k):
            raise ValueError(f"the cache was begun with {len(self.k)} rows, got {len(k)}: make a new one")
        if end > self.cache.capacity:
            raise ValueError(
                f"{end} tokens are more than the cache's capacity {self.cache.capacity}: make a larger one"
            )
        self.k[:, :, start:end] = k
        self.v[:, :, start:end] = v
        return self.k[:, :, :end], self.v[:, :, :end]
