"""The model: knows tensors only.

Read functional first (the mathematics), then ops (the ways to compute it), positions, attention, norm, feed_forward and
config and gpt (the whole); cache and generation write with it, hooks look inside.
"""

from model.config import ModelConfig
from model.generation import generate
from model.gpt import GPT
from model.hooks import collect_attention

__all__ = ["GPT", "ModelConfig", "collect_attention", "generate"]
