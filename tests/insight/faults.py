"""Models for the doctor: healthy ones, and one for each fault, whose finding is known.

A fault of the program is a function in whose place another stands, which mostly calls the right one with something
wrong; a fault of numbers is done to a model's weights or tables. Nothing here depends on how the program's functions
are written, only on what they take and return.
"""

import copy
import functools
import inspect
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from data.tokenizer import ByteTokenizer, CharacterTokenizer
from insight.doctor import Patient
from model import GPT, ModelConfig, functional, generation
from model.attention import CausalMultiHeadAttention
from model.cache import KVCache, LayerCache
from model.hooks import Place, editing
from model.ops import TORCH
from model.positions import RotaryPositionalEmbedding
from scripts import doctor
from training.optimizer import OptimizerConfig

TEXT = "In the beginning there was a small model, and it read what it was given, one letter after the other. " * 4
CHARACTERS = CharacterTokenizer(TEXT)
IDS = torch.from_numpy(CHARACTERS.encode(TEXT).astype("int64"))
RATES = dict.fromkeys(("lr", "lr_embedding", "lr_head", "lr_norm"), 3e-3)
ADAMW = {"name": "adamw", **RATES, "betas": [0.9, 0.99], "eps": 1e-8, "weight_decay": 0.1, "grad_clip": 1.0}
MUON_RATES = {"lr": 0.02, "lr_embedding": 1e-2, "lr_head": 1e-2, "lr_norm": 3e-3}
MUON = ADAMW | {"name": "muon", "betas": [0.8, 0.95], "momentum": 0.9, "weight_decay": 0.0} | MUON_RATES
AS_THE_DEFAULT = {"embedding_norm": True, "zero_init": True, "qk_norm": True, "n_kv_heads": None}

Seed = Callable[..., Patient]  # seed(monkeypatch)


def new_model(vocab_size=CHARACTERS.vocab_size, seed=0, **arguments) -> GPT:
    torch.manual_seed(seed)
    shape = {"d_model": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "d_ff": 64, "max_seq_len": 24}
    return GPT(vocab_size, ModelConfig(**{**shape, **arguments})).eval()


def patient_of(model: GPT, *, tokenizer=CHARACTERS, ids=IDS, optimizer=ADAMW, **known) -> Patient:
    known = {"trained": False, "tokenizer": tokenizer, "text": TEXT} | known
    start = doctor.training_by(OptimizerConfig(**optimizer))
    return Patient(model, *doctor.rows(ids, model.max_seq_len), start_training=start, **known)


@functools.cache
def _trained(steps: int, **arguments) -> GPT:
    patient = patient_of(new_model(**arguments))
    step = patient.start_training(patient.model)
    for _ in range(steps):
        step(patient.tokens, patient.targets)
    return patient.model


def trained(steps=40, **arguments) -> GPT:
    """A model that has learned a little of the text."""
    return copy.deepcopy(_trained(steps, **arguments))


# --- faults of the program ------------------------------------------------------------------------------------------


def replaced(owner, name: str, wrong: Callable, of=None) -> Seed:
    """A new model, and wrong(right, ...) for right(...), the function owner.name, wherever the model calls it.

    of: the arguments of the model.
    """

    def seed(monkeypatch) -> Patient:
        right = getattr(owner, name)

        @functools.wraps(right)
        def stand_in(*arguments, **options):
            return wrong(right, *arguments, **options)

        monkeypatch.setattr(owner, name, stand_in)
        for module in [module for known, module in sys.modules.items() if known.split(".")[0] == "model"]:
            if getattr(module, name, None) is right:
                monkeypatch.setattr(module, name, stand_in)
        return patient_of(new_model(**(of or {})))

    return seed


def given(owner, name: str, of=None, **changes: Callable) -> Seed:
    """A function that is given something else for the arguments of these names."""

    def wrong(right, *arguments, **options):
        call = inspect.signature(right).bind(*arguments, **options)
        call.apply_defaults()
        call.arguments |= {name: change(call.arguments[name]) for name, change in changes.items()}
        return right(*call.args, **call.kwargs)

    return replaced(owner, name, wrong, of)


