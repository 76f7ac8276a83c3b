import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from training.schedule import ScheduleConfig, lr_factor, row_length, row_lengths


def lrs(decay: str, warmup: int = 10, final: float = 0.1) -> list[float]:
    schedule = ScheduleConfig(decay, warmup, cooldown=0.2, final=final)
    return [2.0 * lr_factor(t, 100, schedule) for t in range(100)]


@pytest.mark.parametrize("decay", ["linear", "cosine", "wsd", "constant"])
def test_the_lr_rises_to_its_peak_and_never_rises_again(decay):
    values = lrs(decay)
    assert values[0] == pytest.approx(0.2)  # above zero from the first step
    assert values[9] == pytest.approx(2.0) == max(values)
    assert all(a < b for a, b in zip(values[:9], values[1:10], strict=True))
    assert all(a >= b for a, b in zip(values[9:], values[10:], strict=False))


def test_the_lr_ends_near_its_final_fraction():
    assert lrs("linear")[-1] == pytest.approx(0.2, abs=0.03)
    assert lrs("cosine")[-1] == pytest.approx(0.2, abs=0.01)
    assert lrs("constant")[-1] == 2.0
    assert 0 < lrs("linear", final=0.0)[-1] < 0.03


def test_linear_and_cosine_meet_half_way_down():
    assert lrs("linear", warmup=0)[50] == pytest.approx(lrs("cosine", warmup=0)[50])


def test_without_warmup_the_lr_starts_at_its_peak():
    assert lrs("cosine", warmup=0)[0] == 2.0


def test_wsd_is_constant_and_falls_linearly_in_the_cooldown():
    values = lrs("wsd", warmup=0, final=0.0)
    assert set(values[:80]) == {2.0}
    assert values[90] == pytest.approx(1.0)
    assert values[-1] == pytest.approx(0.1)


def test_rows_have_a_quarter_then_half_then_all_of_seq_len():
    assert [row_length(t, 10, 32, 0.6) for t in range(10)] == [8] * 3 + [16] * 3 + [32] * 4
    assert {row_length(t, 10, 33, 0.0) for t in range(10)} == {33}
    assert [row_length(t, 4, 32, 1.0) for t in range(4)] == [8, 8, 16, 16]


@given(st.integers(1, 60), st.integers(0, 59), st.integers(1, 60), st.floats(0, 1))
@example(60, 0, 60, 0.6)
def test_row_lengths_are_those_of_the_single_steps(steps, start, n, warmup):
    end = min(steps, start + n)
    if start < end:
        counted = sorted({row_length(step, steps, 32, warmup) for step in range(start, end)})
        assert row_lengths(start, end, steps, 32, warmup) == counted


def test_row_lengths_take_no_longer_for_more_steps():
    assert row_lengths(0, 10**15, 10**15, 32, 0.5) == [8, 16, 32]
    assert row_lengths(10**14, 10**15, 10**15, 32, 0.1) == [32]
