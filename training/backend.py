"""Which table of functions a model computes with, see model/ops.py."""

from dataclasses import replace

from kernels.training import with_kernels
from model.ops import BACKENDS, TORCH, Ops


def choose_ops(attention: str, kernels: bool) -> Ops:
    """By the settings of these names, as auto.choose has them. The kernels must be loaded.

    Attention that is to be written out stays so beside the kernels.
    """
    if not kernels:
        return BACKENDS[attention]
    ops = with_kernels(TORCH)
    return ops if attention == "fused" else replace(ops, attention=BACKENDS[attention].attention)