def returned(owner, name: str, change: Callable, of=None) -> Seed:
    """A function whose result is changed."""
    return replaced(owner, name, lambda right, *arguments, **options: change(right(*arguments, **options)), of)


written = functools.partial(given, functional, "scaled_dot_product_attention")
softmax = functools.partial(given, functional, "softmax")


def fused(wrong: Callable, of=None) -> Seed:
    """wrong(right, q, k, v, mask, is_causal) for torch's kernel."""

    def stand_in(right, q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, **options):
        def kernel(q, k, v, mask, is_causal, **more):
            return right(q, k, v, mask, dropout_p, is_causal, **options, **more)

        return wrong(kernel, q, k, v, attn_mask, is_causal)

    return replaced(F, "scaled_dot_product_attention", stand_in, of)


def off_in_float32(name: str) -> Seed:
    """A model whose table has a function that gives too much in this type alone, as a kernel may that has no other."""

    def wrong(*arguments):
        result = getattr(TORCH, name)(*arguments)
        y, *rest = result if isinstance(result, tuple) else (result,)
        y = 1.01 * y if y.dtype == torch.float32 else y
        return (y, *rest) if rest else y

    def seed(monkeypatch) -> Patient:
        patient = patient_of(new_model())
        patient.model.use(replace(TORCH, **{name: wrong}))
        return patient

    return seed


def unscaled(right, *given):
    return right(*given, scale=1.0)


def not_causal(right, q, k, v, mask, is_causal):
    return right(q, k, v, mask, False)


def values_backwards(right, q, k, v, mask, is_causal):
    return right(q, k, v.flip(1), mask, is_causal)


def finite_bias(right, q, k, v, mask, is_causal):
    if mask is not None and mask.is_floating_point():
        mask = mask.clamp(min=-1e4)
    return right(q, k, v, mask, is_causal)


def rounded(right, *given):
    y = right(*given)
    return y.bfloat16().float() if y.dtype == torch.float32 else y


def in_turn(x: Tensor) -> Tensor:
    """Heads that stand together in pairs, as if each pair were dealt out."""
    return x[:, [0, 2, 1, 3]]


def cap_of_one(right, q, *others, soft_cap=None, **options):
    return right(q if soft_cap is None else q / soft_cap, *others, soft_cap=soft_cap and 1.0, **options)


def unguarded_maximum(right, x, dim=-1):
    exp = (x - x.amax(dim, keepdim=True)).exp()
    total = exp.sum(dim, keepdim=True)
    return exp / total.masked_fill(total == 0, 1.0)


def unguarded_sum(right, x, dim=-1):
    top = x.amax(dim, keepdim=True)
    exp = (x - top.masked_fill(top == -math.inf, 0.0)).exp()
    return exp / exp.sum(dim, keepdim=True)


def everything_in_a_prompt(right, queries, *others, **options):
    mask = right(queries, *others, **options)
    return torch.ones_like(mask) if isinstance(queries, Tensor) and queries.shape[-1] > 1 else mask


def next_position_in_a_cache(right, self, tokens, token_positions=None, *, cache=None, **options):
    if cache is not None:
        token_positions = cache.length + 1 + torch.arange(tokens.shape[1])
    return right(self, tokens, token_positions, cache=cache, **options)


def positions_from_one(right, self, tokens, token_positions=None, **options):
    return right(self, tokens, 1 + torch.arange(tokens.shape[1]), **options)


def queries_further(right, self, x, token_positions):
    return right(self, x, token_positions + 1 if x.shape[1] == 4 else token_positions)


def keys_not_turned(right, self, x, token_positions):
    return x if x.shape[1] == 2 else right(self, x, token_positions)


def keys_as_values(right, self, k, v):
    return right(self, k, v if v.shape[2] > 1 else k)


