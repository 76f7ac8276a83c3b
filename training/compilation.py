"""torch.compile for training and generation; without it where it fails."""

import copy
import os
from collections.abc import Callable
from pathlib import Path
from types import FunctionType

import torch
from torch import Tensor, nn

from model.cache import KVCache
from model.generation import Step, encode, next_logits
from model.gpt import GPT


def keep_what_is_compiled():
    """Keeps compiled code in a folder that survives restarts, unless TORCHINDUCTOR_CACHE_DIR names one."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path.home() / ".cache" / "torch_inductor"))


def by_regions(model: GPT) -> GPT:
    """A model with the same weights that compiles one block for all blocks, and then head and loss."""
    twin = copy.copy(model)
    twin._modules = dict(model._modules)
    twin.blocks = nn.ModuleList(copy.copy(block) for block in model.blocks)
    for block in twin.blocks:
        block.compile(dynamic=False)
    twin.loss = torch.compile(model.loss, dynamic=False)  # type: ignore[method-assign]
    return twin


def compile_forward(
    model: GPT,
    batches: list[dict[str, Tensor]],
    autocast: torch.autocast,
    warn: Callable[[str], None],
    regional: bool = True,
) -> Callable:
    """A compiled model(**batch) for batches of exactly these shapes, tried out; the model itself if that fails.

    `regional`: see by_regions; otherwise the complete model is compiled at once, which takes n_layers times as long.
    The model itself is not changed, for evaluation and sampling in other shapes; it shares its weights with the result.
    The trial leaves no gradient and draws no random number.
    """
    keep_what_is_compiled()
    compiled = by_regions(model) if regional else torch.compile(model, dynamic=False)
    device = batches[0]["tokens"].device
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        try:
            for batch in batches:
                with autocast:
                    loss, _ = compiled(**batch)
                loss.backward()
        except Exception as error:  # of many types: no compiler, no headers, an unsupported operation
            reason = next(iter(str(error).splitlines()), "")
            warn(f"torch.compile failed, continuing without it: {type(error).__name__}: {reason}")
            compiled = model
    model.zero_grad(set_to_none=True)
    return compiled


def _guards_of_the_call(guards) -> list[bool]:
    """Keeps the guards on tokens and cache, not those on the model, which take longer than some of its kernels."""
    return [guard.guard_type == "TENSOR_MATCH" and "model" not in guard.name for guard in guards]


def compile_step(model: GPT, rows: int, warn: Callable[[str], None]) -> Step:
    """A compiled next_logits for `rows` rows of this model, tried out; next_logits itself if that fails.

    One compilation serves every size of the cache. There are no guards on the model, see above: the result is valid for
    this model as it is now. On a GPU the step is one CUDA graph for each size of the cache.
    """
    keep_what_is_compiled()
    on_cpu = model.embedding.weight.device.type == "cpu"
    how = {"cpp_wrapper": True} if on_cpu else {"triton.cudagraphs": True}
    options = {"guard_filter_fn": _guards_of_the_call, **how}
    # torch caches compiled code by the function's code object: each model needs its own
    own = FunctionType(next_logits.__code__.replace(), next_logits.__globals__)
    compiled = torch.compile(own, dynamic=False, options=options)

    def step(other: GPT, tokens: Tensor, cache: KVCache) -> Tensor:
        if other is not model:
            return next_logits(other, tokens, cache)
        if not on_cpu:  # a CUDA graph writes to fixed addresses
            for tensor in (*cache.k, *cache.v):
                torch._dynamo.mark_static_address(tensor, guard=False)
        return compiled(model, tokens, cache)

    try:
        with torch.inference_mode():
            tokens = torch.zeros(rows, 1, dtype=torch.long, device=model.embedding.weight.device)
            _, cache = encode(model, list(tokens), capacity=model.max_seq_len)
            cache.reserve(rows, 1, tokens.device)
            for tensor in (*cache.k, *cache.v):
                torch._dynamo.mark_dynamic(tensor, 2)
            if cache.token_positions is not None:
                torch._dynamo.mark_dynamic(cache.token_positions, 1)
            step(model, tokens, cache)
    except Exception as error:  # of many types: no compiler, no headers, an unsupported operation
        reason = next(iter(str(error).splitlines()), "")
        warn(f"torch.compile failed, continuing without it: {type(error).__name__}: {reason}")
        return next_logits
    return step
