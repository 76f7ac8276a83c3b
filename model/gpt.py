"""The decoder-only language model."""

import copy
import math
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from model.attention import CausalMultiHeadAttention
from model.cache import KVCache, LayerCache
from model.config import ModelConfig
from model.feed_forward import FEED_FORWARDS
from model.functional import attention_mask
from model.norm import NORMS
from model.ops import TORCH, Ops
from model.positions import (
    ALiBi,
    LearnedPositionalEmbedding,
    SinusoidalPositionalEmbedding,
    check_positions,
)


class Dropout(nn.Dropout):
    """In training, zeroes each element with probability p and scales the others by 1 / (1 - p) ("Dropout", 2014)."""

    def __init__(self, p: float):
        super().__init__(p)
        self.ops = TORCH

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.dropout(x, self.p) if self.training else x


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x)): pre-norm, as in GPT-2."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        norm = partial(NORMS[config.norm], config.d_model, config.norm_eps)
        self.attention_norm = norm()
        self.attention = CausalMultiHeadAttention(
            config.d_model,
            config.n_heads,
            config.positions == "rope",
            config.max_seq_len,
            config.theta,
            pairing=config.pairing,
            rope_scaling=config.rope_scaling,
            rope_factor=config.rope_factor,
            n_kv_heads=config.n_kv_heads,
            qk_norm=config.qk_norm,
            norm_eps=config.norm_eps,
            soft_cap=config.soft_cap,
            dropout=config.dropout if config.attention_dropout is None else config.attention_dropout,
        )
        self.feed_forward_norm = norm()
        self.feed_forward = FEED_FORWARDS[config.feed_forward](config.d_model, config.d_ff)
        self.dropout = Dropout(config.dropout)

    def forward(
        self, x: Tensor, token_positions: Tensor, mask: Tensor | None, cache: LayerCache | None, bias: Tensor | None
    ) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), token_positions, mask, cache, bias))
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))


def checkpoint_activations(model: "GPT"):
    """Makes blocks keep only their input for the backward pass, which recomputes the rest: less memory, more time.

    "Training Deep Nets with Sublinear Memory Cost" (2016). The results are the same, also with dropout.
    """
    for block in model.blocks:
        forward = block.forward

        def recomputed(*arguments, forward=forward) -> Tensor:
            if not torch.is_grad_enabled():
                return forward(*arguments)
            return checkpoint(forward, *arguments, use_reentrant=False)

        block.forward = recomputed


