"""The model, in pure torch.

Read functional.py first (the mathematics), then ops.py (the ways to compute it), positions.py, attention.py, norm.py,
feed_forward.py, config.py and gpt.py (the complete model). cache.py and generation.py generate text, hooks.py records
and edits activations.
"""

from model.config import ModelConfig
from model.generation import generate
from model.gpt import GPT
from model.hooks import collect_attention

__all__ = ["GPT", "ModelConfig", "collect_attention", "generate"]
