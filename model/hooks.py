"""Hooks: record a model's activations, or edit them.

    with recording(model, [Site("stream", 1)]) as found:
        model(tokens)
    found[Site("stream", 1)]  # (b s d_model)

Outside the `with` block the model is unchanged and as fast as before.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from model.attention import CausalMultiHeadAttention
from model.gpt import GPT
from model.ops import MATH

Edit = Callable[[Tensor], Tensor | None]


class Site(NamedTuple):
    """An activation (b s d) of a GPT.

    | kind | activation |
    | --- | --- |
    | embedding | the tokens' embeddings, after the embedding's norm, before positions are added |
    | stream | the residual stream before block `layer`; with layer = n_layers, after the last block |
    | attention, feed_forward | the output of a branch of block `layer`, which is added to the stream |
    | head | the output of head `head` of block `layer`, before wo |
    | hidden | the hidden layer of the feed-forward of block `layer`, before `down` |
    """

    kind: str
    layer: int = 0
    head: int = 0

    def __str__(self) -> str:
        words = {"embedding": "embedding", "head": f"head {self.layer}.{self.head}"}
        return words.get(self.kind, f"{self.kind.replace('_', '-')} {self.layer}")


class Place(NamedTuple):
    """An input or the output of any module: the argument with this index in the call, or None for the output.

    `module` is its name in the model's named_modules().
    """

    module: str
    argument: int | None = None


def place(model: GPT, site: Site) -> Place:
    """The module and argument of a site. A head is a slice of the tensor there."""
    kind, block = site.kind, f"blocks.{site.layer}"
    if kind == "embedding":
        return Place("embedding" if model.embedding_norm is None else "embedding_norm")
    if kind == "stream":
        return Place(block, 0) if site.layer < len(model.blocks) else Place(f"blocks.{site.layer - 1}")
    inputs = {"head": "attention.wo", "hidden": "feed_forward.down"}
    return Place(f"{block}.{inputs[kind]}", 0) if kind in inputs else Place(f"{block}.{kind}")


@contextmanager
def editing(model: nn.Module, edits: Mapping[Site | Place, Edit]) -> Iterator[None]:
    """Inside, the activation x at each site is replaced by edit(x); if that is None, it stays.

    A Site needs a GPT, a Place any module.
    """
    with ExitStack() as hooks:
        for site, edit in edits.items():
            hooks.enter_context(_hook(model, site, edit))
        yield


@contextmanager
def recording(model: nn.Module, sites: Iterable[Site | Place]) -> Iterator[dict[Site | Place, Tensor]]:
    """`with recording(model, sites) as found: model(tokens)` fills `found` with the last activation at each site.

    These are the model's own tensors, part of the autograd graph if there is one.
    """
    found: dict[Site | Place, Tensor] = {}
    with editing(model, {site: partial(found.__setitem__, site) for site in sites}):
        yield found


def _hook(model: nn.Module, site: Site | Place, edit: Edit) -> RemovableHandle:
    name, argument = place(model, site) if isinstance(site, Site) else site
    if isinstance(site, Site) and site.kind == "head":
        edit = partial(_edit_head, edit, site.head, model.blocks[site.layer].attention.n_heads)
    module = model.get_submodule(name)
    if argument is None:
        return module.register_forward_hook(lambda module, arguments, x: edit(x))

    def given(module: nn.Module, arguments: tuple, keywords: dict) -> tuple[tuple, dict] | None:
        values, n = [*arguments, *keywords.values()], len(arguments)
        x = edit(values[argument])
        if x is None:
            return None
        values[argument] = x
        return tuple(values[:n]), dict(zip(keywords, values[n:], strict=True))

    return module.register_forward_pre_hook(given, with_kwargs=True)


def _edit_head(edit: Edit, head: int, n_heads: int, x: Tensor) -> Tensor | None:
    heads = list(rearrange(x, "b s (h d) -> h b s d", h=n_heads))
    edited = edit(heads[head])
    if edited is None:
        return None
    heads[head] = edited
    return rearrange(heads, "h b s d -> b s (h d)")


# --- attention, which is a function and not a module ----------------------------------------------------------------


@contextmanager
def attending(model: nn.Module, attend: Callable) -> Iterator[None]:
    """Inside, attention layer i calls attend(i, own, *arguments), where `own` is the function that it calls outside.

    Arguments and result are those of `math_attention`.
    """
    layers = [module for module in model.modules() if isinstance(module, CausalMultiHeadAttention)]
    before = [layer.ops for layer in layers]
    try:
        for i, (layer, own) in enumerate(zip(layers, before, strict=True)):
            layer.ops = replace(own, attention=partial(attend, i, own.attention))
        yield
    finally:
        for layer, own in zip(layers, before, strict=True):
            layer.ops = own


@contextmanager
def collect_attention(model: nn.Module) -> Iterator[list[Tensor]]:
    """`with collect_attention(model) as maps: model(tokens)` fills `maps` with the weights (b h q k) of each layer.

    Inside, attention runs as math_attention, since the fused kernel never holds the weights, and without torch.compile.
    Each forward starts a new list. The weights are those before dropout, part of the autograd graph if there is one.
    """
    maps: list[Tensor] = []

    def attend(i: int, own: Callable, *arguments) -> tuple[Tensor, Tensor]:
        y, weights = MATH.attention(*arguments)
        maps[i:] = [weights]
        return y, weights

    with attending(model, attend), torch.compiler.set_stance("force_eager"):
        yield maps
