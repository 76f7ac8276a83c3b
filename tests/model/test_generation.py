import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from model import ModelConfig, generate
from model.generation import (
    READ_EVERY,
    Sampling,
    encode,
    invert,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    next_logits,
    penalise_frequency,
    penalise_repetition,
    uniform_numbers,
)
from model.positions import SCHEMES

schemes = pytest.mark.parametrize("positions", SCHEMES)
inf = math.inf


def generated(model, prompts, n, **options) -> list[list[int]]:
    return torch.stack(list(generate(model, prompts, n, **options)), dim=1).tolist()


def restarts(model, length, n) -> list[int]:
    """Returns where the text that the model reads begins, for each of n tokens after a prompt of `length` tokens."""
    starts, start = [], 0
    for total in range(length, length + n):
        if total - start > model.max_seq_len:
            start = total - model.max_seq_len // 2
        starts.append(start)
    return starts


def without_cache(model, prompt, n) -> list[int]:
    """Greedy generation without a cache; beyond the context the last half is read again from position 0."""
    text = list(prompt)
    for start in restarts(model, len(prompt), n):
        text.append(model(torch.tensor([text[start:]]))[0, -1].argmax().item())
    return text[len(prompt) :]


def ragged(*lengths) -> list[list[int]]:
    return [torch.randint(17, (length,)).tolist() for length in lengths]


# --- the cache ------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(SCHEMES), st.sampled_from([1, 2, 4]), st.sampled_from([torch.float64, torch.float32]), st.data())
def test_any_chunking_gives_the_logits_of_one_forward(small_model, positions, n_kv_heads, dtype, data):
    model = small_model(positions, n_kv_heads).to(dtype)
    length = data.draw(st.integers(1, 20))
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, length - 1)))) | {length})
    pieces = [b - a for a, b in zip([0, *cuts], cuts, strict=False)]
    tokens = torch.randint(17, (2, length))
    cache, logits = model.new_cache(), []
    for piece in tokens.split(pieces, dim=1):
        before = cache.length
        logits.append(model(piece, cache=cache))
        assert cache.length == before + piece.shape[1]
        assert cache.lengths.tolist() == [cache.length]
    tolerance = 1e-10 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(torch.cat(logits, dim=1), model(tokens), rtol=tolerance, atol=tolerance)


@pytest.fixture(scope="module")
def small_model():
    """Builds each model once, as hypothesis runs a test many times."""
    from model import GPT

    made = {}

    def make(positions, n_kv_heads):
        if (positions, n_kv_heads) not in made:
            torch.manual_seed(0)
            shape = {"d_model": 16, "n_layers": 2, "n_heads": 4, "d_ff": 24, "max_seq_len": 32}
            made[positions, n_kv_heads] = (
                GPT(17, ModelConfig(**shape, positions=positions, n_kv_heads=n_kv_heads)).double().eval()
            )
        return made[positions, n_kv_heads]

    return make


def test_a_cache_grows_in_buckets_and_keeps_its_contents(small):
    for positions in ("rope", "alibi"):  # alibi's cache stores positions too
        model = small(positions=positions, max_seq_len=600)
        tokens, cache, sizes, logits = torch.randint(17, (2, 600)), model.new_cache(), [], []
        for piece in tokens.split([100, 28, 1, 127, 1, 256, 87], dim=1):
            logits.append(model(piece, cache=cache))
            sizes.append(cache.n_slots)
            assert {tensor.shape[2] for tensor in (*cache.k, *cache.v)} == {cache.n_slots}
        assert sizes == [128, 128, 256, 256, 512, 600, 600]
        torch.testing.assert_close(torch.cat(logits, dim=1), model(tokens), rtol=0, atol=1e-9)


