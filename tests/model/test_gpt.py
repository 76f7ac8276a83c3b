import math
from dataclasses import replace

import pytest
import torch
from architectures import ARCHITECTURES

from model import GPT, ModelConfig, collect_attention, generate
from model.feed_forward import FEED_FORWARDS
from model.ops import BACKENDS, MATH, TORCH
from model.positions import SCALINGS, SCHEMES

architectures = pytest.mark.parametrize("arguments", ARCHITECTURES, ids=str)
schemes = pytest.mark.parametrize("positions", SCHEMES)


def unmask(model):
    """Lets every token attend to every other, including later ones."""

    def attend(q, k, v, mask, *rest):
        return MATH.attention(q, k, v, torch.ones(q.shape[2], k.shape[2], dtype=torch.bool), *rest)

    model.use(replace(TORCH, attention=attend))
    return model


# --- causality ------------------------------------------------------------------------------------------------------


@architectures
def test_future_tokens_never_change_earlier_logits(small, arguments):
    """Neither their values nor their gradients."""
    model = small(**arguments)
    tokens = torch.randint(17, (1, 10))
    logits = model(tokens)
    for t in range(9):
        other = tokens.clone()
        other[:, t + 1 :] = torch.randint(17, (1, 9 - t))
        assert torch.equal(model(other)[:, : t + 1], logits[:, : t + 1])

    seen = []
    hook = model.embedding.register_forward_hook(lambda module, args, x: seen.append(x))
    logits = model(tokens)
    hook.remove()
    reach = 10 if model.window is None else 2 * (model.window - 1)  # a window further back in each of 2 layers
    for t in range(10):
        (gradient,) = torch.autograd.grad(logits[:, t].square().sum(), seen[0], retain_graph=True)
        reached = gradient.abs().sum(-1)[0] > 0
        assert reached.tolist() == [t - reach <= i <= t for i in range(10)]


@architectures
def test_one_forward_equals_a_forward_for_each_token(small, arguments):
    model = small(**arguments)
    tokens = torch.randint(17, (2, 10))
    alone = [model(tokens[:, : t + 1])[:, -1] for t in range(10)]
    torch.testing.assert_close(torch.stack(alone, dim=1), model(tokens), rtol=0, atol=1e-10)


@architectures
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("cuts", [[10], [4, 6], [1, 9], [3, 1, 2, 4], [1] * 10], ids=str)
def test_the_cache_does_not_change_the_logits(small, arguments, backend, cuts):
    model = small(**arguments)
    model.use(BACKENDS[backend])
    tokens = torch.randint(17, (2, 10))
    cache = model.new_cache(capacity=12)
    pieces = [model(piece, cache=cache) for piece in tokens.split(cuts, dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), model(tokens), rtol=0, atol=1e-10)
    assert cache.length == 10


