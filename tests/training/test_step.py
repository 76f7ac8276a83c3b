import math

import pytest
import torch

from training import auto
from training.gradients import compute_gradients, gradient_norm
from training.optimizer import OptimizerConfig, build_optimizer
from training.step import update

CPU = torch.device("cpu")


def adamw(model, lr, weight_decay=0.1):
    lrs = {"lr": lr, "lr_embedding": lr, "lr_head": lr, "lr_norm": lr}
    config = OptimizerConfig("adamw", **lrs, betas=[0.9, 0.99], eps=1e-8, weight_decay=weight_decay)
    return build_optimizer(model, config)


def one_step(model, tokens, targets, micro_batch, lr=1e-2, clip=1e9, optimizer=None):
    optimizer = optimizer or adamw(model, lr)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    batch, count = {"tokens": tokens, "targets": targets}, (targets != -100).sum().item()
    autocast = auto.autocast(CPU, "fp32")
    loss = compute_gradients(model, scaler, batch, micro_batch=micro_batch, count=count, autocast=autocast) / count
    norm = gradient_norm(optimizer, scaler)
    update(optimizer, scaler, factor=1.0, norm=norm, clip=clip)
    return loss, norm


def test_rows_that_are_cut_are_independent(small):
    """Rows of 12 tokens that are cut every 3 equal rows of 3 tokens: no token sees across a cut."""
    tokens, targets = torch.randint(17, (4, 12)), torch.randint(17, (4, 12))
    found = []
    for shape, length in (((4, 12), 3), ((16, 3), None), ((4, 12), None)):
        model, batch = small(), {"tokens": tokens.view(shape), "targets": targets.view(shape)}
        scaler, autocast = torch.amp.GradScaler("cpu", enabled=False), auto.autocast(CPU, "fp32")
        options = {"micro_batch": 2, "count": 48, "autocast": autocast, "row_length": length}
        torch.manual_seed(1)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        loss = compute_gradients(model, scaler, batch, **options)
        found.append([loss, *(parameter.grad for parameter in model.parameters())])
    torch.testing.assert_close(found[0], found[1])
    assert not torch.allclose(found[0][0], found[2][0])


@pytest.mark.parametrize("micro_batch", [1, 2, 4])
def test_accumulation_equals_the_large_batch(small, micro_batch):
    """Also if the micro-batches have unequal numbers of targets."""
    tokens, targets = torch.randint(17, (8, 6)), torch.randint(17, (8, 6))
    targets[0, 1:] = -100
    targets[5, :4] = -100
    whole, pieces = small(), small()
    pieces.load_state_dict(whole.state_dict())
    expected = one_step(whole, tokens, targets, micro_batch=8)
    found = one_step(pieces, tokens, targets, micro_batch=micro_batch)
    torch.testing.assert_close(found, expected)
    for a, b in zip(pieces.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_the_gradient_is_clipped_and_grad_norm_is_that_before(small):
    model = small().train()
    before = [p.clone() for p in model.parameters()]
    sgd = torch.optim.SGD([{"params": model.parameters(), "initial_lr": 1.0}])
    tokens = torch.randint(17, (4, 6))
    _, norm = one_step(model, tokens, tokens.roll(1), micro_batch=4, clip=1e-3, optimizer=sgd)
    moved = math.sqrt(sum((a - b).square().sum().item() for a, b in zip(model.parameters(), before, strict=True)))
    assert norm > 1e-2
    assert moved == pytest.approx(1e-3, rel=1e-3)


def test_a_repeated_line_is_learned(small):
    """From about ln(vocabulary) to under 0.2 within 200 steps."""
    model = small().float()
    model.initialise()
    tokens = torch.randint(17, (1, 17)).expand(4, 17)
    optimizer = adamw(model, lr=1e-2, weight_decay=0.0)
    losses = []
    for _ in range(200):
        loss, _ = one_step(model, tokens[:, :-1], tokens[:, 1:], micro_batch=4, clip=1.0, optimizer=optimizer)
        losses.append(loss.item())
    assert losses[0] == pytest.approx(math.log(17), abs=0.2)
    assert min(losses) < 0.2