@schemes
def test_rows_of_different_lengths_share_a_cache(small, positions):
    """Reads a different number of tokens in each row, then three more tokens in all rows at once."""
    model, rows = small(positions=positions), ragged(3, 9, 1)
    logits, cache = encode(model, [torch.tensor(row) for row in rows], 20)
    more = torch.randint(17, (3, 3))
    after = model(more, cache=cache)
    assert cache.lengths.tolist() == [6, 12, 4]
    for i, row in enumerate(rows):
        whole = model(torch.tensor([row + more[i].tolist()]))[0]
        torch.testing.assert_close(logits[i], whole[len(row) - 1], rtol=0, atol=1e-10)
        torch.testing.assert_close(after[i], whole[len(row) :], rtol=0, atol=1e-10)


def test_a_replaced_row_has_its_own_positions(small):
    """For a scheme that compares positions, here different from those of the slots."""
    model, tokens = small(positions="alibi"), torch.randint(17, (3, 8))
    cache, other = model.new_cache(), model.new_cache()
    model(tokens[:2, :6], cache=cache)
    positions = torch.tensor([0, 2, 3, 7])
    model(tokens[2:, :4], positions, cache=other)
    cache.replace([1], other)
    cache.set_lengths([6, 4])
    places = torch.tensor([[6, 7], [8, 9]])
    after = model(tokens[:2, 6:], places, cache=cache)
    torch.testing.assert_close(after[:1], model(tokens[:1])[:, 6:], rtol=0, atol=1e-10)
    whole = torch.cat([tokens[2:, :4], tokens[1:2, 6:]], dim=1)
    expected = model(whole, torch.cat([positions, places[1]]))[:, 4:]
    torch.testing.assert_close(after[1:], expected, rtol=0, atol=1e-10)


def test_a_long_prompt_is_read_in_chunks(small, monkeypatch):
    model, rows, read = small(), ragged(3, 20, 8, 9), []
    whole, _ = encode(model, [torch.tensor(row) for row in rows], 32)
    monkeypatch.setattr("model.generation.PROMPT_CHUNK", 8)
    model.register_forward_pre_hook(lambda module, arguments: read.append(arguments[0].shape[1]))
    chunked, cache = encode(model, [torch.tensor(row) for row in rows], 32)
    assert read == [8, 8, 4]
    assert cache.lengths.tolist() == [3, 20, 8, 9]
    torch.testing.assert_close(chunked, whole, rtol=0, atol=1e-10)


# --- rows -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@schemes
@pytest.mark.parametrize(
    ("overflow", "sampling", "dtype"),
    [
        ("error", {"temperature": 0}, torch.float32),
        ("slide", {"top_p": 0.9, "repetition_penalty": 1.3}, torch.float32),
        ("slide", {"temperature": 0}, torch.float64),
    ],
    ids=str,
)
def test_a_row_of_a_batch_equals_the_same_row_alone(small, positions, overflow, sampling, dtype):
    """For any lengths, order and number of the other rows; with overflow=slide each row slides at its own step."""
    model, rows = small(positions=positions).to(dtype), ragged(5, 1, 9, 14)
    n = 60 if overflow == "slide" else 19
    options = {"overflow": overflow, **sampling}
    alone = [generated(model, [row], n, seeds=[seed], **options)[0] for seed, row in enumerate(rows)]
    assert len(set(map(tuple, alone))) == 4
    assert generated(model, rows, n, seeds=[0, 1, 2, 3], **options) == alone
    for chosen in ([2, 0], [3, 2, 1, 0], [1, 1, 3]):
        assert generated(model, [rows[i] for i in chosen], n, seeds=chosen, **options) == [alone[i] for i in chosen]


def test_a_row_ends_at_its_stop_token_and_the_others_continue(small):
    model, rows = small(), ragged(5, 1, 9)
    free = generated(model, rows, 20)
    for stop in {token for row in free for token in row}:
        found = generated(model, rows, 20, stops={stop, 16})
        for row, ended in zip(free, found, strict=True):
            at = next((i for i, token in enumerate(row) if token in (stop, 16)), 20)
            assert ended[: at + 1] == row[: at + 1][: len(ended)]
            assert set(ended[at + 1 :]) <= {row[at]} if at < 20 else True


