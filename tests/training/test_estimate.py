"""Estimates, compared with measurements."""

import gc

import pytest
import torch
from commands import command
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from conf.entry import REPOSITORY
from model import GPT, ModelConfig
from model.feed_forward import FEED_FORWARDS
from model.gpt import checkpoint_activations
from model.norm import NORMS
from model.ops import BACKENDS, MATH
from model.positions import SCHEMES
from training import auto, estimate
from training.optimizer import OptimizerConfig, build_optimizer

DEFAULT = {"d_model": 128, "n_layers": 4, "n_heads": 4, "d_ff": 384, "qk_norm": True}
LARGER = {**DEFAULT, "d_model": 320, "d_ff": 864}
TINY = {**DEFAULT, "d_model": 32, "n_layers": 1, "n_heads": 2, "d_ff": 64}
STEP = {"rows": 8, "micro_batch": 8, "seq_len": 128, "precision": "fp32", "attention": "fused", "optimizer": "adamw"}
CASES = {
    "default": (2048, DEFAULT, {}),
    "one row at a time": (2048, DEFAULT, {"micro_batch": 1}),
    "bf16": (2048, DEFAULT, {"precision": "bf16", "rows": 4, "micro_batch": 2}),
    "math": (2048, DEFAULT, {"attention": "math"}),
    "wide, accumulated": (2048, LARGER, {"rows": 2, "micro_batch": 1}),
    "long": (2048, {**DEFAULT, "n_layers": 2}, {"rows": 1, "micro_batch": 1, "seq_len": 512, "attention": "math"}),
    "large vocabulary": (20_257, TINY, {"rows": 2, "micro_batch": 1}),
    "large vocabulary, tied": (20_257, {**TINY, "tied": True}, {"rows": 1, "micro_batch": 1}),
    "dropout": (2048, {**DEFAULT, "dropout": 0.1}, {}),
    "dropout, none within attention": (300, {**DEFAULT, "dropout": 0.1, "attention_dropout": 0.0}, {}),
    "muon": (2048, {**DEFAULT, "embedding_norm": True}, {"optimizer": "muon"}),
    "muon, few tokens": (65, LARGER, {"optimizer": "muon", "rows": 1, "micro_batch": 1, "seq_len": 32}),
    "dropout, bf16": (2048, {**TINY, "dropout": 0.1}, {"precision": "bf16"}),
    "another model": (
        300,
        {**DEFAULT, "positions": "alibi", "n_kv_heads": 2, "feed_forward": "gelu", "norm": "layernorm"},
        {},
    ),
    "checkpointed": (300, DEFAULT, {"activation_checkpointing": True}),
    "checkpointed, bf16": (300, TINY, {"activation_checkpointing": True, "precision": "bf16"}),
}

LRS = dict.fromkeys(("lr", "lr_embedding", "lr_head", "lr_norm"), 1e-3)


