"""The doctor names each of many faults, seeded one at a time, and says nothing of healthy models."""

import copy
import inspect
import json
import math
import sys
import textwrap
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from data.tokenizer import ByteTokenizer, CharacterTokenizer
from insight.doctor import CHECKS, Patient, examine, run
from model import GPT, attention, functional
from model.attention import CausalMultiHeadAttention
from model.cache import KVCache, LayerCache
from model.gpt import Block
from model.positions import RotaryPositionalEmbedding, _Fixed
from scripts import doctor
from training import checkpoint

TEXT = "In the beginning there was a small model, and it read what it was given, one letter after the other. " * 4
CHARACTERS = CharacterTokenizer(TEXT)
RATES = dict.fromkeys(("lr", "lr_embedding", "lr_head", "lr_gain"), 3e-3)
ADAMW = {"name": "adamw", **RATES, "betas": [0.9, 0.99], "eps": 1e-8, "weight_decay": 0.1, "clip": 1.0}
MUON_RATES = {"lr": 0.02, "lr_embedding": 1e-2, "lr_head": 1e-2, "lr_gain": 3e-3}
MUON = ADAMW | {"name": "muon", "betas": [0.8, 0.95], "momentum": 0.9, "weight_decay": 0.0} | MUON_RATES


def new_model(vocab_size=CHARACTERS.vocab_size, seed=0, **arguments) -> GPT:
    torch.manual_seed(seed)
    shape = {"d_model": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "d_ff": 64, "max_seq_len": 24}
    return GPT(vocab_size, **{**shape, **arguments}).eval()


def patient_of(model: GPT, *, tokenizer=CHARACTERS, ids=None, optimizer=ADAMW, **known) -> Patient:
    ids = torch.from_numpy(CHARACTERS.encode(TEXT).astype("int64")) if ids is None else ids
    known = {"trained": False, "tokenizer": tokenizer, "text": TEXT} | known
    return Patient(model, *doctor.rows(ids, model.max_seq_len), start_training=doctor.training_by(optimizer), **known)


def trained(steps=40, **arguments) -> GPT:
    """A model that has learned a little of the text."""
    patient = patient_of(new_model(**arguments))
    step = patient.start_training(patient.model)
    for _ in range(steps):
        step(patient.tokens, patient.targets)
    return patient.model


def first_findings(patient: Patient) -> list:
    """Those of the first check that finds anything, the cause."""
    return next((result.findings for result in run(patient) if result.findings), [])


# --- healthy models -------------------------------------------------------------------------------------------------

AS_THE_DEFAULT = {"embedding_norm": True, "zero_init": True, "qk_norm": True, "n_kv_heads": None}
HEALTHY = [
    {},
    {"qk_norm": True, "n_kv_heads": None, "seed": 1},
    {"tied": True, "feed_forward": "gelu", "seed": 2},
    {"pairing": "interleaved", "window": 3},
    {"rope_scaling": "yarn", "rope_factor": 4.0},
    {"positions": "learned", "norm": "layernorm"},
    {"positions": "sinusoidal", "n_kv_heads": 1, "tied": True},
    {"positions": "alibi", "n_heads": 6, "n_kv_heads": 3, "d_model": 24},
    {"positions": "none", "feed_forward": "relu2", "vocab_multiple": 8},
    {"soft_cap": 2.0, "dropout": 0.2},
    {"n_layers": 1, "n_heads": 1, "n_kv_heads": None, "max_seq_len": 2},
    AS_THE_DEFAULT,
    {"positions": "learned", "embedding_norm": True, "zero_init": True, "tied": True},
]


@pytest.mark.parametrize("arguments", HEALTHY, ids=str)
def test_a_new_model_has_no_findings(arguments):
    assert examine(patient_of(new_model(**arguments))) == []


@pytest.mark.parametrize("arguments", [HEALTHY[1], HEALTHY[8]], ids=str)
def test_branches_and_a_head_that_begin_at_zero_are_no_finding(arguments):
    model = new_model(**arguments)
    for block in model.blocks:
        nn.init.zeros_(block.attention.wo.weight)
        nn.init.zeros_(block.feed_forward.down.weight)
    nn.init.zeros_(model.head.weight)
    assert examine(patient_of(model)) == []