@pytest.mark.slow
def test_without_the_mask_a_model_learns_to_look_ahead():
    """Each token has two equally likely successors: log 2 nats is the lowest loss that a causal model can reach.

    The model without a mask copies the next token instead of predicting it, and generates badly where there is none.
    """

    def sequences(rows, n):
        x = [torch.randint(16, (rows,))]
        for _ in range(n - 1):
            x.append((3 * x[-1] + 1 + 5 * torch.randint(2, (rows,))) % 16)
        return torch.stack(x, dim=1)

    loss, allowed = {}, {}
    for masked in (True, False):
        torch.manual_seed(0)
        shape = {"d_model": 32, "n_layers": 2, "n_heads": 2, "d_ff": 64, "max_seq_len": 24}
        model = GPT(16, ModelConfig(**shape, positions="learned"))
        if not masked:
            unmask(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(150):
            x = sequences(32, 17)
            targets = x[:, 1:].clone()
            targets[:, -1] = -100  # even the model without a mask cannot read it
            total, count = model(x[:, :-1], targets=targets)
            (total / count).backward()
            optimizer.step()
            optimizer.zero_grad()
        loss[masked] = (total / count).item()
        text = torch.stack(list(generate(model.eval(), sequences(50, 1), 20)), dim=1)
        step = (text[:, 1:] - 3 * text[:, :-1] - 1) % 16
        allowed[masked] = ((step == 0) | (step == 5)).double().mean().item()
    assert loss[False] < 0.1 < math.log(2) - 0.05 < loss[True] < 0.8
    assert allowed[False] < 0.6 < 0.97 < allowed[True]


# --- positions ------------------------------------------------------------------------------------------------------


@schemes
def test_shifting_all_positions_changes_nothing_where_only_distances_count(small, positions):
    model, tokens = small(positions=positions), torch.randint(17, (2, 10))
    shifted = model(tokens, torch.arange(7, 17).expand(2, 10))
    same = torch.allclose(shifted, model(tokens), rtol=1e-5, atol=1e-5)
    assert same == (positions in ("rope", "alibi", "none"))


@schemes
def test_token_order_matters_only_with_positions(small, positions):
    """Without the causal mask, which reveals the order. With positions=none, logits are permuted as tokens are."""
    model, tokens, order = unmask(small(positions=positions)), torch.randint(17, (2, 10)), torch.randperm(10)
    same = torch.allclose(model(tokens[:, order]), model(tokens)[:, order], rtol=1e-9, atol=1e-9)
    assert same == (positions == "none")


@schemes
def test_given_positions_do_not_affect_the_mask(small, positions):
    model, tokens = small(positions=positions), torch.randint(17, (2, 10))
    assert torch.equal(model(tokens, torch.arange(10)), model(tokens))
    backwards = torch.arange(9, -1, -1)
    changed = tokens.clone()
    changed[:, 5:] = torch.randint(17, (2, 5))
    assert torch.equal(model(changed, backwards)[:, :5], model(tokens, backwards)[:, :5])


def test_the_two_pairings_are_the_same_model_after_permuting_rows(small):
    half, interleaved = small(), small(pairing="interleaved")
    weights = half.state_dict()
    for name in weights:
        if name.endswith(("wq.weight", "wk.weight")):  # rows i and i + 2 of a head of 4 become 2i and 2i + 1
            weights[name] = weights[name].unflatten(0, (-1, 2, 2)).transpose(1, 2).flatten(0, 2)
    interleaved.load_state_dict(weights)
    tokens = torch.randint(17, (2, 10))
    torch.testing.assert_close(interleaved(tokens), half(tokens))


def test_alibi_remembers_the_positions_of_cached_keys(small):
    """Positions have gaps, and differ between rows only from the second piece on."""
    model, tokens = small(positions="alibi"), torch.randint(17, (2, 6))
    positions = torch.tensor([[0, 1, 4, 5, 6, 9], [0, 1, 4, 7, 8, 9]])
    cache = model.new_cache()
    first = model(tokens[:, :3], positions[0, :3], cache=cache)
    second = model(tokens[:, 3:5], positions[:, 3:5], cache=cache)
    third = model(tokens[:, 5:], torch.tensor([9]), cache=cache)
    whole = model(tokens, positions)
    torch.testing.assert_close(torch.cat([first, second, third], dim=1), whole, rtol=0, atol=1e-10)
    assert not torch.allclose(whole, model(tokens))


# --- padding and packing --------------------------------------------------------------------------------------------


@schemes
def test_padding_is_neither_attended_to_nor_counted(small, positions):
    """A row padded on the left has the same logits, loss and gradients as the row alone."""
    model, tokens, targets = small(positions=positions), torch.randint(17, (1, 6)), torch.randint(17, (1, 6))
    padded = torch.cat([torch.randint(17, (1, 4)), tokens], dim=1)
    padding = torch.tensor([[False] * 4 + [True] * 6])
    places = torch.tensor([[0] * 4 + list(range(6))])
    torch.testing.assert_close(model(padded, places, padding=padding)[:, 4:], model(tokens), rtol=0, atol=1e-10)

    ignored = torch.cat([torch.full((1, 4), -100), targets], dim=1)
    results = []
    for arguments in (
        {"tokens": tokens, "targets": targets},
        {"tokens": padded, "token_positions": places, "targets": ignored, "padding": padding},
    ):
        model.zero_grad()
        loss, count = model(**arguments)
        loss.backward()
        results.append([loss, count, *(p.grad.clone() for p in model.parameters())])
    for alone, with_padding in zip(*results, strict=True):
        torch.testing.assert_close(with_padding, alone, rtol=1e-9, atol=1e-9)


@schemes
@pytest.mark.parametrize("cut", [10, 7, 2])
def test_packed_documents_equal_the_documents_alone(small, positions, cut):
    """In one forward, and in two through a cache."""
    model, first, second = small(positions=positions), torch.randint(17, (1, 4)), torch.randint(17, (1, 6))
    tokens = torch.cat([first, second], dim=1)
    places = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5]])
    documents = torch.tensor([[0] * 4 + [1] * 6])
    cache = model.new_cache() if cut < 10 else None
    pieces = [model(tokens[:, :cut], places[:, :cut], documents=documents[:, :cut], cache=cache)]
    if cut < 10:
        pieces.append(model(tokens[:, cut:], places[:, cut:], documents=documents, cache=cache))
    alone = torch.cat([model(first), model(second)], dim=1)
    torch.testing.assert_close(torch.cat(pieces, dim=1), alone, rtol=0, atol=1e-10)


