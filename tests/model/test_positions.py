import math

import pytest
import torch
from einops import rearrange

from model.functional import rotate
from model.positions import (
    ALiBi,
    LearnedPositionalEmbedding,
    RotaryPositionalEmbedding,
    SinusoidalPositionalEmbedding,
    rope_frequencies,
)


@pytest.fixture(params=["half", "interleaved"])
def rope(request):
    return RotaryPositionalEmbedding(10000.0, 8, 64, request.param)


# --- RoPE -----------------------------------------------------------------------------------------------------------


def test_rotation_keeps_norms_and_position_0_is_the_identity(rope):
    x = torch.randn(2, 3, 5, 8, dtype=torch.float64)
    rotated = rope(x, torch.arange(5))
    torch.testing.assert_close(rotated.norm(dim=-1), x.norm(dim=-1), rtol=1e-6, atol=1e-6)
    assert torch.equal(rotated[:, :, 0], x[:, :, 0])
    assert not torch.allclose(rotated[:, :, 1], x[:, :, 1])


def test_scores_depend_only_on_the_distance(rope):
    q, k = torch.randn(8, dtype=torch.float64), torch.randn(8, dtype=torch.float64)

    def score(m: int, n: int):
        return (
            rope(q.view(1, 1, 1, 8), torch.tensor([m])).flatten()
            @ rope(k.view(1, 1, 1, 8), torch.tensor([n])).flatten()
        )

    for shift in (1, 17, 50):
        torch.testing.assert_close(score(9, 4), score(9 + shift, 4 + shift), rtol=1e-5, atol=1e-6)
    assert abs(score(9, 4) - score(9, 5)) > 1e-3


def test_rotating_all_heads_equals_a_loop_over_heads_pairs_and_positions(rope):
    x = torch.randn(2, 3, 5, 8, dtype=torch.float64)
    y = torch.empty_like(x)
    for b in range(2):
        for h in range(3):
            for p in range(5):
                for i in range(4):
                    first, second = (i, i + 4) if rope.pairing == "half" else (2 * i, 2 * i + 1)
                    angle = p * 10000 ** (-2 * i / 8)
                    a, c = x[b, h, p, first], x[b, h, p, second]
                    y[b, h, p, first] = a * math.cos(angle) - c * math.sin(angle)
                    y[b, h, p, second] = a * math.sin(angle) + c * math.cos(angle)
    torch.testing.assert_close(rope(x, torch.arange(5)), y, rtol=1e-6, atol=1e-6)


def test_every_row_may_have_its_own_positions(rope):
    x = torch.randn(2, 3, 5, 8)
    positions = torch.stack([torch.arange(5), torch.arange(20, 25)])
    out = rope(x, positions)
    for row in range(2):
        torch.testing.assert_close(out[row : row + 1], rope(x[row : row + 1], positions[row]))


def test_any_axes_may_lie_between_rows_and_positions(rope):
    """A loop over heads, each (b s d), equals all heads at once, also if each row has its own positions."""
    x = torch.randn(3, 3, 5, 8)  # as many heads as rows, so that broadcasting could confuse them
    own = torch.stack([torch.arange(5), torch.arange(20, 25), torch.arange(50, 55)])
    for positions in (torch.arange(5), own, own[:1]):
        whole = rope(x, positions)
        assert whole.shape == x.shape
        for head in range(3):
            assert torch.equal(rope(x[:, head], positions), whole[:, head])
        assert torch.equal(rope(x.unsqueeze(2), positions), whole.unsqueeze(2))
        by_hand = torch.stack([rope(row, p) for row, p in zip(x, positions.expand(3, 5), strict=True)])
        assert torch.equal(whole, by_hand)
    assert torch.equal(rope(x[0, 0], own[1]), rope(x, own[1])[0, 0])
    assert torch.equal(rope(x, own.unsqueeze(1).expand(3, 3, 5)), rope(x, own))


