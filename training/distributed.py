"""Several processes, started by torchrun. One process runs the same code with a world size of 1.

Every function here is a collective: all ranks call it. Small values use gloo, on the CPU; gradients use NCCL or gloo.
"""

import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from model.gpt import GPT


def rank() -> int:
    return int(os.environ.get("RANK", 0))


def size() -> int:
    return int(os.environ.get("WORLD_SIZE", 1))


def start(seconds: float):
    """Joins the ranks that torchrun started. A rank that does not answer for `seconds` ends the run."""
    if size() == 1 or dist.is_initialized():
        return
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    store, _, _ = next(dist.rendezvous("env://"))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # the store may still hold addresses of dead ranks
    store = dist.PrefixStore(f"attempt {attempt}", store)
    dist.init_process_group(backend, store=store, rank=rank(), world_size=size(), timeout=timedelta(seconds=seconds))
    if rank() > 0:  # only rank 0 prints
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


def stop():
    if dist.is_initialized():
        time.sleep(0.5)  # gloo's thread needs the interpreter to release the last tensors
        dist.destroy_process_group()


def broadcast(value: Any) -> Any:
    """Returns rank 0's value on all ranks."""
    if size() == 1:
        return value
    values = [value]
    dist.broadcast_object_list(values, device=torch.device("cpu"))
    return values[0]


def on_rank0(function: Callable, *arguments) -> Any:
    """Calls function(*arguments) on rank 0 and returns its result, or raises its ValueError, on all ranks."""
    if size() == 1:
        return function(*arguments)
    result, mistake = None, None
    if rank() == 0:
        try:
            result = function(*arguments)
        except ValueError as error:
            mistake = str(error)
    result, mistake = broadcast((result, mistake))
    if mistake is not None:
        raise ValueError(mistake)
    return result


def gather(*values: float) -> list[list[float]]:
    """For each value the list of its values on rank 0, 1, ..., in float64."""
    if size() == 1:
        return [[value] for value in values]
    mine = torch.tensor(values, dtype=torch.float64)
    all_ranks = [torch.empty_like(mine) for _ in range(size())]
    dist.all_gather(all_ranks, mine)
    return torch.stack(all_ranks, dim=1).tolist()


def total(value: Tensor) -> Tensor:
    """The sum of a scalar over the ranks, on the device and without a wait for it; in float64 if the device has it."""
    value = value.to(torch.float32 if value.device.type == "mps" else torch.float64)
    if size() == 1:
        return value
    all_ranks = [torch.empty_like(value) for _ in range(size())]
    dist.all_gather(all_ranks, value)
    return torch.stack(all_ranks).sum()


def gather_objects(value: Any) -> list:
    """The list of a value's values on rank 0, 1, ..."""
    if size() == 1:
        return [value]
    values = [None] * size()
    dist.all_gather_object(values, value)
    return values


@contextmanager
def name_missing_ranks(step: Callable[[], int]) -> Iterator[None]:
    """Wraps the training loop: if a collective fails, says which ranks did not take part.

    `step` returns the number of steps done. Ranks whose collective failed add their number to a list in the store;
    those that are not on it three seconds later are hung or dead.
    """
    try:
        yield
    except RuntimeError as error:
        if size() == 1 or not dist.is_initialized():
            raise
        store = dist.distributed_c10d._get_default_store()
        store.set(f"waited in vain: {rank()}", "")
        time.sleep(3)
        missing = [str(r) for r in range(size()) if not store.check([f"waited in vain: {r}"])]
        who = f"rank {', '.join(missing)} did not answer" if missing else "all ranks answer, but failed"
        raise RuntimeError(f"{who} after step {step()}: {str(error).splitlines()[0]}") from error


# --- models ---------------------------------------------------------------------------------------------------------