def dealt_out(x: Tensor, n: int) -> Tensor:
    """(b s (h d)) with the numbers of n heads in turn."""
    return x.unflatten(-1, (-1, n)).transpose(-1, -2).flatten(-2)


def projections_dealt_out(right, self, *arguments, **options):
    heads = {"wq": self.n_heads, "wk": self.n_kv_heads, "wv": self.n_kv_heads}
    with editing(self, {Place(name): functools.partial(dealt_out, n=n) for name, n in heads.items()}):
        return right(self, *arguments, **options)


def output_dealt_out(right, self, *arguments, **options):
    d_head = self.wo.in_features // self.n_heads
    with editing(self, {Place("wo", 0): functools.partial(dealt_out, n=d_head)}):
        return right(self, *arguments, **options)


# --- faults of numbers ----------------------------------------------------------------------------------------------


def damaged(damage: Callable[[GPT], None], is_trained=False, **arguments) -> Seed:
    """A new model or one that has learned, to whose numbers something was done."""

    def seed(monkeypatch) -> Patient:
        model = trained(10, **arguments) if is_trained else new_model(**arguments)
        with torch.no_grad():
            damage(model)
        return patient_of(model, trained=is_trained)

    return seed


def one_nan(model):
    model.blocks[1].feed_forward.up.weight[3, 5] = math.nan


def untie(model):
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    model.head.weight[0] += 0.01


def sharpen(model):
    model.blocks[1].attention.wk.weight.mul_(1000)


def silence_a_head(model):
    model.blocks[0].attention.wq.weight[8:16] = 0.0  # head 1 of 4, 8 wide


def blow_up_a_branch(model):
    model.blocks[1].feed_forward.down.weight.mul_(1e4)


def shout(model):
    """All branches, alike: none of them is louder than the others, and all of them than what was read."""
    for block in model.blocks:
        for weight in block.parameters():
            if weight.ndim == 2:
                weight.mul_(20)


def kill_units(model):
    model.blocks[1].feed_forward.up.weight[:60] = 0.0


def large_head(model):
    model.head.weight.mul_(20)


def values_begin_smaller_than_outputs(model):
    for block in model.blocks:
        block.attention.wo.weight.mul_(math.sqrt(2 * len(model.blocks)))
        block.attention.wv.weight.div_(math.sqrt(2 * len(model.blocks)))


def nothing_begins_smaller(model):
    for block in model.blocks:
        for matrix in (block.attention.wo, block.feed_forward.down):
            matrix.weight.mul_(math.sqrt(2 * len(model.blocks)))


def tables_in_bfloat16(model):
    for block in model.blocks:
        rope = block.attention.rope
        rope.cos, rope.sin = rope.cos.bfloat16(), rope.sin.bfloat16()


def tables_through_bfloat16(model):
    for block in model.blocks:
        block.attention.rope.cos = block.attention.rope.cos.bfloat16().float()


def pair_otherwise(model):
    for block in model.blocks:
        block.attention.rope.pairing = "interleaved"


# --- faults of training, tokenizer and text -------------------------------------------------------------------------


def rate(factor, names=tuple(RATES), optimizer=ADAMW, **arguments) -> Seed:
    return lambda monkeypatch: patient_of(
        new_model(**arguments), optimizer=optimizer | {name: factor * optimizer[name] for name in names}
    )


def another_optimizer(optimizer_of) -> Seed:
    """Training that has nothing of AdamW's settings in it."""

    def start(model):
        optimizer = optimizer_of(model)

        def step(tokens, targets):
            total, count = model(tokens, targets=targets)
            optimizer.zero_grad()
            (total / count).backward()
            optimizer.step()
            return (total / count).item()

        return step

    def seed(monkeypatch) -> Patient:
        patient = patient_of(new_model())
        patient.start_training = start
        return patient

    return seed


def muon(lr):
    return lambda model: torch.optim.Muon((p for b in model.blocks for p in b.parameters() if p.ndim == 2), lr=lr)


def adam_on_gains(lr):
    return lambda model: torch.optim.Adam((p for p in model.parameters() if p.ndim == 1), lr=lr)


