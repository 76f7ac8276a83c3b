import base64
import json
import re

import numpy as np
import pytest
import torch

from insight import maps
from insight.maps import draw_attention, draw_bars, draw_cells, draw_lens, visible
from insight.page import TEMPLATE, write_page

pytestmark = pytest.mark.slow

LABELS = [
    "$\\bad{$",
    "</script>",
    "\N{MIDDLE DOT}_x^{",
    "<end>",
    "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}",
]  # as text


@pytest.mark.parametrize(
    ("token", "shown"),
    [
        (b" the", "\N{MIDDLE DOT}the"),
        (b"\n\n", 2 * "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}"),
        (b"\t", "\N{RIGHTWARDS ARROW}"),
        ("\u00fc\u4e2d".encode(), "\u00fc\u4e2d"),
        ("\u4e2d".encode()[:2], "<e4><b8>"),
        (b"a\x00\x7f", "a<00><7f>"),
        ("\u00a0\u200b".encode(), "<a0><200b>"),
        (rb"\xe4", r"\xe4"),
        (b"", ""),
    ],
)
def test_every_token_can_be_seen(token, shown):
    assert visible(token) == shown


def is_picture(path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG")


def test_pictures_are_drawn_whatever_the_tokens_are(tmp_path):
    weights = torch.softmax(torch.randn(2, 3, 5, 5), -1)
    draw_attention(tmp_path / "a.png", weights, LABELS, torch.randn(2, 3), "$\\bad{$")
    draw_bars(tmp_path / "b.png", [0.0, 1.0, -1.0, 2.0, 0.5], LABELS, "$\\bad{$", "nats")
    grids = [("a", torch.randn(5, 3), LABELS, LABELS[:3]), ("b", torch.zeros(1, 1), ["x"], ["y"])]
    draw_cells(tmp_path / "c.png", grids, "title", "nats")
    draw_lens(tmp_path / "d.png", [LABELS, LABELS], torch.rand(2, 5), LABELS, "title")
    assert all(is_picture(tmp_path / f"{name}.png") for name in "abcd")


@pytest.mark.parametrize(("n", "labels"), [(5, 5), (60, 60), (120, 60)])
def test_all_tokens_are_named_up_to_a_width_and_then_every_second(monkeypatch, n, labels):
    from matplotlib.axis import Axis

    shown, set_ticks = [], Axis.set_ticks
    monkeypatch.setattr(maps, "_save", lambda *_: None)
    monkeypatch.setattr(
        Axis, "set_ticks", lambda *given, **options: shown.append(given[2:]) or set_ticks(*given, **options)
    )
    maps.draw_attention("a.png", torch.full((1, 4, n, n), 1 / n), ["a"] * n, torch.zeros(1, 4), "title")
    assert any(shown)
    assert {len(names) for (names,) in filter(None, shown)} == {labels}


# --- the page -------------------------------------------------------------------------------------------------------


@pytest.fixture
def page(tmp_path):
    """The page's text, what it holds, and the weights that were given."""
    weights = torch.softmax(torch.randn(2, 3, 5, 5).masked_fill(~torch.ones(5, 5).tril().bool(), -torch.inf), -1)
    rows = [{"layer": i, "head": h, "remark": "attends, no effect"} for i in range(2) for h in range(3)]
    write_page(tmp_path / "a.html", weights, LABELS, rows, {"lines": ["text  </script>"], "key": 2})
    text = (tmp_path / "a.html").read_text(encoding="utf-8")
    return text, json.loads(re.search(r"^const data = (.*);$", text, re.MULTILINE)[1]), weights


def test_the_page_holds_every_weight_of_every_head(page):
    _, data, weights = page
    packed = np.frombuffer(base64.b64decode(data["weights"]), "<u2").reshape(2, 3, 15)
    assert data["shape"] == [2, 3, 5]
    for q in range(5):
        for k in range(q + 1):  # where the page looks for it
            found = packed[:, :, q * (q + 1) // 2 + k] / data["full"]
            np.testing.assert_allclose(found, weights[:, :, q, k], atol=1e-5)


def test_the_page_needs_nothing_but_itself_and_no_token_breaks_it(page):
    text, data, _ = page
    assert data["tokens"] == LABELS
    assert text.count("</script>") == TEMPLATE.read_text(encoding="utf-8").count("</script>") == 1
    for loads in ("http", "src=", "url(", "@import", "<link", "fetch("):
        assert loads not in text, loads


def test_the_page_says_that_a_weight_is_no_cause_and_shows_the_effect_beside(page):
    text, data, _ = page
    assert "A weight is not a cause." in text
    assert [row["remark"] for row in data["heads"]] == ["attends, no effect"] * 6