def test_a_window_hides_tokens_further_back(small):
    model, tokens = small(window=3), torch.randint(17, (2, 10))
    with collect_attention(model) as maps:
        model(tokens)
    for weights in maps:
        for i in range(10):
            assert (weights[:, :, i] > 0).all(0).all(0).tolist() == [i - 3 < j <= i for j in range(10)]


# --- loss, weights, vocabulary --------------------------------------------------------------------------------------


def test_with_targets_it_gives_the_summed_loss_and_its_count(small):
    model, tokens, targets = small(), torch.randint(17, (2, 10)), torch.randint(17, (2, 10))
    targets[0, :3] = -100
    loss, count = model(tokens, targets=targets)
    mean = torch.nn.functional.cross_entropy(model(tokens).transpose(1, 2), targets)
    assert count == 17
    torch.testing.assert_close(loss / count, mean)


def test_a_new_model_predicts_nearly_uniform_probabilities():
    model = GPT(1000, ModelConfig(d_model=64, n_layers=4, n_heads=4, d_ff=128, max_seq_len=32))
    loss, count = model(torch.randint(1000, (4, 32)), targets=torch.randint(1000, (4, 32)))
    assert abs(loss / count - math.log(1000)) < 0.2


def test_weights_into_the_residual_stream_start_smaller():
    """By a factor 1 / sqrt(2 n_layers), so that the variance of the final stream does not depend on the depth."""

    def final_variance(n_layers: int, scaled: bool) -> float:
        torch.manual_seed(0)
        model = GPT(500, ModelConfig(d_model=64, n_layers=n_layers, n_heads=4, d_ff=192, max_seq_len=64))
        for block in model.blocks:
            for small, large in (
                (block.attention.wo, block.attention.wq),
                (block.feed_forward.down, block.feed_forward.up),
            ):
                ratio = (large.weight.var() / small.weight.var()).item()
                assert ratio == pytest.approx(2 * n_layers, rel=0.15)
                if not scaled:
                    small.weight.data *= (2 * n_layers) ** 0.5
        streams = []
        model.norm.register_forward_pre_hook(lambda module, arguments: streams.append(arguments[0].var().item()))
        model(torch.randint(500, (4, 64)))
        return streams[0]

    assert final_variance(24, scaled=True) < 1.5 * final_variance(6, scaled=True)
    assert final_variance(24, scaled=False) > 4 * final_variance(6, scaled=False)