class OtherText(CharacterTokenizer):
    """Made from another corpus of the same size of alphabet: the same ids, for other characters."""

    def __init__(self):
        super().__init__("".join(chr(0x3B1 + i) for i in range(CHARACTERS.vocab_size - 1)))


def tokenizer_of_another_corpus(monkeypatch) -> Patient:
    return patient_of(trained(10), trained=True, tokenizer=OtherText(), fingerprint=CHARACTERS.fingerprint())


def text_by_another_tokenizer(monkeypatch) -> Patient:
    """Nobody has written down which tokenizer it was: what is left is that the model knows less than nothing."""
    other = torch.randperm(CHARACTERS.vocab_size, generator=torch.Generator().manual_seed(0))
    return patient_of(trained(), trained=True, tokenizer=None, ids=other[IDS])


def tokenizer_of_another_size(monkeypatch) -> Patient:
    return patient_of(new_model(), tokenizer=ByteTokenizer())


def nothing_to_learn_from(monkeypatch) -> Patient:
    """What follows has nothing to do with what was read, which is one letter all over."""
    patient = patient_of(new_model())
    patient.tokens = torch.zeros_like(patient.tokens)
    return patient


# --- all of them ----------------------------------------------------------------------------------------------------


class Fault(NamedTuple):
    check: str  # that finds it
    where: str  # a part of what the finding says
    what: str
    seed: Seed


MATH, FUSED = "math_attention", "fused_attention (layer 0, 1)"
NOT_FINITE = "numbers that are not finite"
ROPE, ATTENTION = RotaryPositionalEmbedding, CausalMultiHeadAttention

