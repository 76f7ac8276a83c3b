import pytest
import torch

from model.hooks import Place, Site, attending, editing, recording

KINDS = [
    {},
    {"positions": "learned", "norm": "layernorm", "feed_forward": "gelu", "embedding_norm": True},
    {"positions": "alibi", "window": 3, "qk_norm": True, "soft_cap": 5.0},
]
BRANCHES = [Site(kind, i) for i in range(2) for kind in ("attention", "hidden", "feed_forward")]
HEADS = [Site("head", i, h) for i in range(2) for h in range(4)]
SITES = [Site("embedding"), *(Site("stream", i) for i in range(3)), *BRANCHES, *HEADS]
WQ = Place("blocks.1.attention.wq")


@pytest.mark.parametrize("kind", KINDS)
def test_recording_changes_no_output_and_leaves_no_hook(small, kind):
    model, tokens = small(**kind), torch.randint(17, (2, 7))
    before, own = model(tokens), [block.attention.ops for block in model.blocks]
    with recording(model, [*SITES, WQ]) as found:
        assert torch.equal(model(tokens), before)
    assert set(found) == {*SITES, WQ}
    with editing(model, {site: lambda x: x.clone() for site in SITES}):
        assert torch.equal(model(tokens), before)
    for site in SITES:
        with editing(model, {site: torch.zeros_like}):
            assert not torch.allclose(model(tokens), before), site
    with pytest.raises(RuntimeError, match="stop"), attending(model, print), editing(model, {WQ: torch.zeros_like}):
        raise RuntimeError("stop")
    assert torch.equal(model(tokens), before)
    assert [block.attention.ops for block in model.blocks] == own
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_each_site_records_the_tensor_that_its_name_says(small):
    model, tokens = small(), torch.randint(17, (2, 7))
    block = model.blocks[1]
    with recording(model, [*SITES, WQ]) as found:
        logits = model(tokens)
    stream, attention, feed_forward = (found[Site(name, 1)] for name in ("stream", "attention", "feed_forward"))
    torch.testing.assert_close(found[Site("embedding")], model.embedding(tokens))
    torch.testing.assert_close(found[Site("stream", 0)], model.embedding(tokens))
    heads = torch.cat([found[Site("head", 1, h)] for h in range(4)], dim=-1)
    torch.testing.assert_close(attention, block.attention.wo(heads))
    torch.testing.assert_close(feed_forward, block.feed_forward.down(found[Site("hidden", 1)]))
    torch.testing.assert_close(found[Site("stream", 2)], stream + attention + feed_forward)
    torch.testing.assert_close(model.head(model.norm(found[Site("stream", 2)])), logits)
    torch.testing.assert_close(found[WQ], block.attention.wq(block.attention_norm(stream)))


def test_the_last_forward_is_recorded_with_its_gradients(small):
    model, tokens, site = small(), torch.randint(17, (2, 7)), Site("attention", 0)
    with recording(model, [site]) as found:
        model(tokens)
        logits = model(tokens[:, :4])
    assert found[site].shape == (2, 4, 16)
    assert torch.autograd.grad(logits.sum(), found[site])[0].any()


@pytest.mark.parametrize("by_name", [False, True])
def test_positional_and_keyword_arguments_can_be_edited(small, by_name):
    rope, x, places = small().blocks[0].attention.rope, torch.randn(2, 4, 5, 4), torch.arange(5)

    def call(positions):
        return rope(x, token_positions=positions) if by_name else rope(x, positions)

    seen = []
    with editing(rope, {Place("", 1): seen.append}):  # returns None
        expected = call(places + 1)
    assert torch.equal(seen[0], places + 1)
    with editing(rope, {Place("", 1): lambda positions: positions + 1}):
        assert torch.equal(call(places), expected)