@pytest.mark.parametrize("tied", [False, True])
def test_a_padded_vocabulary_is_invisible_from_outside(small, tied):
    model, exact = small(vocab_multiple=8, tied=tied), small(tied=tied)
    assert model.embedding.weight.shape == model.head.weight.shape == (24, 16)
    weights = model.state_dict()
    exact.load_state_dict(weights | {name: weights[name][:17] for name in ("embedding.weight", "head.weight")})
    tokens, targets = torch.randint(17, (2, 10)), torch.randint(17, (2, 10))
    for weight in {model.embedding.weight, model.head.weight}:
        weight.data[17:] = 100.0  # would dominate every sample and every loss
    torch.testing.assert_close(model(tokens), exact(tokens), rtol=0, atol=1e-12)
    loss, _ = model(tokens, targets=targets)
    torch.testing.assert_close(loss, exact(tokens, targets=targets)[0])
    loss.backward()
    assert (model.head.weight.grad[17:] == 0).all()
    assert (model.embedding.weight.grad[17:] == 0).all()
    for temperature in (0.0, 1.0, 100.0):
        drawn = list(generate(model, tokens, 20, temperature=temperature))
        assert torch.stack(drawn).max() < 17


@architectures
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_half_and_close_to_float32(small, arguments, dtype):
    model, tokens = small(**arguments).float(), torch.randint(17, (2, 10))
    exact = model(tokens)
    scale = exact.abs().max().item()
    with torch.autocast("cpu", dtype):
        torch.testing.assert_close(model(tokens).float(), exact, rtol=0, atol=0.1 * scale)
    half = model.to(dtype)
    cache = half.new_cache()
    pieces = [half(piece, cache=cache) for piece in tokens.split([4, 6], dim=1)]
    assert pieces[0].dtype == dtype
    torch.testing.assert_close(torch.cat(pieces, dim=1).float(), exact, rtol=0, atol=0.1 * scale)


def test_a_tied_head_is_the_embedding(small):
    tied, untied = small(tied=True), small()
    assert tied.head.weight is tied.embedding.weight
    assert untied.n_parameters() - tied.n_parameters() == 17 * 16


def test_a_model_can_be_rebuilt_from_its_arguments(small):
    model = small(tied=True, qk_norm=True)
    again = GPT(model.vocab_size, model.config).double()
    again.load_state_dict(model.state_dict())
    tokens = torch.randint(17, (1, 5))
    assert torch.equal(again(tokens), model(tokens))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"positions": "ropes"}, "positions.*rope, learned.*got ropes"),
        ({"positions": None}, "positions.*rope, learned.*got None"),
        ({"norm": "batchnorm"}, "norm.*rmsnorm, layernorm.*got batchnorm"),
        ({"feed_forward": "glu"}, "feed_forward.*swiglu, gelu, relu2.*got glu"),
        ({"window": 0}, "window.*at least 1, got 0"),
        ({"n_layers": 0}, "n_layers.*at least 1, got 0"),
        ({"vocab_multiple": 0}, "vocab_multiple.*at least 1, got 0"),
        ({"positions": "alibi", "rope_scaling": "yarn", "rope_factor": 2.0}, "positions=rope, got yarn, 2.0 and alibi"),
    ],
)
def test_impossible_models_are_refused(small, arguments, message):
    with pytest.raises(ValueError, match=message):
        small(**arguments)