class GPT(nn.Module):
    """Embedding, n_layers blocks, norm, head.

    Args:
        vocab_size: the tokenizer's.
        config: everything else, see model/config.py.
    """

    def __init__(self, vocab_size: int, config: ModelConfig):
        super().__init__()
        if vocab_size < 1:
            raise ValueError(f"vocab_size must be at least 1, got {vocab_size}")
        self.config, self.ops = config, TORCH
        self.vocab_size, self.max_seq_len, self.window = vocab_size, config.max_seq_len, config.window
        d_model, norm = config.d_model, partial(NORMS[config.norm], config.d_model, config.norm_eps)
        rows = math.ceil(vocab_size / config.vocab_multiple) * config.vocab_multiple
        self.embedding = nn.Embedding(rows, d_model)
        self.embedding_norm = norm() if config.embedding_norm else None
        self.position_embedding = None
        if config.positions == "learned":
            self.position_embedding = LearnedPositionalEmbedding(d_model, config.max_seq_len)
        elif config.positions == "sinusoidal":
            self.position_embedding = SinusoidalPositionalEmbedding(d_model, config.max_seq_len)
        self.dropout = Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.alibi = ALiBi(config.n_heads) if config.positions == "alibi" else None
        self.norm = norm()
        self.head = nn.Linear(d_model, rows, bias=False)
        if config.tied:
            self.head.weight = self.embedding.weight
        self.initialise()

    def initialise(self):
        """Normal weights, scaled down in the 2 n_layers matrices that write into the residual stream: they add up.

        The scaling is GPT-2's. The standard deviation 0.5 / sqrt(d_model) is 0.018 at GPT-2's width, close to its 0.02.
        With zero_init these matrices are zero ("Fixup Initialization", 2019), and so is an untied head.
        """
        zero, std = self.config.zero_init, 0.5 / math.sqrt(self.config.d_model)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=std)
        for block in self.blocks:
            for matrix in (block.attention.wo, block.feed_forward.down):
                nn.init.normal_(matrix.weight, std=0.0 if zero else std / math.sqrt(2 * len(self.blocks)))
        if self.config.tied:
            return  # one matrix cannot be initialised in two ways
        if self.embedding_norm is not None:
            nn.init.normal_(self.embedding.weight)
        if zero:
            nn.init.zeros_(self.head.weight)

    def forward(
        self,
        tokens: Tensor,
        token_positions: Tensor | None = None,
        *,
        targets: Tensor | None = None,
        padding: Tensor | None = None,
        documents: Tensor | None = None,
        cache: KVCache | None = None,
        at: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """tokens (b, s) -> logits (b, s, vocab); with targets (b, s) -> the summed loss in nats and its count.

        token_positions (s,) or (b, s): for the position scheme; by default they continue after the cache. They never
            enter the mask: causality follows the order of the tokens.
        padding (b, cache.length + s): True at real tokens; the others are masked.
        documents (b, cache.length + s): document numbers; tokens attend to their own document only.
        cache: of the tokens before; this forward appends to it.
        at (b,): compute the logits (b, vocab) of one token per row only, given by its index in `tokens`.
        """
        self._check(tokens, token_positions, padding, documents, cache)
        if cache is not None:
            cache.reserve(len(tokens), tokens.shape[1], tokens.device)
        x = self.hidden(tokens, token_positions, padding, documents, cache, at)
        if cache is not None:
            cache.advance(tokens.shape[1])
        return self.logits(x) if targets is None else self.loss(x, targets)

    def logits(self, x: Tensor) -> Tensor:
        """The last hidden states x (... d_model) -> logits (... vocab)."""
        return self.head(x)[..., : self.vocab_size]

    def loss(self, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The last hidden states x (... d_model) and targets (...) -> the summed loss in nats and its count."""
        return self.ops.head_loss(self.logits, x, targets, self.parameters())

    def read(self, tokens: Tensor, cache: KVCache | None = None) -> Tensor:
        """`forward` without its checks, so that it compiles once for all steps of generation.

        The cache must have room for the tokens, and is not advanced.
        """
        return self.logits(self.hidden(tokens, cache=cache))

    def hidden(
        self,
        tokens: Tensor,
        token_positions: Tensor | None = None,
        padding: Tensor | None = None,
        documents: Tensor | None = None,
        cache: KVCache | None = None,
        at: Tensor | None = None,
    ) -> Tensor:
        """The last hidden states (b s d_model), the head's input; arguments as in `forward`, without its checks."""
        s = tokens.shape[1]
        slots = None if cache is None else cache.next_slots(s)
        if token_positions is None:
            token_positions = torch.arange(s, device=tokens.device) if slots is None else slots
        mask = None  # plain causal; this depends on which arguments are given, never on their values
        if padding is not None or documents is not None or cache is not None or self.window is not None:
            queries, T_k = (s, s) if slots is None else (slots, cache.seen(s))
            mask = attention_mask(
                queries, T_k, window=self.window, padding=padding, documents=documents, device=tokens.device
            )
        bias = None
        if self.alibi is not None:
            seen = token_positions if cache is None else cache.append_positions(token_positions, slots)
            bias = self.alibi(token_positions.expand_as(tokens) if seen.ndim == 2 else token_positions, seen)

        x = self.embedding(tokens)
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        if self.position_embedding is not None:
            x = self.position_embedding(x, token_positions)
        x = self.dropout(x)
        for i, block in enumerate(self.blocks):
            x = block(x, token_positions, mask, None if cache is None else cache.layer(i, slots), bias)
        if at is not None:
            x = x[torch.arange(len(x), device=x.device), at]
        return self.norm(x)

    def _check(self, tokens: Tensor, token_positions, padding, documents, cache: KVCache | None):
        (b, s), start = tokens.shape, cache.length if cache is not None else 0
        if token_positions is None and start + s > self.max_seq_len:
            raise ValueError(f"{start + s} tokens exceed max_seq_len {self.max_seq_len}: give fewer, or overflow=slide")
        if token_positions is not None:
            if token_positions.shape not in ((s,), (b, s)):
                raise ValueError(
                    f"token_positions must be {(s,)} or {(b, s)}, one per token, got {tuple(token_positions.shape)}"
                )
            on_cpu = (
                token_positions.device.type == "cpu"
            )  # not on a GPU: it would wait; there the look-up fails instead
            if on_cpu and not torch.compiler.is_compiling():
                check_positions(token_positions, self.max_seq_len)
        for name, given in (("padding", padding), ("documents", documents)):
            if given is not None and given.shape != (b, start + s):
                raise ValueError(f"{name} must be {(b, start + s)}, one per slot, got {tuple(given.shape)}")
        if padding is not None and padding.dtype != torch.bool:
            raise ValueError(f"padding must be boolean, True = a token, got {padding.dtype}")

    def new_cache(self, capacity: int | None = None) -> KVCache:
        """An empty cache for `capacity` tokens per row; None: max_seq_len."""
        return KVCache(len(self.blocks), self.max_seq_len if capacity is None else capacity)

    def extended(self, n: int) -> "GPT":
        """A model with the same weights whose context is at least n tokens; this model itself if that suffices.

        max_seq_len is doubled as often as needed, and RoPE is scaled by the same factor with YaRN (or with the method
        that this model uses already). The weights are shared. ValueError for other position schemes.
        """
        if n <= self.max_seq_len:
            return self
        if self.config.positions != "rope":
            raise ValueError(
                f"only positions=rope can be extended to {n} tokens, beyond max_seq_len {self.max_seq_len}, "
                f"got {self.config.positions}"
            )
        times = 2 ** math.ceil(math.log2(n / self.max_seq_len))
        shared = {id(tensor): tensor for tensor in (*self.parameters(), *self.buffers())}
        longer = copy.deepcopy(self, shared)
        longer.max_seq_len *= times
        scaling, factor = self.config.rope_scaling or "yarn", self.config.rope_factor * times
        longer.config = replace(self.config, max_seq_len=longer.max_seq_len, rope_scaling=scaling, rope_factor=factor)
        for block in longer.blocks:
            block.attention.rope = block.attention.rope.extended(times)
        return longer

    def use(self, ops: Ops):
        """Makes all modules compute with the functions of this table; the results are the same."""
        for module in self.modules():
            if hasattr(module, "ops"):
                module.ops = ops

    def n_parameters(self) -> int:
        """The number of parameters; a tied matrix counts once."""
        return sum(p.numel() for p in self.parameters())
