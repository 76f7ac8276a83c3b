"""The model: knows tensors only.

Read functional first (the mathematics), then positions, attention, norm, feed_forward and gpt (the whole); cache
and generation write with it.
"""

from model.attention import collect_attention
from model.generation import generate
from model.gpt import GPT

__all__ = ["GPT", "collect_attention", "generate"]