@pytest.mark.parametrize(("steps", "arguments"), [(5, HEALTHY[0]), (40, HEALTHY[1]), (20, HEALTHY[3])], ids=str)
def test_a_trained_model_has_no_findings(steps, arguments):
    assert examine(patient_of(trained(steps, **arguments), trained=True)) == []


def test_an_examination_changes_neither_model_nor_random_numbers():
    patient = patient_of(new_model())
    weights, state = copy.deepcopy(patient.model.state_dict()), torch.get_rng_state()
    examine(patient)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in patient.model.state_dict().items())
    assert {block.attention.attend for block in patient.model.blocks} == {attention.fused_attention}
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in patient.model.modules())


# --- faults ---------------------------------------------------------------------------------------------------------


@dataclass
class Edit:
    """A line of the program, as somebody gets it wrong: `old` in the source of `owner.name` becomes `new`."""

    owner: object
    name: str
    old: str
    new: str

    def apply(self, monkeypatch):
        original = getattr(self.owner, self.name)
        source = textwrap.dedent(inspect.getsource(original))
        assert self.old in source, f"{self.name} has no {self.old!r} any more"
        source = source.replace(self.old, self.new)
        if inspect.isclass(self.owner):
            source = source.replace("super()", f"super({self.owner.__name__}, self)")
        scope: dict = {}
        exec(
            compile("from __future__ import annotations\n" + source, f"<{self.name}>", "exec"),
            original.__globals__,
            scope,
        )
        if inspect.isclass(self.owner):
            monkeypatch.setattr(self.owner, self.name, scope[self.name])
            return
        for module in [module for name, module in sys.modules.items() if name.split(".")[0] == "model"]:
            if getattr(module, self.name, None) is original:
                monkeypatch.setattr(module, self.name, scope[self.name])


def edited(owner, name, old, new, **arguments):
    """The fault of a line, in a model that is built with it."""

    def seed(monkeypatch) -> Patient:
        Edit(owner, name, old, new).apply(monkeypatch)
        return patient_of(new_model(**arguments))

    return seed


def damaged(damage, is_trained=False, **arguments):
    """The fault of some numbers, in a new model or in one that has learned."""

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


def table_to_bfloat16(model):
    for block in model.blocks:
        block.attention.rope.cos = block.attention.rope.cos.bfloat16().float()


def large_head(model):
    model.head.weight.mul_(20)


def table_follows_the_model(monkeypatch) -> Patient:
    monkeypatch.delattr(_Fixed, "_apply")
    return patient_of(new_model())


def rate(factor, names=tuple(RATES), optimizer=ADAMW, **arguments):
    return lambda monkeypatch: patient_of(
        new_model(**arguments), optimizer=optimizer | {name: factor * optimizer[name] for name in names}
    )


def another_optimizer(optimizer_of):
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
    ids = torch.from_numpy(CHARACTERS.encode(TEXT).astype("int64"))
    other = torch.randperm(CHARACTERS.vocab_size, generator=torch.Generator().manual_seed(0))
    return patient_of(trained(), trained=True, tokenizer=None, ids=other[ids])


def tokenizer_of_another_size(monkeypatch) -> Patient:
    return patient_of(new_model(), tokenizer=ByteTokenizer())


def nothing_to_learn_from(monkeypatch) -> Patient:
    """What follows has nothing to do with what was read, which is one letter all over."""
    patient = patient_of(new_model())
    patient.tokens = torch.zeros_like(patient.tokens)
    return patient