def test_generation_ends_soon_after_the_last_row(small):
    model, rows = small(max_seq_len=200), ragged(2, 3)
    assert len(generated(model, rows, 100, stops=range(17))[0]) == READ_EVERY
    assert len(generated(model, rows, 100)[0]) == 100
    assert len(generated(model, rows, 5, stops=range(17))[0]) == 5


# --- beyond the context ---------------------------------------------------------------------------------------------

LENGTHS = [(1, 31), (5, 27), (5, 28), (5, 29), (5, 90), (31, 2), (32, 1), (32, 2), (33, 5), (40, 20), (1, 64)]


@schemes
@pytest.mark.parametrize(("length", "n"), LENGTHS)
def test_greedy_generation_is_the_same_with_and_without_the_cache(small, positions, length, n):
    model, (prompt,) = small(positions=positions), ragged(length)
    assert generated(model, [prompt], n, temperature=0, overflow="slide") == [without_cache(model, prompt, n)]


@pytest.mark.slow
@schemes
@pytest.mark.parametrize(("length", "n"), [(3, 20), (5, 29), (5, 90), (32, 2), (40, 20)])
def test_log_probabilities_are_those_of_a_full_forward(small, positions, length, n):
    """If the text is longer than the context, a forward of the tokens since the last restart."""
    model, (prompt,) = small(positions=positions), ragged(length)
    options = {"overflow": "slide", "temperature": 0.7, "top_k": 5, "frequency_penalty": 0.5}
    pairs = list(generate(model, [prompt], n, log_probabilities=True, **options))
    tokens = [token.item() for token, _ in pairs]
    assert tokens == generated(model, [prompt], n, **options)[0]
    text = torch.tensor([prompt + tokens])
    if length > 32:  # at first only the last half of a context is read
        prompt = prompt[-16:]
        text = text[:, length - 16 :]
    for i, start in enumerate(restarts(model, len(prompt), n)):
        end = len(prompt) + i
        expected = model(text[:, start:end])[0, -1].float().log_softmax(-1)[tokens[i]]
        torch.testing.assert_close(pairs[i][1][0], expected)


def test_log_probabilities_end_with_their_row(small):
    model, rows = small(), ragged(4, 2)
    tokens, values = zip(*generate(model, rows, 25, stops={3, 4}, log_probabilities=True), strict=True)
    tokens, values = torch.stack(tokens, 1).tolist(), torch.stack(values, 1).tolist()
    ends = [next((i for i, token in enumerate(row) if token in (3, 4)), 25) for row in tokens]
    assert min(ends) < 24
    for end, row in zip(ends, values, strict=True):
        assert all(value < 0 for value in row[: end + 1])
        assert set(row[end + 1 :]) <= {0.0}


@schemes
@pytest.mark.parametrize(("length", "n"), [(5, 28), (5, 29), (5, 30), (5, 60), (33, 1), (40, 3)])
def test_an_extended_rope_accepts_longer_texts(small, positions, length, n):
    model, (prompt,) = small(positions=positions), ragged(length)
    needed = length + n - 1
    if positions != "rope" and needed > 32:
        with pytest.raises(ValueError, match=f"positions=rope.*{needed} tokens.*max_seq_len 32, got {positions}"):
            generate(model, [prompt], n, overflow="extend")
        return
    longer = model.extended(needed)
    assert longer.max_seq_len == (32 if needed <= 32 else 64)
    found = generated(model, [prompt], n, temperature=0, overflow="extend")
    assert found == [without_cache(longer, prompt, n)]
    assert model.max_seq_len == 32
    if needed <= 32:
        assert longer is model


def test_an_extended_model_can_be_rebuilt_from_its_arguments(small):
    from model import GPT

    model, tokens = small(rope_scaling="ntk", rope_factor=2.0), torch.randint(17, (1, 100))
    longer = model.extended(100)
    assert {name: getattr(longer.config, name) for name in ("max_seq_len", "rope_scaling", "rope_factor")} == {
        "max_seq_len": 128,
        "rope_scaling": "ntk",
        "rope_factor": 8.0,
    }
    again = GPT(longer.vocab_size, longer.config).double()
    again.load_state_dict(model.state_dict())
    assert torch.equal(longer(tokens), again(tokens))
    assert all(a is b for a, b in zip(model.parameters(), longer.parameters(), strict=True))
    assert small().extended(33).config.rope_scaling == "yarn"


