import pytest

from training.schedule import learning_rate


def rates(decay: str, warmup: int = 10, final: float = 0.1) -> list[float]:
    return [learning_rate(t, steps=100, peak=2.0, warmup=warmup, decay=decay, final=final) for t in range(100)]


@pytest.mark.parametrize("decay", ["linear", "cosine", "constant"])
def test_it_rises_to_the_peak_and_never_again(decay):
    values = rates(decay)
    assert values[0] == pytest.approx(0.2)  # above zero from the first step
    assert values[9] == pytest.approx(2.0) == max(values)
    assert all(a < b for a, b in zip(values[:9], values[1:10], strict=True))
    assert all(a >= b for a, b in zip(values[9:], values[10:], strict=False))


def test_it_ends_near_the_final_share():
    assert rates("linear")[-1] == pytest.approx(0.2, abs=0.03)
    assert rates("cosine")[-1] == pytest.approx(0.2, abs=0.01)
    assert rates("constant")[-1] == 2.0
    assert 0 < rates("linear", final=0.0)[-1] < 0.03


def test_half_way_down_linear_and_cosine_meet():
    assert rates("linear", warmup=0)[50] == pytest.approx(rates("cosine", warmup=0)[50])


def test_without_warm_up_it_begins_at_the_peak():
    assert rates("cosine", warmup=0)[0] == 2.0
