import math

import pytest
import torch

from training import auto, nonfinite
from training.state import Generators

PLAIN = auto.autocast(torch.device("cpu"), "fp32")


def pieces(n: int) -> list[dict]:
    return [{"tokens": torch.randint(17, (2, 6)), "targets": torch.randint(17, (2, 6))} for _ in range(n)]


@pytest.mark.parametrize("name", ["embedding.weight", "blocks.1.attention.wk.weight", "norm.weight"])
def test_a_weight_that_is_not_finite_is_named(small, name):
    model = small()
    dict(model.named_parameters())[name].data.view(-1)[3] = math.nan
    module, _, tensor = name.rpartition(".")
    assert nonfinite.find_origin(model, pieces(2), PLAIN, Generators().state()) == {
        "micro_batch": None,
        "module": module,
        "tensor": tensor,
    }


@pytest.mark.parametrize("name", ["blocks.0.attention.wv", "blocks.1.feed_forward.up", "head"])
@pytest.mark.parametrize("micro_batch", [0, 1])
def test_the_first_output_that_is_not_finite_is_named(small, name, micro_batch):
    """With dropout, so that only the same random numbers reproduce it."""
    model = small(dropout=0.3).float().train()
    module, calls = model.get_submodule(name), []

    def overflow(module, inputs, output):
        calls.append(1)
        if len(calls) - 1 == micro_batch:
            return output * torch.where(output == output.max(), math.inf, 1.0)

    handle = module.register_forward_hook(overflow, prepend=True)
    before = [p.clone() for p in model.parameters()]
    found = nonfinite.find_origin(model, pieces(3), PLAIN, Generators().state())
    handle.remove()
    assert found == {"micro_batch": micro_batch, "module": name, "tensor": "output"}
    assert all(torch.equal(a, b) and b.grad is None for a, b in zip(before, model.parameters(), strict=True))
    assert not any(m._forward_hooks or m._backward_hooks for m in model.modules())


def test_the_first_gradient_that_is_not_finite_is_named(small):
    """The backward starts at the end: the block after the fault has finite gradients."""
    model = small().float()

    class Fault(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            return x.clone()

        @staticmethod
        def backward(context, gradient):
            return gradient * math.nan

    handle = model.blocks[0].feed_forward.down.register_forward_hook(lambda m, i, output: Fault.apply(output))
    found = nonfinite.find_origin(model, pieces(1), PLAIN, Generators().state())
    handle.remove()
    assert found["module"] == "blocks.0.feed_forward.down" and "gradient" in found["tensor"]


def test_a_fault_that_cannot_be_reproduced_is_reported_as_such(small):
    found = nonfinite.find_origin(small().float(), pieces(2), PLAIN, Generators().state())
    assert nonfinite.describe(found) == "could not be reproduced by replaying the step"


def out_of_memory_above(model, rows: int):
    """A model that runs out of memory with more than `rows` rows."""

    def forward(tokens, targets):
        if len(tokens) > rows:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return model(tokens, targets=targets)

    forward.parameters, forward.zero_grad = model.parameters, model.zero_grad
    return forward


@pytest.mark.parametrize(("room", "fits"), [(12, 12), (11, 6), (5, 4), (1, 1)])
def test_the_largest_micro_batch_that_fits_divides_the_rows(small, room, fits):
    model = small(dropout=0.5).train()
    batch = {"tokens": torch.randint(17, (12, 6)), "targets": torch.randint(17, (12, 6))}
    state = torch.get_rng_state()
    assert auto.largest_that_fits(out_of_memory_above(model, room), batch, PLAIN) == fits
    assert all(p.grad is None for p in model.parameters())
    model.zero_grad()
    with pytest.raises(ValueError, match="not even micro_batch=1 fits"):
        auto.largest_that_fits(out_of_memory_above(model, 0), batch, PLAIN)
    assert torch.equal(state, torch.get_rng_state())


def test_running_out_of_memory_says_what_would_fit(small):
    model = out_of_memory_above(small(), 3)
    batch = {"tokens": torch.randint(17, (8, 6)), "targets": torch.randint(17, (8, 6))}
    with (
        pytest.raises(ValueError, match="micro_batch 8 does not fit into the GPU's memory: micro_batch=2 would fit"),
        auto.explain_oom(model, batch, 8, PLAIN),
    ):
        model(**batch)
    with pytest.raises(RuntimeError, match="another"), auto.explain_oom(model, batch, 8, PLAIN):
        raise RuntimeError("another")