def parallelize(model: GPT, forward: nn.Module, how: str, precision: str) -> nn.Module:
    """Wraps `forward`, the model or its compiled form, so that gradients are averaged over the ranks.

    "ddp": each rank holds everything. "fsdp": weights, gradients and optimizer state are sharded, and a block's
    matrices are gathered while it runs (FSDP2). FSDP replaces the model's parameters: build the optimizer afterwards.

    FSDP gathers in two bytes what autocast would cast, the matrices in blocks, and so rounds it in the same way. Norms
    and embedding stay fp32, as under autocast: rounded, they would also round the residual stream, and a gradient would
    be off by 2 percent. The head stays with them, since it may be tied to the embedding. Gathering these costs two more
    bytes a weight; gathering everything in fp32 would cost them everywhere, besides the memory of autocast's copies,
    which the backward keeps. Gradients are summed over the ranks in fp32.
    """
    if size() == 1:
        return forward
    if how == "ddp":
        device = [torch.cuda.current_device()] if torch.cuda.is_available() else None
        return DistributedDataParallel(forward, device_ids=device, gradient_as_bucket_view=True)
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")  # never changed in place
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32 if half else None)
    for block in model.blocks:
        if half is None or "forward" in vars(block):  # activation checkpointing repeats a block's forward as one unit
            fully_shard(block)
        else:
            fully_shard([module for module in block.modules() if isinstance(module, nn.Linear)], mp_policy=policy)
    fully_shard(model)
    register_fsdp_forward_method(model, "read")
    return forward


@contextmanager
def synchronised(model: nn.Module, last: bool) -> Iterator[None]:
    """Wraps a micro-batch's forward and backward: gradients are exchanged after the last one of a step only."""
    if isinstance(model, DistributedDataParallel) and not last:
        with model.no_sync():
            yield
    else:
        if hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(last)
        yield


def gather_full(value: Any) -> Any:
    """Copies tensors, sharded or not, to the CPU, in nested dicts and lists; leaves other values as they are.

    Only rank 0, which saves them, keeps the copies; the other ranks take part in gathering and get None.
    """
    if isinstance(value, dict):
        return {name: gather_full(one) for name, one in value.items()}
    if isinstance(value, list):
        return [gather_full(one) for one in value]
    if not isinstance(value, Tensor):
        return value
    value = full_tensor(value)
    return value.detach().to("cpu", copy=True) if rank() == 0 else None


def full_tensor(value: Any) -> Any:
    """The full tensor of a sharded one (a DTensor, whose import takes a second); any other value as it is."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def shard_like(tensor: Tensor, like: Tensor) -> Tensor:
    """A full tensor sharded like `like`; unchanged if that is not sharded."""
    if not hasattr(like, "full_tensor") or tensor.shape != like.shape:
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements)


def load_optimizer(optimizer: torch.optim.Optimizer, state: Any):
    """Loads the optimizer's state, saved by any number of ranks; its settings stay.

    ValueError if the saved optimizer groups the weights differently.
    """
    ours, saved = (
        {group.get("name", "weights"): len(group["params"]) for group in groups}
        for groups in (optimizer.param_groups, state["param_groups"])
    )
    if ours != saved:
        raise ValueError(f"the checkpoint's optimizer has groups {saved}, this run's {ours}: give init_from instead")
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for i, of_one in state["state"].items():
        for name, value in of_one.items():
            if isinstance(value, Tensor) and value.ndim > 0 and value.shape != parameters[i].shape:
                shapes = f"{tuple(value.shape)} for a weight of {tuple(parameters[i].shape)}"
                raise ValueError(f"the checkpoint's optimizer has {name} {shapes}: give init_from instead")
    sharded = {
        i: {
            name: shard_like(value, parameters[i]) if isinstance(value, Tensor) else value
            for name, value in of_one.items()
        }
        for i, of_one in state["state"].items()
    }
    optimizer.load_state_dict({"state": sharded, "param_groups": optimizer.state_dict()["param_groups"]})


@torch.no_grad()
def load_weights(model: GPT, weights: dict[str, Tensor]):
    """Loads full weights into a model that may be sharded."""
    for name, parameter in model.state_dict().items():
        parameter.copy_(shard_like(weights[name], parameter))