MASK = "scores.masked_fill(~_expand"
FAULTS = {
    # name: (the check, what its finding says of where and what, how it is seeded)
    "written: no 1/sqrt(d)": (
        "scores",
        "written_attention",
        "not divided by sqrt(d_head)",
        edited(functional, "scaled_dot_product_attention", " / math.sqrt(q.shape[-1])", ""),
    ),
    "fused: no 1/sqrt(d)": (
        "scores",
        "fused_attention (layer 0, 1)",
        "not divided by sqrt(d_head)",
        edited(attention, "fused_attention", "enable_gqa=grouped", "enable_gqa=grouped, scale=1.0"),
    ),
    "1/d": (
        "scores",
        "written_attention",
        "q k^T times 0.125",
        edited(functional, "scaled_dot_product_attention", "math.sqrt(q.shape[-1])", "q.shape[-1]"),
    ),
    "mask inverted": (
        "masked weights",
        "written_attention",
        "the mask is inverted",
        edited(functional, "scaled_dot_product_attention", MASK, "scores.masked_fill(_expand"),
    ),
    "softmax over queries": (
        "row sums",
        "written_attention",
        "the softmax runs over the queries",
        edited(functional, "scaled_dot_product_attention", "softmax(scores)", "softmax(scores, dim=-2)"),
    ),
    "written: -1e4": (
        "masked weights",
        "written_attention",
        "a finite number hides it",
        edited(functional, "scaled_dot_product_attention", "-math.inf)", "-1e4)"),
    ),
    "fused with a bias: -1e4": (
        "masked weights",
        "fused_attention",
        "a finite number hides it (plain causal with a bias)",
        edited(attention, "fused_attention", "-math.inf)", "-1e4)", positions="alibi"),
    ),
    "no causal mask": (
        "masked weights",
        "fused_attention (layer 0, 1)",
        "the mask is not applied",
        edited(attention, "fused_attention", "is_causal=mask is None", "is_causal=False"),
    ),
    "no mask in prefill": (
        "leak",
        "blocks.0, blocks.1",
        "the future is seen in a prompt read into a cache",
        edited(
            functional,
            "attention_mask",
            "mask = causal_mask(queries, T_k, device)",
            "mask = causal_mask(queries if isinstance(queries, int) else queries + T_k, T_k, device)",
        ),
    ),
    "positions in the cache off by one": (
        "token positions",
        "blocks.0.attention.rope",
        "off by +1 in a prompt read into a cache",
        edited(GPT, "hidden", "if slots is None else slots", "if slots is None else slots + 1"),
    ),
    "positions from one": (
        "token positions",
        "position_embedding",
        "off by +1 in one forward",
        edited(
            GPT,
            "hidden",
            "torch.arange(s, device=tokens.device)",
            "torch.arange(1, s + 1, device=tokens.device)",
            positions="learned",
        ),
    ),
    "the cache counts a prompt as one token": (
        "token positions",
        "alibi",
        "in a prompt read into a cache",
        edited(KVCache, "advance", "self.lengths + s", "self.lengths + 1", positions="alibi"),
    ),
    "queries a place further than keys": (
        "token positions",
        "blocks.0.attention.rope",
        "off by +1",
        edited(
            CausalMultiHeadAttention, "forward", "self.rope(q, token_positions)", "self.rope(q, token_positions + 1)"
        ),
    ),
    "RoPE looks up the next place": (
        "rotation",
        "blocks.0.attention",
        "one place further",
        edited(
            RotaryPositionalEmbedding,
            "angles",
            "_look_up(self.cos, token_positions), _look_up(self.sin, token_positions)",
            "_look_up(self.cos, token_positions + 1), _look_up(self.sin, token_positions + 1)",
        ),
    ),
    "RoPE pairs otherwise": (
        "rotation",
        "blocks.0.attention",
        "paired as interleaved, not half",
        edited(RotaryPositionalEmbedding, "forward", "self.pairing", '"interleaved"'),
    ),
    "keys are not turned": (
        "rotation",
        "blocks.1.attention",
        "keys are not turned at all",
        edited(CausalMultiHeadAttention, "forward", "self.rope(k, token_positions)", "k"),
    ),
    "heads transposed": (
        "head order",
        "blocks.0.attention",
        "the heads of wq are transposed",
        edited(CausalMultiHeadAttention, "forward", '"b s (h d) -> b h s d"', '"b s (d h) -> b h s d"'),
    ),
    "heads transposed before wo": (
        "head order",
        "blocks.1.attention",
        "transposed before wo",
        edited(CausalMultiHeadAttention, "forward", "b h s d -> b s (h d)", "b h s d -> b s (d h)"),
    ),
    "k not transposed": (
        "scores",
        "written_attention",
        "k is not transposed",
        edited(functional, "scaled_dot_product_attention", "... k d -> ... q k", "... d k -> ... q k"),
    ),
    "key heads in turn": (
        "scores",
        "written_attention",
        "take key heads in turn",
        edited(attention, "written_attention", "b (g r) k d", "b (r g) k d"),
    ),
    "one head three times as sharp": (
        "scores",
        "written_attention",
        "not q k^T / sqrt(d_head) in head 2",
        edited(
            functional,
            "scaled_dot_product_attention",
            "/ math.sqrt(q.shape[-1])",
            "/ math.sqrt(q.shape[-1]) * torch.tensor([1.0, 1.0, 3.0, 1.0]).view(4, 1, 1)",
        ),
    ),
    "the bias twice": (
        "scores",
        "written_attention",
        "the bias is added 2 times",
        edited(functional, "scaled_dot_product_attention", "scores + _expand", "scores + 2 * _expand"),
    ),
    "a soft cap of one": (
        "values",
        "written_attention (layer 0, 1)",
        "not bounded as cap * tanh",
        edited(functional, "scaled_dot_product_attention", "soft_cap * torch.tanh(", "torch.tanh(", soft_cap=2.0),
    ),
    "value heads backwards": (
        "values",
        "fused_attention (layer 0, 1)",
        "not the sum of values times weights",
        edited(attention, "fused_attention", "(q, k, v, mask", "(q, k, v.flip(1), mask"),
    ),
    "padding hides queries": (
        "padding",
        "the mask of padding",
        "not what it is alone",
        edited(functional, "padding_mask", "b k -> b 1 1 k", "b k -> b 1 k 1"),
    ),
    "rows of a mask taken for heads": (
        "row masks",
        "blocks.0.attention",
        "broadcasts over the wrong axis",
        edited(attention, "_fit_mask", "b q k -> b 1 q k", "b q k -> 1 b q k"),
    ),
    "documents see each other": (
        "documents",
        "the mask of documents",
        "a document beside another",
        edited(functional, "attention_mask", "mask & document_mask(documents, queries)", "mask"),
    ),
    "a window too wide": (
        "leak",
        "blocks.0, blocks.1",
        "in one forward",
        edited(functional, "window_mask", "< window", "<= window", window=3),
    ),
    "the cache keeps keys as values": (
        "cache",
        "blocks.0.attention",
        "token by token",
        edited(LayerCache, "append", "(self.cache.v, v)", "(self.cache.v, v if v.shape[2] > 1 else k)"),
    ),
    "the table in bfloat16": (
        "position tables",
        "blocks.0.attention.rope.cos and 3 more",
        "the table is torch.bfloat16",
        edited(RotaryPositionalEmbedding, "__init__", ".float()", ".bfloat16()"),
    ),
    "the table through bfloat16": (
        "position tables",
        "blocks.0.attention.rope.cos and 1 more",
        "off by up to",
        damaged(table_to_bfloat16),
    ),
    "the table follows the model to bfloat16": (
        "position tables",
        "blocks.0.attention.rope.cos",
        "becomes torch.bfloat16 when the model does",
        table_follows_the_model,
    ),
    "an all-masked row: the maximum": (
        "all-masked row",
        "written_attention",
        "numbers that are not finite",
        edited(functional, "softmax", "top.masked_fill(top == -math.inf, 0.0)", "top"),
    ),
    "an all-masked row: the sum": (
        "all-masked row",
        "written_attention",
        "numbers that are not finite",
        edited(functional, "softmax", "total.masked_fill(total == 0, 1.0)", "total"),
    ),
    "an all-masked row: a finite minimum": (
        "all-masked row",
        "written_attention",
        "a mean of what is hidden",
        edited(functional, "scaled_dot_product_attention", "-math.inf)", "torch.finfo(scores.dtype).min)"),
    ),
    "the wrong matrix scaled": (
        "initial scale",
        "blocks.0.attention.wv",
        "the other matrices that read the stream",
        edited(
            GPT,
            "initialise",
            "(block.attention.wo, block.feed_forward.down)",
            "(block.attention.wv, block.feed_forward.down)",
        ),
    ),
    "nothing scaled": (
        "initial scale",
        "blocks.1.feed_forward.down",
        "branches add up",
        edited(GPT, "initialise", "std / math.sqrt(2 * len(self.blocks))", "std"),
    ),
    "a NaN in one weight": (
        "finite weights",
        "blocks.1.feed_forward.up.weight",
        "first nan at [3, 5]",
        damaged(one_nan),
    ),
    "not tied": ("tied weights", "head.weight", "two matrices", damaged(untie, tied=True)),
    "rate 100 times too high": ("learning rate", "optimizer, blocks.", "times its size", rate(100)),
    "Muon's rate 100 times too high": (
        "learning rate",
        "optimizer, blocks.",
        "times its size",
        another_optimizer(muon(2.0)),
    ),
    "gains at a rate far too high": (
        "learning rate",
        "optimizer",
        "the loss rises",
        another_optimizer(adam_on_gains(10.0)),
    ),
    "rate 100 times too high, and branches that begin at zero": (
        "learning rate",
        "optimizer, blocks.",
        "times its size",
        rate(100, **AS_THE_DEFAULT),
    ),
    "the matrices' rate 100 times too high": (
        "learning rate",
        "optimizer, blocks.",
        "step 3 changes it by",
        rate(100, ["lr"], MUON, **AS_THE_DEFAULT),
    ),
    "the head's rate 100 times too high": (
        "learning rate",
        "optimizer",
        "the loss rises",
        rate(100, ["lr_head"], MUON, **AS_THE_DEFAULT),
    ),
    "rate a million times too low": ("learning rate", "optimizer", "nowhere", rate(1e-6)),
    "padded ids": (
        "padded ids",
        "head",
        "logits for",
        edited(GPT, "logits", "[..., : self.vocab_size]", "", vocab_multiple=32),
    ),
    "padded ids where the model writes": (
        "padded ids",
        "generate",
        "which the tokenizer does not have",
        edited(
            sys.modules["model.generation"],
            "next_logits",
            "model.read(tokens, cache=cache)[:, -1]",
            "torch.nn.functional.pad(model.read(tokens, cache=cache)[:, -1], (0, 7))",
            vocab_multiple=32,
        ),
    ),
    "tokenizer of another corpus": (
        "tokenizer",
        "tokenizer",
        "not the one that the model has learned with",
        tokenizer_of_another_corpus,
    ),
    "text by another tokenizer": ("first loss", "the model", "more than knowing nothing", text_by_another_tokenizer),
    "tokenizer of another size": (
        "vocabulary",
        "embedding and head",
        "the tokenizer has 257",
        tokenizer_of_another_size,
    ),
    "scores far too large": ("score size", "blocks.1.attention, head", "scores reach", damaged(sharpen, True)),
    "a dead head": ("entropy", "blocks.0.attention, head 1", "the same for all keys", damaged(silence_a_head, True)),
    "a branch that explodes": (
        "residual stream",
        "blocks.1.feed_forward",
        "times as much",
        damaged(blow_up_a_branch, True),
    ),
    "branches that drown the embedding": (
        "residual stream",
        "blocks.1",
        "its size by depth is",
        damaged(shout, qk_norm=True, embedding_norm=True),
    ),
    "dead units": ("activations", "blocks.1.feed_forward", "94 % of its hidden units", damaged(kill_units, True)),
    "a head that begins too large": ("first loss", "head", "above ln(", damaged(large_head)),
    "a branch without gradient": (
        "gradients",
        "blocks.0.attention_norm.gain and",
        "no gradient reaches it",
        edited(Block, "forward", "mask, cache, bias)", "mask, cache, bias).detach()"),
    ),
    "the kernel rounds in float32": (
        "fused kernel",
        "blocks.0.attention",
        "differ (plain causal)",
        edited(
            attention, "fused_attention", "return y,", "return y.bfloat16().float() if y.dtype == torch.float32 else y,"
        ),
    ),
    "nothing to learn from": ("one batch", "the model", "not learned by heart", nothing_to_learn_from),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_named_before_its_consequences(fault, monkeypatch):
    check, where, what, seed = FAULTS[fault]
    findings = first_findings(seed(monkeypatch))
    assert {finding.check for finding in findings} == {check}, findings
    assert any(where in finding.where and what in finding.what for finding in findings), findings
    assert all(finding.do for finding in findings)


def test_the_rates_of_muon_are_no_finding(monkeypatch):
    assert examine(another_optimizer(muon(0.02))(monkeypatch)) == []
    assert examine(patient_of(new_model(**AS_THE_DEFAULT), optimizer=MUON)) == []


def test_heads_that_have_saturated_are_named():
    """In a new model, all of them; among scores that are not too large."""
    model = new_model(n_layers=1)
    model.blocks[0].attention.wk.weight.data.mul_(3000)
    found = [finding for finding in examine(patient_of(model)) if finding.check == "saturation"]
    assert found and {finding.where for finding in found} <= {f"blocks.0.attention, head {h}" for h in range(4)}


def test_every_check_finds_a_fault_of_the_tests():
    assert {check for check, *_ in FAULTS.values()} | {"saturation"} == set(CHECKS)


def test_what_raises_an_error_is_a_finding_with_its_place(monkeypatch):
    Edit(Block, "forward", "x = x + self.dropout", "y = x + self.dropoutt").apply(monkeypatch)
    findings = first_findings(patient_of(new_model()))
    assert [(f.check, "dropoutt" in f.what, ", forward" in f.where) for f in findings] == [("head order", True, True)]


def test_of_weights_that_are_not_finite_nothing_more_is_said(monkeypatch):
    results = list(run(damaged(one_nan)(monkeypatch)))
    assert [r.check for r in results if r.findings] == ["finite weights"]
    assert {r.not_checked for r in results[1:]} == {"finite weights come first"}


# --- the script -----------------------------------------------------------------------------------------------------


def main(monkeypatch, *arguments) -> int:
    """The exit code of a command line."""
    monkeypatch.setattr(sys, "argv", ["doctor.py", *arguments])
    try:
        doctor.main()
    except SystemExit as end:
        return end.code
    return 0


def save(model, folder, tokenizer, **about):
    weights, arguments = checkpoint.snapshot(model)
    about = {"step": 40, "seq_len": 24, "precision": "fp32", "tokenizer_hash": CHARACTERS.fingerprint(), **about}
    checkpoint.save(folder, weights, tokenizer.save, arguments | about)


def test_the_settings_of_a_run_are_examined_and_a_healthy_one_ends_with_0(monkeypatch, capsys, tmp_path):
    assert main(monkeypatch, "experiment=smoke", "json=findings.json") == 0
    out = capsys.readouterr().out
    assert "model  new, " in out and f"no findings in {len(CHECKS) - 1} checks" in out
    for check in CHECKS:
        assert f"\n{check} " in out
    written = json.loads((tmp_path / "findings.json").read_text())
    assert written["findings"] == []
    assert [row["check"] for row in written["checks"]] == list(CHECKS)
    assert {path.name for path in tmp_path.iterdir()} <= {"findings.json", "corpora", ".home"}


def test_a_finding_ends_with_1_and_says_what_where_how_much_and_what_to_do(monkeypatch, capsys, tmp_path):
    arguments = [
        "experiment=smoke",
        "model.positions=alibi",
        "optimizer=adamw",
        "optimizer.lr=1.0",
        "json=findings.json",
    ]
    assert main(monkeypatch, *arguments) == 1
    out = capsys.readouterr().out
    (finding,) = json.loads((tmp_path / "findings.json").read_text())["findings"]
    assert finding["check"] == "learning rate" and finding["value"] > finding["bound"]
    for part in ("where", "what", "do"):
        assert finding[part] in out
    assert "1 finding in" in out


def test_a_checkpoint_is_examined_without_its_corpus(monkeypatch, capsys):
    save(trained(40), doctor.Path("healthy"), CHARACTERS)
    assert main(monkeypatch, "checkpoint=healthy") == 0
    out = capsys.readouterr().out
    assert "healthy, 40 steps" in out and "written by the model" in out
    assert "learning rate    not checked: the settings of its training are not known" in out


def test_a_checkpoint_with_the_tokenizer_of_another_corpus_is_found_out(monkeypatch, tmp_path):
    save(trained(5), doctor.Path("ill"), OtherText())
    assert main(monkeypatch, "checkpoint=ill", "json=findings.json") == 1
    findings = json.loads((tmp_path / "findings.json").read_text())["findings"]
    assert findings[0]["check"] == "tokenizer" and "tokenizer/" in findings[0]["do"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["checkpoint=nowhere"], "there is no checkpoint at nowhere"),
        (["checkpoint=x", "model=nano"], "a checkpoint has settings of its own: model=nano has no use"),
        (["model.n_heads=7"], "model.d_model must be a multiple of model.n_heads"),
        (["modle=nano"], "modle"),
        (["json=nowhere/a.json"], "nowhere/a.json cannot be written: give json=FILE"),
    ],
    ids=str,
)
def test_a_users_mistake_is_one_line_and_exit_code_2(arguments, message, monkeypatch, capsys):
    assert main(monkeypatch, *arguments) == 2
    assert message in capsys.readouterr().err
