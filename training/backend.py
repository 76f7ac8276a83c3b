"""Chooses the table of functions that a model computes with, see model/ops.py."""

from dataclasses import replace

from kernels.training import with_kernels
from model.ops import BACKENDS, TORCH, Ops


def choose_ops(attention: str, kernels: bool) -> Ops:
    """The table for these settings, as auto.choose resolved them. The kernels must be loaded.

    attention=math holds with kernels too.
    """
    if not kernels:
        return BACKENDS[attention]
    ops = with_kernels(TORCH)
    return ops if attention == "fused" else replace(ops, attention=BACKENDS[attention].attention)