def test_positions_that_do_not_fit_are_refused_and_never_broadcast(rope):
    learned, sinusoidal = LearnedPositionalEmbedding(8, 64), SinusoidalPositionalEmbedding(8, 64)
    for scheme in (rope, learned, sinusoidal):
        for x, positions in (((2, 5, 8), (1,)), ((2, 5, 8), (4,)), ((2, 5, 8), (3, 5)), ((1, 5, 8), (2, 5))):
            with pytest.raises(ValueError, match=r"token_positions must be \(s,\), or \(b, s\)"):
                scheme(torch.randn(x), torch.zeros(positions, dtype=torch.long))
        with pytest.raises(ValueError, match="token_positions must be"):
            scheme(torch.randn(5, 8), torch.zeros(2, 5, dtype=torch.long))
    with pytest.raises(
        ValueError, match=r"the cosines must broadcast to the pairs, got \(2, 1, 5, 4\) and \(2, 5, 4\)"
    ):
        rotate(torch.randn(2, 5, 8), torch.ones(2, 1, 5, 4), torch.zeros(2, 1, 5, 4))


def test_the_two_pairings_agree_after_permuting_dimensions():
    half, interleaved = (RotaryPositionalEmbedding(10000.0, 8, 64, p) for p in ("half", "interleaved"))
    x, positions = torch.randn(1, 1, 6, 8), torch.arange(6)

    def to_half(y):
        return rearrange(y, "... (i two) -> ... (two i)", two=2)

    torch.testing.assert_close(to_half(interleaved(x, positions)), half(to_half(x), positions))


def test_the_table_stays_float32_when_the_model_changes_dtype(rope):
    x = torch.randn(1, 1, 50, 8)
    before = rope(x, torch.arange(14, 64))
    rope.bfloat16()
    assert rope.cos.dtype == rope.sin.dtype == torch.float32
    assert torch.equal(rope(x, torch.arange(14, 64)), before)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(rope(x, torch.arange(14, 64)), before)
    assert rope(x.bfloat16(), torch.arange(14, 64)).dtype == torch.bfloat16
    table = RotaryPositionalEmbedding(10000.0, 8, 512).half().double().bfloat16().sin
    assert len({tuple(row.tolist()) for row in table[250:300]}) == 50


def test_the_table_is_exact_at_position_100_000():
    rope = RotaryPositionalEmbedding(10000.0, 64, 100_001)
    for i in range(32):
        angle = 100_000 * 10000 ** (-2 * i / 64)
        assert rope.cos[-1, i].item() == pytest.approx(math.cos(angle), abs=1e-7)
        assert rope.sin[-1, i].item() == pytest.approx(math.sin(angle), abs=1e-7)
    inv_freq = 10000 ** (-torch.arange(0, 64, 2).float() / 64)  # the result if all were float32
    assert ((100_000 * inv_freq).cos() - rope.cos[-1]).abs().max() > 1e-3


# --- RoPE beyond the trained length ---------------------------------------------------------------------------------


def test_interpolation_squeezes_positions_into_the_trained_range():
    trained = RotaryPositionalEmbedding(10000.0, 8, 64)
    extended = RotaryPositionalEmbedding(10000.0, 8, 256, scaling="interpolation", factor=4.0)
    assert torch.equal(extended.cos[::4], trained.cos)
    assert torch.equal(extended.sin[::4], trained.sin)


def test_ntk_slows_the_slowest_pair_by_the_factor_and_the_fastest_not_at_all():
    plain, _ = rope_frequencies(10000.0, 64)
    slowed, amplitude = rope_frequencies(10000.0, 64, "ntk", 4.0)
    ratio = plain / slowed
    assert amplitude == 1
    assert ratio[0] == 1
    assert ratio[-1].item() == pytest.approx(4.0)
    assert (ratio.diff() > 0).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("d_k", "factor", "trained"), [(64, 4.0, 2048), (128, 16.0, 4096), (8, 2.0, 64), (16, 8.0, 128)]
)
def test_yarn_equals_hugging_faces(d_k, factor, trained):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(
        hidden_size=d_k,
        num_attention_heads=1,
        max_position_embeddings=int(trained * factor),
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": factor,
            "original_max_position_embeddings": trained,
        },
    )
    inv_freq, amplitude = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    ours, our_amplitude = rope_frequencies(10000.0, d_k, "yarn", factor, int(trained * factor))
    torch.testing.assert_close(ours.float(), inv_freq)
    assert our_amplitude == pytest.approx(amplitude)
    rope = RotaryPositionalEmbedding(10000.0, d_k, int(trained * factor), scaling="yarn", factor=factor)
    torch.testing.assert_close(rope.cos[0], torch.full_like(rope.cos[0], our_amplitude))


