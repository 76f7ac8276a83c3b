"""What insight finds out about models: a trained one's stand-in with random weights, and one of which all is known."""

import pytest
import torch

from insight.induction import INDUCTION, PREVIOUS, SINK, WATCHER, induction_model
from insight.lens import logit_lens
from insight.maps import attention_maps
from insight.patching import (
    ablate,
    branches,
    everything,
    heads,
    last_logits,
    patch,
    patch_each_position,
    rank_correlation,
    record,
    recovered,
    score_of,
    swaps,
)
from model.hooks import Site

KINDS = [
    {},
    {"positions": "learned", "norm": "layernorm", "feed_forward": "gelu"},
    {"positions": "sinusoidal", "tied": True},
    {"positions": "alibi", "window": 3, "qk_norm": True},
    {"positions": "none", "soft_cap": 5.0, "vocab_multiple": 8},
    {"embedding_norm": True, "zero_init": True, "qk_norm": True},
    {"positions": "learned", "embedding_norm": True},
]
WORD = "^cabda"  # b comes after a
B = 2


def ids(word: str) -> torch.Tensor:
    return torch.tensor([["^abcdefg".index(letter) for letter in word]])


@pytest.fixture
def known():
    return induction_model(8, max_seq_len=12)


def chance(logits: torch.Tensor, token: int) -> float:
    return logits.softmax(-1)[0, token].item()


# --- the model that was written -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("word", "answer"), [("^cabda", "b"), ("^gfedcbag", "f"), ("^abcdefgb", "c")])
def test_the_induction_model_says_what_followed_before(known, word, answer):
    assert chance(last_logits(known, ids(word)), "^abcdefg".index(answer)) > 0.99


def test_it_is_sure_of_nothing_where_nothing_was_before(known):
    assert last_logits(known, ids("^cabd")).softmax(-1).max() < 0.5


def test_its_heads_look_where_they_are_said_to_look(known):
    weights = attention_maps(known, ids(WORD))
    for head, query, key in ((PREVIOUS, 3, 2), (SINK, 5, 0), (INDUCTION, 5, 3), (WATCHER, 5, 3)):
        assert weights[head][query, key] > 0.999


def test_only_ablating_the_right_head_destroys_the_answer(known):
    whole = last_logits(known, ids(WORD))
    without = {head: ablate(known, ids(WORD), [Site("head", *head)]) for head in (PREVIOUS, SINK, INDUCTION, WATCHER)}
    assert chance(whole, B) > 0.99
    assert chance(without[INDUCTION], B) == pytest.approx(1 / 8)  # nothing is said any more
    assert chance(without[PREVIOUS], B) < 1 / 8 + 1e-6  # it looks anywhere
    for head in (SINK, WATCHER):
        assert attention_maps(known, ids(WORD))[head][5].max() > 0.999
        torch.testing.assert_close(without[head], whole, rtol=0, atol=1e-5)


def test_patching_the_right_head_restores_the_answer(known):
    """What is corrupted is the first a: only 0.0 sees it, and 1.0 what 0.0 noted; or the b, which 1.0 alone moves."""
    expected = {"^cebda": {PREVIOUS: 1, INDUCTION: 1, SINK: 0, WATCHER: 0}}
    expected["^cadda"] = {PREVIOUS: 0, INDUCTION: 1, SINK: 0, WATCHER: 0}
    score, clean = score_of(B), record(known, ids(WORD), heads(known))
    for word, shares in expected.items():
        before = score(last_logits(known, ids(word))).item()
        for head, share in shares.items():
            logits = patch(known, ids(word), {Site("head", *head): clean[Site("head", *head)]})
            found = recovered(score(logits), score(last_logits(known, ids(WORD))).item(), before)
            assert found.item() == pytest.approx(share, abs=1e-3), (word, head)


def test_patching_the_stream_follows_the_answer_from_token_to_token(known):
    """The first a is told to the token after it in block 0, and that one to the last in block 1."""
    word, score = ids("^cebda"), score_of(B)
    clean = record(known, ids(WORD), [Site("stream", i) for i in range(3)])
    ends = score(last_logits(known, ids(WORD))).item(), score(last_logits(known, word)).item()
    for layer, place in enumerate((2, 3, 5)):
        site = Site("stream", layer)
        found = recovered(score(patch_each_position(known, word, {site: clean[site]}, batch=4)), *ends)
        assert found.argmax() == place
        assert found[place].item() == pytest.approx(1, abs=1e-3)
        assert found[[i for i in range(6) if i != place]].max() < 0.01


def test_the_lens_finds_the_answer_after_the_last_block_only(known):
    chances = logit_lens(known, ids(WORD)).softmax(-1)[:, -1, B]
    assert chances.tolist() == pytest.approx([1 / 8, 1 / 8, chance(last_logits(known, ids(WORD)), B)], abs=1e-6)


