import math

import pytest
import torch

from training.gate import FINE, HELD, NOT_FINITE, OVERFLOW, SPIKE, Gate, GuardConfig
from training.optimizer import OptimizerConfig, build_optimizer
from training.step import update

CPU = torch.device("cpu")
NO_SCALER = torch.amp.GradScaler("cpu", enabled=False)
LRS = {"lr": 0.1, "lr_embedding": 0.1, "lr_head": 0.1, "lr_norm": 0.1}
OPTIONS = {"betas": [0.9, 0.99], "eps": 1e-8, "weight_decay": 0.1, "momentum": 0.9}


def make_gate(sigmas: float, window: int, on_spike: str = "count") -> Gate:
    return Gate(CPU, GuardConfig("stop", 10, on_spike, sigmas, window, skip_batches=[]))


def judge(gate: Gate, loss: float, norm: float = 1.0, scaler=NO_SCALER) -> int:
    return int(gate.judge(torch.tensor(loss, dtype=torch.float64), torch.tensor(norm), scaler))


def test_a_spike_is_judged_by_the_losses_before_it():
    gate = make_gate(sigmas=3.0, window=4)
    losses = [3.0, 3.2, 2.8, 3.0, 4.0, 3.1, 3.0, 2.9, 3.0, 3.4]
    deviation = math.sqrt((0.2**2 + 0.2**2) / 4)
    assert 4.0 > 3.0 + 3 * deviation
    assert [judge(gate, loss) for loss in losses] == [FINE] * 4 + [SPIKE] + [FINE] * 4 + [SPIKE]
    assert gate.losses() == losses[-4:] and gate.shut == 0


@pytest.mark.parametrize(("loss", "norm"), [(math.nan, 1.0), (math.inf, 1.0), (1.0, math.nan), (1.0, math.inf)])
def test_after_a_non_finite_number_the_gate_is_shut_until_it_is_opened(loss, norm):
    gate = make_gate(sigmas=3.0, window=2)
    assert [judge(gate, 1.0), judge(gate, loss, norm)] == [FINE, NOT_FINITE]
    assert gate.shut == 1 and judge(gate, 2.0) == HELD and gate.shut == 1
    gate.forget_losses()
    assert gate.losses() == [1.0]
    gate.open(gate.losses())
    assert judge(gate, 2.0) == FINE and gate.shut == 0 and gate.losses() == [1.0, 2.0]


def test_with_rollback_a_spike_shuts_the_gate_and_is_not_in_its_window():
    gate = make_gate(sigmas=3.0, window=2, on_spike="rollback")
    assert [judge(gate, loss) for loss in (1.0, 1.1, 9.0, 1.0)] == [FINE, FINE, SPIKE, HELD]
    assert gate.losses() == [1.0, 1.1]


def test_an_fp16_overflow_skips_its_step_and_does_not_hold_the_next():
    gate = make_gate(sigmas=3.0, window=2, on_spike="rollback")
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    assert judge(gate, 1.0, math.inf, scaler) == OVERFLOW and gate.shut == 1
    assert judge(gate, 1.0, 1.0, scaler) == FINE and gate.shut == 0 and gate.losses() == [1.0]
    scaler._scale.fill_(0.5)  # too small a scale to cause an overflow
    assert judge(gate, 1.0, math.inf, scaler) == NOT_FINITE


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("step", [0, 2], ids=["first", "third"])
def test_a_shut_gate_keeps_weights_and_optimizer_state(small, name, step):
    model = small().float()
    optimizer = build_optimizer(model, OptimizerConfig(name, **LRS, **OPTIONS))
    for n in range(step + 1):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        gate = make_gate(sigmas=3.0, window=2)
        if n == step:
            before = [p.detach().clone() for p in model.parameters()]
            states = {p: {k: v.clone() for k, v in state.items()} for p, state in optimizer.state.items()}
            next(model.parameters()).grad.view(-1)[0] = math.nan
            model.blocks[0].attention.wq.weight.grad.view(-1)[3] = math.inf
            assert judge(gate, math.nan) == NOT_FINITE
        update(optimizer, NO_SCALER, factor=1.0, norm=torch.tensor(math.nan if n == step else 1.0), clip=1.0, gate=gate)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            assert torch.equal(value, states[parameter][key] if step else torch.zeros_like(value)), key


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_an_open_gate_changes_nothing(small, name):
    """The weights are bit for bit those without a gate."""
    found = []
    for gate in (None, make_gate(sigmas=3.0, window=2, on_spike="rollback")):
        torch.manual_seed(0)
        model = small().float()
        optimizer = build_optimizer(model, OptimizerConfig(name, **LRS, **OPTIONS))
        for _ in range(3):
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
            update(optimizer, NO_SCALER, factor=0.7, norm=torch.tensor(2.0), clip=1.0, gate=gate)
        found.append([p.detach() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
