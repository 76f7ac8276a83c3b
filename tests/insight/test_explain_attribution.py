"""What tokens contribute: captum's methods on our models, against what can be computed without it."""

import sys

import pytest
import torch

from insight.attribution import (
    embed,
    gradient_x_input,
    integrated_gradients,
    mean_embedding,
    occlusion,
    of_embeddings,
)
from insight.induction import induction_model
from insight.patching import last_logits, score_of

KINDS = [
    {"embedding_norm": True, "zero_init": True, "qk_norm": True},  # as the default model is
    {},
    {"positions": "learned", "norm": "layernorm", "embedding_norm": True},
    {"positions": "sinusoidal"},
    {"positions": "alibi"},
]


@pytest.fixture(params=KINDS, ids=str)
def model(small, request):
    return small(**request.param)


def test_the_model_is_the_same_as_a_function_of_its_embeddings(model):
    tokens, score = torch.randint(17, (3, 7)), score_of(4)
    torch.testing.assert_close(of_embeddings(model, score)(embed(model, tokens)), score(last_logits(model, tokens)))


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 3, 64])
def test_occlusion_puts_something_else_in_the_place_of_each_token(model, batch):
    """Here it is another token, so that the same can be said in tokens."""
    tokens, score, other = torch.randint(17, (1, 7)), score_of(4, 2), 9
    effects = occlusion(model, tokens, score, embed(model, torch.tensor(other)), batch)
    for i in range(7):
        replaced = tokens.clone()
        replaced[0, i] = other
        expected = score(last_logits(model, tokens)) - score(last_logits(model, replaced))
        torch.testing.assert_close(effects[i].double(), expected[0].detach(), rtol=1e-5, atol=1e-6)  # captum: float32


def test_gradient_x_input_is_how_fast_the_score_grows_with_each_embedding(model):
    tokens, score, step = torch.randint(17, (1, 7)), score_of(4), 1e-5
    effects, forward = gradient_x_input(model, tokens, score), of_embeddings(model, score)
    for i in range(7):
        longer, shorter = embed(model, tokens), embed(model, tokens)
        longer[0, i] *= 1 + step
        shorter[0, i] *= 1 - step
        slope = (forward(longer) - forward(shorter)) / (2 * step)
        torch.testing.assert_close(effects[i], slope[0].detach(), rtol=1e-5, atol=1e-7)
    assert effects.abs().max() > 1e-4  # a norm between the two would leave none


def test_integrated_gradients_add_up_to_what_the_score_gains(model):
    tokens, score = torch.randint(17, (1, 7)), score_of(4)
    baseline = embed(model, torch.randint(17, (1, 7)))  # a corrupted prompt
    found = integrated_gradients(model, tokens, score, baseline, tolerance=1e-4)
    gain = score(last_logits(model, tokens)) - of_embeddings(model, score)(baseline)
    assert found.complete
    assert found.difference == pytest.approx(gain.item())
    assert found.attributions.sum().item() == pytest.approx(gain.item(), abs=1e-4 * abs(gain.item()))
    assert found.attributions.sum().item() - gain.item() == pytest.approx(found.error)


def test_a_sum_of_too_few_steps_is_found_out_and_more_are_taken(small):
    model, tokens, score = small(), torch.randint(17, (1, 7)), score_of(4)
    baseline = mean_embedding(model)
    few = integrated_gradients(model, tokens, score, baseline, max_steps=1)
    assert not few.complete
    assert few.steps == 1
    more = integrated_gradients(model, tokens, score, baseline, steps=1, max_steps=1024)
    assert more.complete
    assert more.steps > 1
    assert abs(more.error) < abs(few.error)


def test_from_zero_rmsnorm_lets_no_number_of_steps_do(small):
    """It turns from nothing to its full length within sqrt(norm_eps) of zero, between the steps."""
    model, tokens, score = small(), torch.randint(17, (1, 7)), score_of(4)
    assert not integrated_gradients(model, tokens, score, torch.zeros(16).double(), max_steps=256).complete
    assert integrated_gradients(model, tokens, score, mean_embedding(model), max_steps=256).complete


def test_a_token_that_stays_the_same_has_no_share(small):
    model, (tokens, other) = small(), torch.randint(17, (2, 1, 7))
    other[0, 2] = tokens[0, 2]
    shares = integrated_gradients(model, tokens, score_of(4), embed(model, other)).attributions
    assert shares[2] == 0
    assert shares[0] != 0


def test_the_mean_embedding_is_that_of_the_tokenizers_tokens(small):
    model = small(vocab_multiple=8)
    torch.testing.assert_close(mean_embedding(model), model.embedding(torch.arange(17)).mean(0).detach())


def test_the_token_that_is_copied_matters_most_and_the_gradient_does_not_see_it():
    """Attention that is all but sure of itself is flat: small changes change nothing, only large ones do."""
    model, tokens, score = induction_model(8, 12), torch.tensor([[0, 3, 1, 2, 4, 1]]), score_of(2)
    baseline = mean_embedding(model)
    removed = occlusion(model, tokens, score, baseline)
    integrated = integrated_gradients(model, tokens, score, baseline)
    assert removed.argmax() == integrated.attributions.argmax() == 3
    assert removed[3] > 2
    assert integrated.complete
    assert gradient_x_input(model, tokens, score).abs().max() < 0.01


def test_without_captum_one_line_says_what_to_install(small, monkeypatch):
    monkeypatch.setitem(sys.modules, "captum", None)
    with pytest.raises(ValueError, match=r"^attribution needs captum: pip install -c requirements.lock captum$"):
        gradient_x_input(small(), torch.randint(17, (1, 7)), score_of(4))
