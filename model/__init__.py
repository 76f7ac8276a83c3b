"""The model: knows tensors only.

Read functional first (the mathematics), then ops (the ways to compute it), positions, attention, norm, feed_forward and
gpt (the whole); cache and generation write with it, hooks look inside.
"""

from model.generation import generate
from model.gpt import GPT
from model.hooks import collect_attention

__all__ = ["GPT", "collect_attention", "generate"]
