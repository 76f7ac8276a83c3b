"""The model: knows tensors only.

Read in this order: functional (the mathematics), positions, attention, feed_forward, gpt (the whole), cache, generation.
"""

from model.generation import generate
from model.gpt import GPT

__all__ = ["GPT", "generate"]