@pytest.mark.parametrize("n", [28, 29, 60])
def test_too_long_a_text_is_refused_with_the_numbers_before_any_work(small, n):
    model, prompt = small(), [1, 2, 3, 4, 5]
    if n == 28:  # the last token drawn is not read
        assert len(generated(model, [prompt], n)[0]) == n
        return
    model.forward = None
    with pytest.raises(ValueError, match=f"5 prompt tokens and {n} new ones.*max_seq_len 32"):
        generate(model, [prompt, [1]], n)


# --- sampling -------------------------------------------------------------------------------------------------------


def chi_square(logits: torch.Tensor, sampling: Sampling, expected: torch.Tensor, counts=None, n=20_000) -> float:
    """Returns chi-square of n samples; more than 30 has a probability below 1e-4 for 7 tokens."""
    numbers = uniform_numbers(list(range(100)))
    uniform = torch.cat([next(numbers) for _ in range(n // 100)])
    counts = None if counts is None else counts.expand(n, -1)
    drawn = sampling.draw(logits.expand(n, -1), uniform, counts).bincount(minlength=len(expected))
    assert (drawn[expected == 0] == 0).all()
    possible = expected > 0
    return ((drawn[possible] - n * expected[possible]) ** 2 / (n * expected[possible])).sum().item()


LOGITS = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -inf])
COUNTS = torch.tensor([3, 0, 1, 0, 0, 2, 0])


def by_hand(temperature=1.0, top_k=None, top_p=None, min_p=None, repetition_penalty=1.0, frequency_penalty=0.0):
    """Returns the distribution, computed in plain Python in the order that Sampling documents."""
    x = LOGITS.tolist()
    x = [
        (v / repetition_penalty if v > 0 else v * repetition_penalty) if c else v
        for v, c in zip(x, COUNTS, strict=True)
    ]
    x = [math.exp((v - frequency_penalty * c.item()) / temperature) for v, c in zip(x, COUNTS, strict=True)]
    order = sorted(range(7), key=lambda i: -x[i])
    if top_k is not None:
        x = [v if i in order[:top_k] else 0.0 for i, v in enumerate(x)]
    if top_p is not None:
        kept, reached = set(), 0.0
        for i in order:
            if reached < top_p:
                kept.add(i)
            reached += x[i] / sum(x)
        x = [v if i in kept else 0.0 for i, v in enumerate(x)]
    if min_p is not None:
        x = [v if v >= min_p * max(x) else 0.0 for v in x]
    return torch.tensor(x) / sum(x)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 3.0},
        {"top_k": 3},
        {"top_p": 0.8},
        {"min_p": 0.3},
        {"repetition_penalty": 1.8},
        {"repetition_penalty": 0.5},
        {"frequency_penalty": 0.6},
        {"frequency_penalty": -0.3},
        {"temperature": 2.0, "top_k": 5, "top_p": 0.85},
        {"temperature": 0.7, "top_k": 4, "min_p": 0.2, "frequency_penalty": 0.4},
        {
            "temperature": 1.5,
            "top_k": 6,
            "top_p": 0.9,
            "min_p": 0.4,
            "repetition_penalty": 1.5,
            "frequency_penalty": 0.2,
        },
    ],
    ids=str,
)
def test_samples_follow_a_distribution_computed_by_hand(options):
    sampling, expected = Sampling(**options), by_hand(**options)
    torch.testing.assert_close(sampling.logits(LOGITS[None], COUNTS[None]).softmax(-1)[0], expected)
    assert chi_square(LOGITS, sampling, expected, COUNTS) < 30
    other = expected.roll(1)
    assert chi_square(LOGITS, sampling, torch.where(expected > 0, other.clamp(min=0.01), 0.0), COUNTS) > 30