FAULTS = {
    "written: no 1/sqrt(d)": Fault(
        "scores", MATH, "not divided by sqrt(d_head)", written(q=lambda q: q * math.sqrt(q.shape[-1]))
    ),
    "fused: no 1/sqrt(d)": Fault("scores", FUSED, "not divided by sqrt(d_head)", fused(unscaled)),
    "1/d": Fault("scores", MATH, "q k^T times 0.125", written(q=lambda q: q / math.sqrt(q.shape[-1]))),
    "mask inverted": Fault("masked weights", MATH, "the mask is inverted", written(mask=torch.logical_not)),
    "softmax over queries": Fault("row sums", MATH, "the softmax runs over the queries", softmax(dim=lambda dim: -2)),
    "written: -1e4": Fault(
        "masked weights", MATH, "filled with a finite number", softmax(x=lambda x: x.clamp(min=-1e4))
    ),
    "fused with a bias: -1e4": Fault(
        "masked weights",
        "fused_attention",
        "filled with a finite number (plain causal with a bias)",
        fused(finite_bias, {"positions": "alibi"}),
    ),
    "no causal mask": Fault("masked weights", FUSED, "the mask is not applied", fused(not_causal)),
    "no mask in prefill": Fault(
        "leak",
        "blocks.0, blocks.1",
        "future tokens leak in a prompt read into a cache",
        replaced(functional, "attention_mask", everything_in_a_prompt),
    ),
    "positions in the cache off by one": Fault(
        "token positions",
        "blocks.0.attention.rope",
        "off by +1 in a prompt read into a cache",
        replaced(GPT, "forward", next_position_in_a_cache),
    ),
    "positions from one": Fault(
        "token positions",
        "position_embedding",
        "off by +1 in one forward",
        replaced(GPT, "forward", positions_from_one, {"positions": "learned"}),
    ),
    "the cache counts a prompt as one token": Fault(
        "token positions",
        "alibi",
        "in a prompt read into a cache",
        given(KVCache, "advance", {"positions": "alibi"}, s=lambda s: 1),
    ),
    "queries a place further than keys": Fault(
        "token positions", "blocks.0.attention.rope", "off by +1", replaced(ROPE, "__call__", queries_further)
    ),
    "RoPE looks up the next place": Fault(
        "rotation",
        "blocks.0.attention",
        "at the next position",
        given(ROPE, "angles", token_positions=lambda positions: positions + 1),
    ),
    "RoPE pairs otherwise": Fault(
        "rotation", "blocks.0.attention", "paired as interleaved, not half", damaged(pair_otherwise)
    ),
    "keys are not turned": Fault(
        "rotation", "blocks.1.attention", "keys are not rotated", replaced(ROPE, "__call__", keys_not_turned)
    ),
    "heads transposed": Fault(
        "head order",
        "blocks.0.attention",
        "the heads of wq are transposed",
        replaced(ATTENTION, "forward", projections_dealt_out),
    ),
    "heads transposed before wo": Fault(
        "head order",
        "blocks.1.attention",
        "transposed before wo",
        replaced(ATTENTION, "forward", output_dealt_out),
    ),
    "k not transposed": Fault("scores", MATH, "k is not transposed", written(k=lambda k: k.mT)),
    "key heads in turn": Fault("scores", MATH, "take key heads in turn", written(k=in_turn, v=in_turn)),
    "one head three times as sharp": Fault(
        "scores",
        MATH,
        "not q k^T / sqrt(d_head) in head 2",
        written(q=lambda q: q * torch.tensor([1.0, 1.0, 3.0, 1.0]).view(4, 1, 1)),
    ),
    "the bias twice": Fault(
        "scores", MATH, "the bias is added 2 times", written(bias=lambda bias: None if bias is None else 2 * bias)
    ),
    "a soft cap of one": Fault(
        "values",
        "math_attention",
        "not bounded as cap * tanh",
        replaced(functional, "scaled_dot_product_attention", cap_of_one, {"soft_cap": 2.0}),
    ),
    "value heads backwards": Fault("values", FUSED, "not the sum of values times weights", fused(values_backwards)),
    "padding hides queries": Fault(
        "padding",
        "the mask of padding",
        "a padded row differs from the row alone",
        returned(functional, "padding_mask", lambda mask: mask.mT),
    ),
    "rows of a mask taken for heads": Fault(
        "row masks",
        "blocks.0.attention",
        "broadcasts over the wrong axis",
        given(ATTENTION, "forward", mask=lambda mask: mask if mask is None or mask.ndim != 3 else mask.unsqueeze(0)),
    ),
    "documents see each other": Fault(
        "documents",
        "the mask of documents",
        "a document that shares a row",
        returned(functional, "document_mask", torch.ones_like),
    ),
    "a window too wide": Fault(
        "leak",
        "blocks.0, blocks.1",
        "in one forward",
        given(functional, "window_mask", {"window": 3}, window=lambda window: window + 1),
    ),
    "the cache keeps keys as values": Fault(
        "cache", "blocks.0.attention", "token by token", replaced(LayerCache, "append", keys_as_values)
    ),
    "the table in bfloat16": Fault(
        "position tables",
        "blocks.0.attention.rope.cos and 3 more",
        "the table is torch.bfloat16",
        damaged(tables_in_bfloat16),
    ),
    "the table through bfloat16": Fault(
        "position tables", "blocks.0.attention.rope.cos and 1 more", "off by up to", damaged(tables_through_bfloat16)
    ),
    "the table follows the model to bfloat16": Fault(
        "position tables",
        "blocks.0.attention.rope.cos",
        "becomes torch.bfloat16 when the model does",
        replaced(ROPE, "_apply", lambda right, *arguments: nn.Module._apply(*arguments)),
    ),
    "an all-masked row: the maximum": Fault(
        "all-masked row", MATH, NOT_FINITE, replaced(functional, "softmax", unguarded_maximum)
    ),
    "an all-masked row: the sum": Fault(
        "all-masked row", MATH, NOT_FINITE, replaced(functional, "softmax", unguarded_sum)
    ),
    "an all-masked row: a finite minimum": Fault(
        "all-masked row",
        MATH,
        "a mean of masked values",
        softmax(x=lambda x: x.clamp(min=torch.finfo(x.dtype).min)),
    ),
    "the wrong matrix scaled": Fault(
        "initial scale",
        "blocks.0.attention.wv",
        "the other matrices that read the stream",
        damaged(values_begin_smaller_than_outputs),
    ),
    "nothing scaled": Fault(
        "initial scale", "blocks.1.feed_forward.down", "branches add up", damaged(nothing_begins_smaller)
    ),
    "a NaN in one weight": Fault(
        "finite weights", "blocks.1.feed_forward.up.weight", "first nan at [3, 5]", damaged(one_nan)
    ),
    "not tied": Fault("tied weights", "head.weight", "two matrices", damaged(untie, tied=True)),
    "rate 100 times too high": Fault("learning rate", "optimizer, blocks.", "times its size", rate(100)),
    "Muon's rate 100 times too high": Fault(
        "learning rate", "optimizer, blocks.", "times its size", another_optimizer(muon(2.0))
    ),
    "gains at a rate far too high": Fault(
        "learning rate", "optimizer", "the loss rises", another_optimizer(adam_on_gains(10.0))
    ),
    "rate 100 times too high, and branches that begin at zero": Fault(
        "learning rate", "optimizer, blocks.", "times its size", rate(100, **AS_THE_DEFAULT)
    ),
    "the matrices' rate 100 times too high": Fault(
        "learning rate", "optimizer, blocks.", "step 3 changes it by", rate(100, ["lr"], MUON, **AS_THE_DEFAULT)
    ),
    "the head's rate 100 times too high": Fault(
        "learning rate", "optimizer", "the loss rises", rate(100, ["lr_head"], MUON, **AS_THE_DEFAULT)
    ),
    "rate a million times too low": Fault("learning rate", "optimizer", "only falls from", rate(1e-6)),
    "padded ids": Fault(
        "padded ids",
        "head",
        "logits for",
        replaced(GPT, "logits", lambda right, self, x: self.head(x), {"vocab_multiple": 32}),
    ),
    "padded ids where the model writes": Fault(
        "padded ids",
        "generate",
        "which the tokenizer does not have",
        returned(generation, "next_logits", lambda logits: F.pad(logits, (0, 7)), {"vocab_multiple": 32}),
    ),
    "tokenizer of another corpus": Fault(
        "tokenizer", "tokenizer", "not the tokenizer of the model's training", tokenizer_of_another_corpus
    ),
    "text by another tokenizer": Fault(
        "first loss", "the model", "worse than a uniform guess", text_by_another_tokenizer
    ),
    "tokenizer of another size": Fault(
        "vocabulary", "embedding and head", "the tokenizer has 257", tokenizer_of_another_size
    ),
    "scores far too large": Fault("score size", "blocks.1.attention, head", "scores reach", damaged(sharpen, True)),
    "a dead head": Fault(
        "entropy", "blocks.0.attention, head 1", "the same for all keys", damaged(silence_a_head, True)
    ),
    "a branch that explodes": Fault(
        "residual stream", "blocks.1.feed_forward", "times as much", damaged(blow_up_a_branch, True)
    ),
    "branches that drown the embedding": Fault(
        "residual stream", "blocks.1", "its size by depth is", damaged(shout, qk_norm=True, embedding_norm=True)
    ),
    "dead units": Fault("activations", "blocks.1.feed_forward", "94 % of its hidden units", damaged(kill_units, True)),
    "a head that begins too large": Fault("first loss", "head", "above ln(", damaged(large_head)),
    "a branch without gradient": Fault(
        "gradients",
        "blocks.0.attention_norm.weight and",
        "no gradient reaches it",
        returned(ATTENTION, "forward", Tensor.detach),
    ),
    "the kernel rounds in float32": Fault(
        "fused kernel", "blocks.0.attention", "differ (plain causal)", fused(rounded)
    ),
    "a kernel turns too far": Fault(
        "functions", "rotate of the model's table", "differ from those of the reference", off_in_float32("rotate")
    ),
    "nothing to learn from": Fault("one batch", "the model", "does not overfit one batch", nothing_to_learn_from),
}