def two_steps(
    device, vocab_size, shape, *, rows, micro_batch, seq_len, precision, attention, optimizer, checkpointing=False
):
    model = GPT(vocab_size, ModelConfig(max_seq_len=seq_len, **shape)).to(device)
    model.use(BACKENDS[attention])
    if checkpointing:
        checkpoint_activations(model)
    settings = LRS | {"betas": [0.9, 0.99], "eps": 1e-8, "weight_decay": 0.1, "momentum": 0.9}
    optimizer = build_optimizer(model, OptimizerConfig(optimizer, **settings), precision)
    for _ in range(2):
        tokens, targets = torch.randint(vocab_size, (2, rows, seq_len)).to(device)
        for x, y in zip(tokens.split(micro_batch), targets.split(micro_batch), strict=True):
            with auto.autocast(torch.device(device), precision):
                loss, _ = model(x, targets=y)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def estimated(vocab_size, shape, step, gpu: bool) -> int:
    model = estimate.meta_model(vocab_size, ModelConfig(max_seq_len=step["seq_len"], **shape))
    return estimate.at_peak(estimate.memory(model, documents=False, gpu=gpu, **step))[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_estimated_memory_is_the_profilers_within_a_tenth(name):
    vocab_size, shape, changes = CASES[name]
    step = {**STEP, **changes}
    run = dict(step)
    checkpointing = run.pop("activation_checkpointing", False)
    gc.collect()  # otherwise an earlier test's model might be freed while we measure
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        two_steps("cpu", vocab_size, shape, **run, checkpointing=checkpointing)
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    assert estimated(vocab_size, shape, step, gpu=False) == pytest.approx(peak, rel=0.1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", CASES)
def test_estimated_memory_is_the_allocators_on_a_gpu(name):
    """Wider and with more rows, so that the workspace of CUDA's libraries is negligible."""
    vocab_size, shape, changes = CASES[name]
    shape = {**shape, "d_model": 4 * shape["d_model"], "d_ff": 4 * shape["d_ff"]}
    step = {**STEP, **changes}
    step |= {"rows": 8 * step["rows"], "micro_batch": 8 * step["micro_batch"]}
    run = dict(step)
    checkpointing = run.pop("activation_checkpointing", False)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    two_steps("cuda", vocab_size, shape, **run, checkpointing=checkpointing)
    peak = torch.cuda.max_memory_allocated() - before
    assert estimated(vocab_size, shape, step, gpu=True) == pytest.approx(peak, rel=0.15)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("positions", ["rope", "learned"])
def test_parameters_are_exact(tied, positions):
    shape = {**TINY, "max_seq_len": 16, "tied": tied, "positions": positions, "vocab_multiple": 64}
    real, meta = GPT(300, ModelConfig(**shape)), estimate.meta_model(300, ModelConfig(**shape))
    assert all(p.is_meta for p in meta.parameters())
    assert sum(estimate.parameters(meta).values()) == real.n_parameters() == meta.n_parameters()


@pytest.mark.parametrize("changes", [{}, {"tied": True, "n_kv_heads": 1}, {"positions": "learned", "d_ff": 20}])
def test_flops_are_those_that_torch_counts(changes):
    model = GPT(300, ModelConfig(max_seq_len=16, **{**TINY, **changes}))
    model.use(MATH)  # the counter does not count the CPU's fused attention
    tokens = torch.randint(300, (2, 16))
    with FlopCounterMode(display=False) as counter:
        model(tokens, targets=tokens)[0].backward()
    assert counter.get_total_flops() == estimate.flops_per_token(model, 16) * tokens.numel()


def test_fsdp_divides_weights_and_optimizer_and_ddp_adds_buckets():
    model = estimate.meta_model(2048, ModelConfig(max_seq_len=128, **DEFAULT))
    step = {**STEP, "documents": False, "gpu": True}
    one, ddp = estimate.memory(model, **step), estimate.memory(model, **step, world=8)
    fsdp = estimate.memory(model, **step, world=8, parallel="fsdp")
    for moment in one:
        assert ddp[moment] == {**one[moment], "gradients": 4 * model.n_parameters()}
        for name in ("weights", "optimizer"):
            assert fsdp[moment][name] == one[moment][name] // 8
        assert fsdp[moment]["activations"] == one[moment]["activations"]
    assert estimate.memory(model, **step, world=1, parallel="fsdp") == one


def test_the_report_answers_will_it_fit_how_long_how_much(settings):
    """A million tokens at 40 % of 100 TFLOP/s, for 36 dollars an hour."""
    cfg = settings("device_spec.flops_bf16=100e12", "device_spec.price_per_hour=36", "steps=1000", "batch_tokens=1024")
    report = estimate.report(cfg, 2048, "tokenizer.vocab_size")
    model = GPT(2048, cfg.model)
    seconds = estimate.flops_per_token(model, 128) * 1024 * 1000 / 40e12
    assert f"{model.n_parameters():,}" in report
    assert f"{seconds:.2f} s" in report
    assert f"{seconds / 100:.2f}  USD, at 36.00 an hour" in report
    assert "fits" in report and "TOO MUCH" not in report


def what_fits(settings, room: float, *overrides: str) -> dict[str, str] | None:
    """What the report proposes for a GPU with this many GiB free; None if the run fits as it is."""
    memory = f"device_spec.memory={room * estimate.GIB + estimate.RESERVED}"
    shape = ["model.d_model=512", "model.d_ff=1408", "model.n_layers=4", "optimizer=adamw"]
    cfg = settings("batch_tokens=8192", *shape, memory, *overrides)
    lines = estimate.report(cfg, 2048, "").splitlines()
    if any(line.split()[:1] == ["fits"] for line in lines):
        return None
    assert any("TOO MUCH" in line for line in lines)
    (line,) = (line for line in lines if "what fits" in line)
    return dict(word.split("=") for word in line.split()[2:] if "=" in word)


@pytest.mark.parametrize(
    ("room", "given", "changes"),
    [
        (2.0, ["micro_batch=64"], None),
        (1.0, ["micro_batch=64"], {"micro_batch"}),
        (0.26, [], {"micro_batch", "activation_checkpointing"}),
        (0.17, [], {"micro_batch", "parallel", "world"}),
        (0.001, [], set()),
    ],
)
def test_the_report_says_which_settings_would_fit(settings, room, given, changes):
    found = what_fits(settings, room, *given)
    assert (set(found) if found is not None else None) == changes
    if found:
        assert what_fits(settings, room, *(f"{name}={value}" for name, value in found.items())) is None


def test_the_largest_micro_batch_is_proposed(settings):
    found = int(what_fits(settings, 1.0, "micro_batch=64")["micro_batch"])
    assert what_fits(settings, 1.0, f"micro_batch={found}") is None
    assert what_fits(settings, 1.0, f"micro_batch={2 * found}") == {"micro_batch": str(found)}


def test_ranks_must_divide_the_batch(settings):
    with pytest.raises(ValueError, match=r"world must divide the 8 rows .* got 3: batch_tokens=1152 would do"):
        estimate.report(settings("world=3"), 2048, "")


@pytest.mark.slow
@pytest.mark.parametrize("several", [[], ["micro_batch=1,2", "-m"]])
def test_a_dry_run_reads_no_text_and_leaves_no_files(tmp_path, several):
    folder = tmp_path / "empty"
    folder.mkdir()
    words = ["dry_run=true", "experiment=fineweb_124m", "data=files", "data.paths=[nowhere.txt]", *several]
    result = command(str(REPOSITORY / "train.py"), *words, cwd=folder)
    assert result.returncode == 0, result.stderr
    assert "123,588,864" in result.stdout and "50,257 (gpt2)" in result.stdout
    assert not list(folder.glob("runs/*")) and not list(folder.glob("corpora"))


@given(
    st.fixed_dictionaries(
        {
            "d_model": st.integers(1, 4).map(lambda n: 12 * n),
            "n_layers": st.integers(1, 3),
            "n_heads": st.sampled_from((1, 2, 6)),
            "n_kv_heads": st.sampled_from((None, 1)),
            "d_ff": st.integers(1, 20),
            "max_seq_len": st.integers(1, 9),
            "positions": st.sampled_from(SCHEMES),
            "norm": st.sampled_from(sorted(NORMS)),
            "feed_forward": st.sampled_from(sorted(FEED_FORWARDS)),
            "qk_norm": st.booleans(),
            "tied": st.booleans(),
            "embedding_norm": st.booleans(),
            "vocab_multiple": st.integers(1, 8),
        }
    ),
    st.integers(1, 20),
)
@settings(deadline=None)
def test_the_size_of_a_model_is_known_before_it_is_built(arguments, vocab_size):
    model = GPT(vocab_size, ModelConfig(**arguments))
    n_parameters, n_bytes = estimate.size(model.vocab_size, model.config)
    assert n_parameters == model.n_parameters()
    numbers = sum(t.nbytes for t in {t.data_ptr(): t for t in (*model.parameters(), *model.buffers())}.values())
    objects = estimate.OBJECTS * arguments["n_layers"]
    assert -4 * arguments["n_heads"] <= n_bytes - objects - numbers  # ALiBi's slopes
    assert n_bytes - objects - numbers <= 12 * arguments["max_seq_len"] * arguments["d_model"]  # a table being built


def test_what_does_not_fit_into_memory_is_refused_with_both_sizes():
    room = estimate.available_memory()
    assert 2**28 < room < 2**60
    estimate.check_fits("a model", room // 2)
    for n_bytes in (room + 2**36, 10**400):
        with pytest.raises(ValueError, match=r"^a model needs [\d,.]+ GiB of memory, this machine has [\d,.]+"):
            estimate.check_fits("a model", n_bytes)


@pytest.mark.slow
def test_the_lower_bound_of_a_steps_memory_is_below_its_estimate():
    for vocab_size, shape, changes in CASES.values():
        step = {**STEP, **changes}
        model = estimate.meta_model(vocab_size, ModelConfig(max_seq_len=step["seq_len"], **shape))
        weights = 4 * model.n_parameters()
        least = estimate.min_step_memory(model, step["rows"], step["micro_batch"], step["seq_len"])
        assert 0 < least < estimated(vocab_size, shape, step, gpu=False) - weights