def test_a_model_whose_prompts_are_longer_than_its_alphabet_works_too():
    model = induction_model(5, max_seq_len=40)
    tokens = torch.tensor([[0, *[1, 2] * 15, 3, 4, 1, 3]])
    assert chance(last_logits(model, tokens), 4) > 0.99


# --- any model ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_patching_everything_recovers_all_and_nothing_none(small, kind):
    model, (clean, corrupted) = small(**kind), torch.randint(17, (2, 1, 7))
    score, source = score_of(3, 5), record(model, clean, everything(model))
    ends = score(last_logits(model, clean)).item(), score(last_logits(model, corrupted)).item()
    assert abs(ends[0] - ends[1]) > 1e-3
    assert recovered(score(patch(model, corrupted, source)), *ends).item() == pytest.approx(1, abs=1e-9)
    assert recovered(score(patch(model, corrupted, {})), *ends).item() == 0
    del source[Site("embedding")]  # what is left computes on: only this lets the prompt itself back in
    assert abs(recovered(score(patch(model, corrupted, source)), *ends).item() - 1) > 1e-3


def test_a_branch_without_its_heads_is_a_branch_ablated(small):
    model, tokens = small(), torch.randint(17, (1, 7))
    alone = ablate(model, tokens, [Site("attention", 1)])
    torch.testing.assert_close(ablate(model, tokens, [Site("head", 1, h) for h in range(4)]), alone)
    assert not torch.allclose(ablate(model, tokens, [Site("head", 1, h) for h in range(3)]), alone)


def test_a_mean_says_the_same_at_every_position(small):
    model, tokens, site = small(), torch.randint(17, (1, 7)), Site("head", 0, 2)
    mean = record(model, tokens, [site])[site].mean(1, keepdim=True)
    torch.testing.assert_close(ablate(model, tokens, [site], "mean"), patch(model, tokens, {site: mean}))
    assert not torch.allclose(ablate(model, tokens, [site], "mean"), ablate(model, tokens, [site]))
    one = tokens[:, :1]  # which is its own mean
    torch.testing.assert_close(ablate(model, one, [site], "mean"), last_logits(model, one))


@pytest.mark.parametrize("batch", [1, 3, 64])
def test_patching_each_position_is_patching_one_after_the_other(small, batch):
    model, (clean, corrupted), site = small(), torch.randint(17, (2, 1, 7)), Site("stream", 1)
    source = record(model, clean, [site])
    found = patch_each_position(model, corrupted, source, batch)
    for i in range(7):
        where = torch.arange(7).unsqueeze(0) == i
        torch.testing.assert_close(found[i : i + 1], patch(model, corrupted, source, where))


def test_the_lens_ends_with_what_the_model_says_and_begins_with_its_embeddings(small):
    model, tokens = small(vocab_multiple=8), torch.randint(17, (1, 7))
    logits = logit_lens(model, tokens)
    assert logits.shape == (3, 7, 17)
    torch.testing.assert_close(logits[-1], model(tokens)[0])
    torch.testing.assert_close(logits[0], model.head(model.norm(model.embedding(tokens)))[0, :, :17])


def test_the_score_is_the_log_of_a_probability_or_of_two_that_are_compared():
    logits = torch.randn(2, 9)
    p = logits.softmax(-1)
    torch.testing.assert_close(score_of(3)(logits), p[:, 3].log())
    torch.testing.assert_close(score_of(3, 5)(logits), (p[:, 3] / p[:, 5]).log())


def test_swaps_change_one_token_each():
    where, prompts = swaps(ids("^cabda"), ids("^cebga"))
    assert where == [2, 4]
    assert prompts.tolist() == [*ids("^cebda").tolist(), *ids("^cabga").tolist()]
    with pytest.raises(ValueError, match="equal length, got 6 and 5"):
        swaps(ids("^cabda"), ids("^cabd"))


def test_ranks_correlate_as_they_should():
    assert rank_correlation([1, 2, 3], [10, 20, 1000]) == pytest.approx(1)
    assert rank_correlation([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    assert rank_correlation([1, 1, 2, 3], [1, 2, 3, 4]) == pytest.approx(0.9486832980505138)  # scipy's
    assert rank_correlation([1, 1], [1, 2]) is None


def test_the_attention_maps_are_of_all_layers(small):
    weights = attention_maps(small(n_layers=3), torch.randint(17, (1, 7)))
    assert weights.shape == (3, 4, 7, 7)
    torch.testing.assert_close(weights.sum(-1), torch.ones(3, 4, 7).double())


def test_the_names_of_sites_tell_them_apart(known):
    names = [str(site) for site in [*everything(known), *branches(known)]]
    assert len(set(names)) == len({*everything(known), *branches(known)})