@pytest.mark.parametrize(
    "arguments",
    [{"qk_norm": True}, {"soft_cap": 0.5}, {"window": 3}, {"theta": 5.0}, {"pairing": "interleaved"}, {"norm_eps": 1.0}]
    + [{"rope_scaling": scaling, "rope_factor": 4.0} for scaling in SCALINGS],
    ids=str,
)
def test_every_setting_changes_the_output(small, arguments):
    """With the same weights, a different setting gives different logits."""
    plain, other, tokens = small(), small(**arguments), torch.randint(17, (2, 10))
    other.load_state_dict(plain.state_dict(), strict=False)  # qk_norm adds weights
    assert not torch.allclose(other(tokens), plain(tokens), rtol=1e-4)


@pytest.mark.parametrize("place", ["embedding", "attention", "attention branch", "feed-forward branch"])
def test_dropout_acts_in_each_place_and_only_in_training(small, place):
    model, tokens = small(dropout=0.5), torch.randint(17, (2, 10))
    exact = model(tokens)
    modules = {  # by the place where each one acts
        "embedding": model.dropout,
        "attention": model.blocks[0].attention,
        "attention branch": model.blocks[0].dropout,
        "feed-forward branch": model.blocks[0].dropout,
    }
    assert torch.equal(model(tokens), exact)
    modules[place].training = True
    if place.endswith("branch"):  # the other branch is silent
        silent = model.blocks[0].feed_forward.down if place == "attention branch" else model.blocks[0].attention.wo
        torch.nn.init.zeros_(silent.weight)
    assert not torch.equal(model(tokens), model(tokens))


def test_attention_dropout_is_a_separate_setting(small):
    tokens = torch.randint(17, (2, 10))
    for arguments, random in (({"dropout": 0.5, "attention_dropout": 0.0}, False), ({"attention_dropout": 0.5}, True)):
        model = small(**arguments)
        model.blocks[0].attention.training = True
        assert torch.equal(model(tokens), model(tokens)) is not random
        assert GPT(model.vocab_size, model.config).blocks[0].attention.dropout == arguments["attention_dropout"]


@pytest.mark.parametrize(("name", "kind"), FEED_FORWARDS.items())
def test_feed_forwards_equal_their_formulas(name, kind):
    module, x = kind(6, 10).double(), torch.randn(2, 3, 6, dtype=torch.float64)
    up, down = module.up.weight.T, module.down.weight.T
    expected = {
        "swiglu": lambda: ((gate := x @ module.gate.weight.T) * gate.sigmoid() * (x @ up)) @ down,
        "gelu": lambda: ((h := x @ up) * (1 + torch.erf(h / 2**0.5)) / 2) @ down,
        "relu2": lambda: ((x @ up).clamp(min=0) ** 2) @ down,
    }[name]()
    torch.testing.assert_close(module(x), expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"token_positions": torch.arange(9)}, r"token_positions must be \(10,\) or \(2, 10\).*got \(9,\)"),
        ({"token_positions": torch.arange(23, 33)}, r"0 \.\. 31 .*got 23 \.\. 32"),
        ({"token_positions": torch.arange(-1, 9)}, r"0 \.\. 31 .*got -1 \.\. 8"),
        ({"padding": torch.ones(2, 9).bool()}, r"padding must be \(2, 10\).*got \(2, 9\)"),
        ({"padding": torch.ones(2, 10)}, "padding must be boolean.*float32"),
        ({"documents": torch.ones(1, 10)}, r"documents must be \(2, 10\).*got \(1, 10\)"),
    ],
)
@schemes
def test_arguments_that_do_not_fit_the_tokens_are_refused(small, positions, arguments, message):
    with pytest.raises(ValueError, match=message):
        small(positions=positions)(torch.randint(17, (2, 10)), **arguments)


def test_more_tokens_than_positions_or_capacity_are_refused_with_the_numbers(small):
    model = small()
    with pytest.raises(ValueError, match="33 tokens.*max_seq_len 32"):
        model(torch.randint(17, (1, 33)))
    with pytest.raises(ValueError, match="9 tokens.*capacity 8"):
        model(torch.randint(17, (1, 9)), cache=model.new_cache(capacity=8))