def test_each_filter_equals_an_example_computed_by_hand():
    logits = torch.tensor([[3.0, 1.0, -2.0, 0.0]])
    counts = torch.tensor([[1, 0, 2, 0]])
    assert penalise_repetition(logits, counts, 2.0).tolist() == [[1.5, 1.0, -4.0, 0.0]]
    assert penalise_frequency(logits, counts, 0.5).tolist() == [[2.5, 1.0, -3.0, 0.0]]
    assert keep_top_k(logits, 2).tolist() == [[3.0, 1.0, -inf, -inf]]
    assert torch.equal(keep_top_k(logits, 9), logits)  # more than the vocabulary
    assert keep_min_p(logits, math.exp(-2.5)).tolist() == [[3.0, 1.0, -inf, -inf]]
    assert keep_min_p(logits, 1.0).tolist() == [[3.0, -inf, -inf, -inf]]
    likely = torch.tensor([[0.2, 0.5, 0.3]]).log()
    for p, kept in ((0.01, [1]), (0.49, [1]), (0.6, [1, 2]), (0.81, [0, 1, 2]), (1.0, [0, 1, 2])):
        assert torch.isfinite(keep_top_p(likely, p))[0].nonzero().flatten().tolist() == kept


def test_top_k_and_min_p_keep_ties_and_top_p_takes_the_first():
    """Tokens as likely as the k-th largest or the most likely are kept; top_p and greedy take the first ids."""
    even = torch.zeros(1, 4)
    assert torch.equal(keep_top_k(even, 2), even)
    assert torch.equal(keep_min_p(even, 1.0), even)
    assert keep_top_p(even, 0.5).tolist() == [[0.0, 0.0, -inf, -inf]]
    assert keep_top_p(even, 0.51).tolist() == [[0.0, 0.0, 0.0, -inf]]
    for vocabulary in (4, 33, 5000):  # kernels differ by size
        tied = torch.zeros(3, vocabulary)
        tied[:, 1:3] = 1.0
        assert Sampling(temperature=0).draw(tied, torch.rand(3)).tolist() == [1, 1, 1]
    counts = Counter(invert(even.expand(4000, 4), torch.arange(4000) / 4000).tolist())
    assert counts == {0: 1000, 1: 1000, 2: 1000, 3: 1000}


def test_half_precision_logits_are_sampled_in_float32():
    """Filters and sums in bfloat16 would keep other tokens."""
    logits = torch.randn(1, 3000).bfloat16()
    for options in ({"temperature": 0.7}, {"temperature": 0.7, "top_p": 0.6}, {"min_p": 0.013}):
        sampling = Sampling(**options)
        assert torch.equal(sampling.logits(logits), sampling.logits(logits.float()))


def test_extreme_settings_give_valid_tokens_and_nan_is_reported(small):
    model = small()
    for options in (
        {"temperature": 1e-5},
        {"repetition_penalty": 1e-6},
        {"frequency_penalty": 1e6},
        {"temperature": 1e6},
    ):
        assert max(generated(model, [[1, 2]], 10, **options)[0]) < 17
    torch.nn.init.constant_(model.head.weight[3], math.nan)
    pairs = list(generate(model, [[1, 2]], 3, log_probabilities=True))
    assert all(token < 17 and value.isnan() for token, value in pairs)


def test_rows_are_sampled_independently():
    logits, uniform, counts = torch.randn(5, 17), torch.rand(5), torch.randint(3, (5, 17))
    sampling = Sampling(0.8, 9, 0.9, 0.01, 1.2, 0.1)
    together = sampling.draw(logits, uniform, counts)
    for i in range(5):
        assert sampling.draw(logits[i : i + 1], uniform[i : i + 1], counts[i : i + 1]) == together[i]


def test_uniform_numbers_of_0_and_almost_1_give_valid_tokens():
    logits = torch.tensor([[-inf, 0.0, 0.0, -inf]])
    assert invert(logits, torch.tensor([0.0])) == 1
    assert invert(logits, torch.tensor([1 - 2**-24])) == 2


