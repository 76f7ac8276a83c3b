import math

import pytest
import torch

from model import GPT

ARCHITECTURES = [
    {},
    {"qk_norm": True, "tied": True},
    {"positions": "none"},
    {"pairing": "interleaved", "n_kv_heads": None},
]
architectures = pytest.mark.parametrize("arguments", ARCHITECTURES, ids=str)


@architectures
def test_the_future_is_never_seen(small, arguments):
    """Neither in values nor in gradients."""
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
    for t in range(10):
        (gradient,) = torch.autograd.grad(logits[:, t].square().sum(), seen[0], retain_graph=True)
        reached = gradient.abs().sum(-1)[0] > 0
        assert reached.tolist() == [True] * (t + 1) + [False] * (9 - t)


@architectures
def test_one_forward_is_as_many_forwards_as_tokens(small, arguments):
    model = small(**arguments)
    tokens = torch.randint(17, (2, 10))
    alone = [model(tokens[:, : t + 1])[:, -1] for t in range(10)]
    torch.testing.assert_close(torch.stack(alone, dim=1), model(tokens), rtol=0, atol=1e-10)


@architectures
@pytest.mark.parametrize("backend", ["fused", "written"])
@pytest.mark.parametrize("cuts", [[10], [4, 6], [1, 9], [3, 1, 2, 4], [1] * 10], ids=str)
def test_the_cache_changes_nothing(small, arguments, backend, cuts):
    model = small(**arguments)
    model.use_attention(backend)
    tokens = torch.randint(17, (2, 10))
    cache = model.new_cache(capacity=12)
    pieces = [model(piece, cache=cache) for piece in tokens.split(cuts, dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), model(tokens), rtol=0, atol=1e-10)
    assert cache.length == 10


def test_positions_may_be_shifted_together(small):
    model, tokens = small(), torch.randint(17, (2, 10))
    shifted = model(tokens, torch.arange(7, 17).expand(2, 10))
    torch.testing.assert_close(shifted, model(tokens), rtol=1e-5, atol=1e-5)


def test_padding_is_not_read(small):
    """A row padded on the left gives the logits it gives alone."""
    model, tokens = small(), torch.randint(17, (1, 6))
    padded = torch.cat([torch.randint(17, (1, 4)), tokens], dim=1)
    padding = torch.tensor([[False] * 4 + [True] * 6])
    positions = torch.tensor([[0] * 4 + list(range(6))])
    torch.testing.assert_close(model(padded, positions, padding=padding)[:, 4:], model(tokens), rtol=0, atol=1e-10)


def test_packed_documents_are_the_documents_alone(small):
    model, first, second = small(), torch.randint(17, (1, 4)), torch.randint(17, (1, 6))
    packed = model(
        torch.cat([first, second], dim=1),
        torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5]]),
        documents=torch.tensor([[0] * 4 + [1] * 6]),
    )
    torch.testing.assert_close(packed, torch.cat([model(first), model(second)], dim=1), rtol=0, atol=1e-10)


def test_with_targets_it_gives_the_summed_loss_and_its_count(small):
    model, tokens, targets = small(), torch.randint(17, (2, 10)), torch.randint(17, (2, 10))
    targets[0, :3] = -100
    loss, count = model(tokens, targets=targets)
    mean = torch.nn.functional.cross_entropy(model(tokens).float().transpose(1, 2), targets)
    assert count == 17
    torch.testing.assert_close(loss / count, mean)


def test_a_new_model_expects_every_token_alike():
    model = GPT(1000, d_model=64, n_layers=4, n_heads=4, d_ff=128, max_seq_len=32)
    loss, count = model(torch.randint(1000, (4, 32)), targets=torch.randint(1000, (4, 32)))
    assert abs(loss / count - math.log(1000)) < 0.2


def test_what_writes_into_the_residual_stream_starts_smaller():
    model = GPT(17, d_model=64, n_layers=8, n_heads=4, d_ff=128, max_seq_len=32)
    for block in model.blocks:
        for small, large in (
            (block.attention.wo, block.attention.wq),
            (block.feed_forward.down, block.feed_forward.up),
        ):
            ratio = (large.weight.std() / small.weight.std()).item()
            assert ratio == pytest.approx(4.0, rel=0.1)  # sqrt(2 * 8)


def test_a_tied_head_is_the_embedding(small):
    tied, untied = small(tied=True), small()
    assert tied.head.weight is tied.embedding.weight
    assert untied.n_parameters() - tied.n_parameters() == 17 * 16


def test_the_arguments_build_the_same_model(small):
    model = small(tied=True, qk_norm=True)
    again = GPT(**model.arguments).double()
    again.load_state_dict(model.state_dict())
    tokens = torch.randint(17, (1, 5))
    assert torch.equal(again(tokens), model(tokens))


def test_unknown_words_are_refused(small):
    with pytest.raises(ValueError, match="rope or none, got ropes"):
        small(positions="ropes")
    with pytest.raises(ValueError, match="fused or written, got fussed"):
        small().use_attention("fussed")


def test_more_tokens_than_positions_or_capacity_are_refused_with_the_numbers(small):
    model = small()
    with pytest.raises(ValueError, match="33 tokens.*max_seq_len 32"):
        model(torch.randint(17, (1, 33)))
    with pytest.raises(ValueError, match="9 tokens.*capacity 8"):
        model(torch.randint(17, (1, 9)), cache=model.new_cache(capacity=8))
