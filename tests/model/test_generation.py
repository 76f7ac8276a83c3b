import pytest
import torch

from model import generate
from model.generation import keep_top_k, keep_top_p, sample, uniform_numbers
from model.positions import SCHEMES


def write(model, prompt, n, **options) -> list[list[int]]:
    return torch.stack(list(generate(model, prompt, n, **options)), dim=1).tolist()


def slowly(model, prompt, n) -> list[int]:
    """Greedy, without a cache; past the context the last half is read again from position 0."""
    text, start = prompt[0].tolist(), 0
    for _ in range(n):
        if len(text) - start > model.max_seq_len:
            start = len(text) - model.max_seq_len // 2
        text.append(model(torch.tensor([text[start:]]))[0, -1].argmax().item())
    return text[prompt.shape[1] :]


@pytest.mark.parametrize("positions", SCHEMES)
@pytest.mark.parametrize(("length", "n"), [(1, 31), (5, 27), (5, 28), (5, 29), (5, 90), (31, 3), (32, 2), (40, 20)])
def test_greedy_with_the_cache_is_greedy_without(small, positions, length, n):
    model, prompt = small(positions=positions), torch.randint(17, (1, length))
    assert write(model, prompt, n, temperature=0, overflow="slide") == [slowly(model, prompt, n)]


def test_a_row_depends_on_its_own_prompt_and_seed_only(small):
    model, prompts = small(), torch.randint(17, (3, 4))
    together = write(model, prompts, 20, seeds=[5, 6, 7])
    for row, seed in enumerate([5, 6, 7]):
        assert write(model, prompts[row : row + 1], 20, seeds=[seed]) == [together[row]]
    assert write(model, prompts[[2, 0, 1]], 20, seeds=[7, 5, 6]) == [together[2], together[0], together[1]]
    assert write(model, prompts[:1], 20, seeds=[8]) != [together[0]]


def test_draws_follow_the_distribution():
    probabilities = torch.tensor([0.5, 0.25, 0.125, 0.125, 0.0])
    numbers = uniform_numbers([0])
    n = 20_000
    uniform = torch.cat([next(numbers) for _ in range(n)])
    drawn = sample(probabilities.log().expand(n, 5), uniform).bincount(minlength=5) / n
    assert drawn[4] == 0
    torch.testing.assert_close(drawn, probabilities, rtol=0, atol=0.015)  # four standard deviations


def test_temperature_sharpens_and_0_takes_the_most_likely():
    logits = torch.tensor([[1.0, 2.0, 0.0]]).expand(1000, 3)
    uniform = torch.rand(1000)
    hot, cold = (sample(logits, uniform, temperature=t) for t in (2.0, 0.5))
    assert (cold == 1).sum() > (hot == 1).sum()
    assert (sample(logits, uniform, temperature=0) == 1).all()


def test_the_extremes_of_the_uniform_number_are_tokens():
    logits = torch.tensor([[-torch.inf, 0.0, 0.0, -torch.inf]])
    assert sample(logits, torch.tensor([0.0])) == 1
    assert sample(logits, torch.tensor([1 - 2**-24])) == 2


def test_top_k_keeps_the_k_largest_and_takes_more_than_there_are():
    logits = torch.tensor([[3.0, 1.0, 2.0, 0.0]])
    assert torch.isfinite(keep_top_k(logits, 2)).tolist() == [[True, False, True, False]]
    assert torch.equal(keep_top_k(logits, 9), logits)


def test_top_p_keeps_the_smallest_set_that_reaches_p_and_never_nothing():
    logits = torch.tensor([[0.2, 0.5, 0.3]]).log()
    for p, kept in ((0.01, [1]), (0.49, [1]), (0.6, [1, 2]), (0.81, [0, 1, 2]), (1.0, [0, 1, 2])):
        assert torch.isfinite(keep_top_p(logits, p))[0].nonzero().flatten().tolist() == kept


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, "temperature.*-1"),
        ({"temperature": float("nan")}, "temperature.*nan"),
        ({"top_k": 0}, "top_k.*0"),
        ({"top_p": 0.0}, "top_p.*0"),
        ({"seeds": [1, 2]}, "2 seeds and 1 rows"),
        ({"overflow": "slid"}, "slid"),
        ({"max_new_tokens": 40}, "max_seq_len 32"),
    ],
)
def test_bad_options_are_refused_before_any_work(small, options, message):
    options = {"max_new_tokens": 4, **options}
    with pytest.raises(ValueError, match=message):
        generate(small(), torch.zeros(1, 3, dtype=torch.long), **options)


def test_an_empty_prompt_is_refused(small):
    with pytest.raises(ValueError, match="at least one token"):
        generate(small(), torch.zeros(1, 0, dtype=torch.long), 3)