def test_penalties_count_prompt_and_generated_tokens(small):
    """With a penalty larger than any logit, no token is generated twice, and none of the prompt."""
    model, rows = small(), [[3, 5, 5], [1]]
    for options in ({"frequency_penalty": 1e6}, {"frequency_penalty": 1e6, "temperature": 0}):
        for prompt, row in zip(rows, generated(model, rows, 14, **options), strict=True):
            assert len({*prompt, *row}) == len(set(prompt)) + 14
    assert len(set(generated(model, [[1]], 14, temperature=0, frequency_penalty=-1e6)[0])) == 1


def test_the_same_seed_gives_the_same_text_and_another_seed_another(small):
    model, rows = small(), ragged(4, 4)
    assert generated(model, rows, 20) == generated(model, rows, 20, seeds=[0, 1])
    assert generated(model, rows[:1] * 2, 20)[0] != generated(model, rows[:1] * 2, 20)[1]


class Reads(TorchDispatchMode):
    """Records what makes the host wait for the device: values of tensors, and shapes that depend on values."""

    WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal")

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        name = function.overloadpacket.__name__
        if name in self.WAITS:
            self.names.append(name)
        return function(*arguments, **keywords or {})


@pytest.mark.slow
@pytest.mark.parametrize("stops", [(), (99,)])
def test_the_host_waits_for_the_device_only_every_16_columns(small, stops):
    model = small(max_seq_len=100)
    sampling = {"top_k": 5, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1, "frequency_penalty": 0.1}
    columns = generate(model, ragged(3, 5), 80, stops=stops, log_probabilities=True, **sampling)
    next(columns)  # the prompt is read before
    with Reads() as reads:
        n = len(list(columns))
    assert n == 79
    assert len(reads.names) == (4 if stops else 0)
    with Reads() as reads:  # Reads does record
        torch.ones(3).sum().item()
    assert reads.names == ["_local_scalar_dense"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, "temperature.*-1"),
        ({"temperature": float("nan")}, "temperature.*nan"),
        ({"temperature": inf}, "temperature.*inf"),
        ({"temperature": 1e-40}, "temperature.*1e-40"),
        ({"top_k": 0}, "top_k.*0"),
        ({"top_k": -3}, "top_k.*-3"),
        ({"top_p": 0.0}, "top_p.*0"),
        ({"top_p": 1.1}, "top_p.*1.1"),
        ({"min_p": 0.0}, "min_p.*0"),
        ({"repetition_penalty": 0.0}, "repetition_penalty.*0"),
        ({"repetition_penalty": 1e-46}, "repetition_penalty.*1e-46"),
        ({"frequency_penalty": 1e39}, r"frequency_penalty.*1e\+39"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty.*nan"),
        ({"seeds": [1, 2]}, "2 seeds and 1 rows"),
        ({"overflow": "slid"}, "error, slide, extend, got slid"),
        ({"max_new_tokens": 40}, "max_seq_len 32"),
        ({"max_new_tokens": 0}, "max_new_tokens.*0"),
        ({"prompts": []}, "at least one token"),
        ({"prompts": [[1], []]}, "at least one token"),
        ({"prompts": torch.zeros(1, 0, dtype=torch.long)}, "at least one token"),
        ({"prompts": [[1, 17]]}, r"0 \.\. 16, got 1 \.\. 17"),
        ({"prompts": [[-1]]}, r"0 \.\. 16, got -1 \.\. -1"),
    ],
    ids=str,
)
def test_bad_options_are_refused_before_any_work(small, options, message):
    options = {"prompts": [[0, 0, 0]], "max_new_tokens": 4, **options}
    with pytest.raises(ValueError, match=message):
        generate(small(), **options)


def test_a_given_step_replaces_the_models_own(small):
    model, calls = small(), []

    def step(model, tokens, cache):
        calls.append(tokens.shape)
        return next_logits(model, tokens, cache)

    rows = ragged(3, 5)
    assert generated(model, rows, 10, step=step) == generated(model, rows, 10)
    assert calls == [(2, 1)] * 9