def test_yarn_keeps_fast_pairs_and_interpolates_slow_ones():
    plain, _ = rope_frequencies(10000.0, 128)
    slowed, _ = rope_frequencies(10000.0, 128, "yarn", 8.0, 8 * 2048)
    turns, ratio = 2048 * plain / (2 * math.pi), plain / slowed
    assert (ratio[turns > 33 * 1.2] == 1).all()
    torch.testing.assert_close(ratio[turns < 1 / 1.2], torch.full_like(ratio[turns < 1 / 1.2], 8.0))
    assert ((ratio > 1) & (ratio < 8)).any()


# --- the alternatives -----------------------------------------------------------------------------------------------


def test_learned_positions_add_their_row():
    module, x = LearnedPositionalEmbedding(6, 10), torch.randn(2, 3, 6)
    positions = torch.tensor([[0, 1, 2], [7, 9, 8]])
    for row in range(2):
        for s in range(3):
            torch.testing.assert_close(module(x, positions)[row, s], x[row, s] + module.table.weight[positions[row, s]])
    torch.testing.assert_close(module(x, positions[0]), x + module.table.weight[:3])


def test_sinusoidal_positions_equal_the_papers():
    module, x = SinusoidalPositionalEmbedding(6, 10).bfloat16(), torch.randn(1, 10, 6)
    added = module(x, torch.arange(10)) - math.sqrt(6) * x
    for p in range(10):
        for i in range(3):
            angle = p / 10000 ** (2 * i / 6)
            assert added[0, p, 2 * i].item() == pytest.approx(math.sin(angle), abs=1e-5)
            assert added[0, p, 2 * i + 1].item() == pytest.approx(math.cos(angle), abs=1e-5)


def test_alibi_has_the_papers_slopes():
    assert ALiBi(8).slopes.flatten().tolist() == [2.0**-i for i in range(1, 9)]
    assert ALiBi(1).slopes.flatten().tolist() == [2.0**-8]
    twelve = ALiBi(12).slopes.flatten().tolist()
    assert twelve[:8] == [2.0**-i for i in range(1, 9)]
    torch.testing.assert_close(torch.tensor(twelve[8:]), torch.tensor([2.0**-0.5, 2.0**-1.5, 2.0**-2.5, 2.0**-3.5]))


def test_alibi_falls_linearly_with_the_distance():
    bias = ALiBi(8)(torch.tensor([5, 6]), torch.arange(7))
    assert bias.shape == (8, 2, 7)
    for head in range(8):
        assert bias[head].tolist() == [[-(2.0 ** -(head + 1)) * (i - j) for j in range(7)] for i in (5, 6)]
    rows = ALiBi(8)(torch.tensor([[5, 6], [1, 2]]), torch.arange(7).expand(2, 7))
    assert rows.shape == (2, 8, 2, 7)
    assert torch.equal(rows[0], bias)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (lambda: RotaryPositionalEmbedding(10000.0, 7, 64), "even, got 7"),
        (lambda: SinusoidalPositionalEmbedding(7, 64), "even, got 7"),
        (lambda: LearnedPositionalEmbedding(8, 64)(torch.randn(1, 1, 8), torch.tensor([64])), r"0 \.\. 63.*64"),
        (lambda: SinusoidalPositionalEmbedding(8, 64)(torch.randn(1, 1, 8), torch.tensor([-1])), r"0 \.\. 63.*-1"),
    ],
)
def test_impossible_arguments_are_refused_with_the_numbers(module, message):
    with pytest.raises(ValueError, match=message):
        module()
