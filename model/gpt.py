"""The decoder-only language model."""

import math

import torch
from torch import Tensor, nn

from model.attention import CausalMultiHeadAttention, RMSNorm
from model.cache import KVCache, LayerCache
from model.feed_forward import SwiGLU
from model.functional import causal_mask, cross_entropy, document_mask, padding_mask


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x)): pre-norm, as in GPT-2."""

    def __init__(self, d_model: int, d_ff: int, dropout: float, **attention):
        super().__init__()
        self.attention_norm = RMSNorm(d_model)
        self.attention = CausalMultiHeadAttention(d_model, dropout=dropout, **attention)
        self.feed_forward_norm = RMSNorm(d_model)
        self.feed_forward = SwiGLU(d_model, d_ff)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, token_positions: Tensor, mask: Tensor | None, cache: LayerCache | None) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), token_positions, mask, cache))
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))


class GPT(nn.Module):
    """Embedding, n_layers blocks, norm, head.

    Args:
        vocab_size: the tokenizer's.
        d_model, n_layers, n_heads, n_kv_heads, d_ff: the shape; n_kv_heads None means n_heads.
        max_seq_len: how far positions reach.
        positions: "rope" or "none". Without positions, order still shows through the causal mask alone.
        theta, pairing: RoPE's base and which dimensions it pairs, see RotaryPositionalEmbedding.
        qk_norm: RMSNorm on queries and keys.
        dropout: on embeddings, attention weights and both residual branches.
        tied: the head shares the embedding's matrix.
    """

    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        n_layers: int,
        n_heads: int,
        d_ff: int,
        max_seq_len: int,
        *,
        n_kv_heads: int | None = None,
        positions: str = "rope",
        theta: float = 10000.0,
        pairing: str = "half",
        qk_norm: bool = False,
        dropout: float = 0.0,
        tied: bool = False,
    ):
        arguments = dict(locals())
        del arguments["self"], arguments["__class__"]
        super().__init__()
        if positions not in ("rope", "none"):
            raise ValueError(f"positions must be rope or none, got {positions}")
        # what GPT(**arguments) needs to build this model again; a checkpoint keeps it
        self.arguments = arguments
        self.vocab_size, self.max_seq_len = vocab_size, max_seq_len
        self.embedding = nn.Embedding(vocab_size, d_model)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            Block(
                d_model,
                d_ff,
                dropout,
                n_heads=n_heads,
                n_kv_heads=n_kv_heads,
                use_rope=positions == "rope",
                max_seq_len=max_seq_len,
                theta=theta,
                pairing=pairing,
                qk_norm=qk_norm,
            )
            for _ in range(n_layers)
        )
        self.norm = RMSNorm(d_model)
        self.head = nn.Linear(d_model, vocab_size, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.initialise()

    def initialise(self):
        """Normal weights; smaller in the 2 n_layers matrices that write into the residual stream, since they add up.

        The latter is GPT-2's; the width of the rest makes 0.018 at its size, near its 0.02, and grows as models shrink.
        """
        std = 0.5 / math.sqrt(self.arguments["d_model"])
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=std)
        for block in self.blocks:
            for matrix in (block.attention.wo, block.feed_forward.down):
                nn.init.normal_(matrix.weight, std=std / math.sqrt(2 * len(self.blocks)))

    def forward(
        self,
        tokens: Tensor,
        token_positions: Tensor | None = None,
        *,
        targets: Tensor | None = None,
        padding: Tensor | None = None,
        documents: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """tokens (b, s) -> logits (b, s, vocab); with targets (b, s) -> the summed loss in nats and its count.

        token_positions (s,) or (b, s): where each token stands, for RoPE; by default after what the cache holds. They
        never enter the mask: causality goes by order.
        padding (b, cache.length + s): True at real tokens; the others are not looked at.
        documents (b, s): tokens see their own document only; not together with a cache.
        cache: what was read before; this forward appends to it.
        """
        s = tokens.shape[1]
        start = cache.length if cache is not None else 0
        self._check(tokens, token_positions, documents, cache)
        if token_positions is None:
            token_positions = torch.arange(start, start + s, device=tokens.device)
        mask = self._mask(s, start, padding, documents, cache, tokens.device)

        x = self.dropout(self.embedding(tokens))
        for i, block in enumerate(self.blocks):
            x = block(x, token_positions, mask, cache.layers[i] if cache is not None else None)
        if cache is not None:
            cache.length += s
        logits = self.head(self.norm(x))
        return logits if targets is None else cross_entropy(logits, targets)

    @staticmethod
    def _mask(s: int, start: int, padding, documents, cache, device) -> Tensor | None:
        """Who may look where, broadcasting to (b h q k); None: plain causal. Decided by arguments, never by values."""
        if padding is None and documents is None and cache is None:
            return None
        mask = causal_mask(s, start + s, device)
        if padding is not None:
            mask = mask & padding_mask(padding)
        if documents is not None:
            mask = mask & document_mask(documents)
        return mask

    def _check(self, tokens: Tensor, token_positions: Tensor | None, documents: Tensor | None, cache: KVCache | None):
        s, start = tokens.shape[1], cache.length if cache is not None else 0
        if token_positions is None and start + s > self.max_seq_len:
            raise ValueError(f"{start + s} tokens are more than max_seq_len {self.max_seq_len}: give fewer, or slide")
        if cache is not None and start + s > cache.capacity:
            raise ValueError(
                f"{start + s} tokens are more than the cache's capacity {cache.capacity}: make a larger one"
            )
        if cache is not None and documents is not None:
            raise ValueError("documents and a cache cannot go together: packing is for training")

    def new_cache(self, capacity: int | None = None) -> KVCache:
        """An empty cache for `capacity` tokens a row; None: max_seq_len."""
        return KVCache(len(self.blocks), self.max_seq_len if capacity is None else capacity)

    def use_attention(self, backend: str):
        """Computes attention by torch's "fused" kernel (the default) or as "written" in functional.py; same result."""
        if backend not in ("fused", "written"):
            raise ValueError(f"the attention backend must be fused or written, got {backend}")
        for block in self.blocks:
            block.attention.backend = backend

    def n_parameters(self) -> int:
        """Trainable numbers; a tied matrix counts once."""
        return sum(p.numel() for p in self.parameters())
