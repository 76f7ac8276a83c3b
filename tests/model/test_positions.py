import pytest
import torch
from einops import rearrange

from model.positions import RotaryPositionalEmbedding


@pytest.fixture(params=["half", "interleaved"])
def rope(request):
    return RotaryPositionalEmbedding(10000.0, 8, 64, request.param)


def test_rotation_keeps_norms_and_position_0_is_the_identity(rope):
    x = torch.randn(2, 3, 5, 8, dtype=torch.float64)
    rotated = rope(x, torch.arange(5))
    torch.testing.assert_close(rotated.norm(dim=-1), x.norm(dim=-1), rtol=1e-6, atol=1e-6)
    assert torch.equal(rotated[:, :, 0], x[:, :, 0])
    assert not torch.allclose(rotated[:, :, 1], x[:, :, 1])


def test_scores_depend_on_the_distance_only(rope):
    q, k = torch.randn(8, dtype=torch.float64), torch.randn(8, dtype=torch.float64)

    def score(m: int, n: int):
        return (
            rope(q.view(1, 1, 1, 8), torch.tensor([m])).flatten()
            @ rope(k.view(1, 1, 1, 8), torch.tensor([n])).flatten()
        )

    for shift in (1, 17, 50):
        torch.testing.assert_close(score(9, 4), score(9 + shift, 4 + shift), rtol=1e-5, atol=1e-6)
    assert abs(score(9, 4) - score(9, 5)) > 1e-3


def test_every_row_may_have_positions_of_its_own(rope):
    x = torch.randn(2, 3, 5, 8)
    positions = torch.stack([torch.arange(5), torch.arange(20, 25)])
    out = rope(x, positions)
    for row in range(2):
        torch.testing.assert_close(out[row : row + 1], rope(x[row : row + 1], positions[row]))


def test_the_two_pairings_agree_after_permuting_dimensions():
    half, interleaved = (RotaryPositionalEmbedding(10000.0, 8, 64, p) for p in ("half", "interleaved"))
    x, positions = torch.randn(1, 1, 6, 8), torch.arange(6)

    def to_half(y):
        return rearrange(y, "... (i two) -> ... (two i)", two=2)

    torch.testing.assert_close(to_half(interleaved(x, positions)), half(to_half(x), positions))


def test_the_table_stays_float32_whatever_the_model_becomes():
    rope = RotaryPositionalEmbedding(10000.0, 8, 512).bfloat16()
    assert rope.cos.dtype == rope.sin.dtype == torch.float32
    assert len({tuple(row.tolist()) for row in rope.sin[250:300]}) == 50


def test_an_odd_head_width_is_refused():
    with pytest.raises(ValueError, match="even, got 7"):
        RotaryPositionalEmbedding(10000.0, 7, 64)
