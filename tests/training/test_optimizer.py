import copy
import math

import pytest
import torch

from training.optimizer import WIDTH, Muon, OptimizerConfig, build_optimizer, orthogonalised, parameter_groups
from training.step import update

LRS = {"lr": 0.02, "lr_embedding": 0.01, "lr_head": 0.03, "lr_norm": 0.004}


def muon(model, **changes):
    settings = LRS | {"betas": [0.9, 0.95], "eps": 1e-10, "weight_decay": 0.0, "momentum": 0.95} | changes
    return build_optimizer(model, OptimizerConfig("muon", **settings))


def give_gradients(model, scale=1.0):
    for p in model.parameters():
        p.grad = torch.randn_like(p) * scale


def changes(model, optimizer) -> dict[str, torch.Tensor]:
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer.step()
    return {name: p.detach() - before[name] for name, p in model.named_parameters()}


@pytest.mark.parametrize("tied", [False, True])
def test_every_weight_is_in_one_group_and_only_matrices_and_head_decay(small, tied):
    model = small(tied=tied, qk_norm=True, positions="learned")
    names = {id(p): name for name, p in model.named_parameters()}
    kinds = {g["name"]: [names[id(p)] for p in g["params"]] for g in parameter_groups(model, **LRS, weight_decay=0.1)}
    assert sorted(name for group in kinds.values() for name in group) == sorted(names.values())
    assert all(".w" in n or ".gate" in n or ".up" in n or ".down" in n for n in kinds["matrices"])
    assert all("norm" in n for n in kinds["norms"])
    assert kinds["embeddings"] == ["embedding.weight", "position_embedding.table.weight"]
    assert kinds.get("head") == (None if tied else ["head.weight"])
    decays = {g["name"]: g["weight_decay"] for g in parameter_groups(model, **LRS, weight_decay=0.1)}
    assert {name for name, decay in decays.items() if decay} == ({"matrices"} if tied else {"matrices", "head"})


@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 8, 20), (1, 1, 5)])
def test_newton_schulz_keeps_singular_vectors_and_brings_values_near_1(shape):
    x = torch.randn(shape, dtype=torch.float64)
    u, _, v = torch.linalg.svd(x, full_matrices=False)
    core = u.mT @ orthogonalised(x) @ v.mT  # in the coordinates of the singular vectors
    values = core.diagonal(dim1=-2, dim2=-1)
    assert (core - torch.diag_embed(values)).abs().max() < 1e-9
    assert values.min() > 0.5 and values.max() < 1.3


@pytest.mark.parametrize(("dtype", "near"), [(torch.float64, 1e-9), (torch.float32, 1e-3), (torch.bfloat16, 0.1)])
@pytest.mark.parametrize("columns", [24, 70])  # wide matrices are computed in another way
@pytest.mark.parametrize("smallest", [1.0, 1e-2, 1e-5, 0.0])
def test_newton_schulz_is_its_polynomial_of_every_singular_value(dtype, near, smallest, columns):
    """Also for matrices without full rank, and for zero."""
    u, _, v = torch.linalg.svd(torch.randn(4, 24, columns, dtype=torch.float64), full_matrices=False)
    values = torch.linspace(1, smallest, 24, dtype=torch.float64).expand(4, 24).clone()
    values[3] = 0
    expected = values / (values.norm(dim=-1, keepdim=True) + 1e-7)
    for _ in range(5):
        expected = 3.4445 * expected - 4.7750 * expected**3 + 2.0315 * expected**5
    found = orthogonalised((u * values.unsqueeze(1) @ v).to(dtype)).double()
    assert (found - u * expected.unsqueeze(1) @ v).abs().max() < near


def test_muon_moves_every_head_by_lr_however_large_its_gradient(small):
    model = small(d_model=16, n_heads=2, d_ff=24)
    give_gradients(model)
    wq = model.blocks[0].attention.wq.weight
    wq.grad[:8] *= 1e3  # one head's gradients are much larger
    change = changes(model, muon(model))
    for head in change["blocks.0.attention.wq.weight"].view(2, 8, 16):
        values = torch.linalg.svdvals(head) / 0.02
        assert values.min() > 0.3 and values.max() < 1.3
    for head in change["blocks.0.attention.wo.weight"].view(16, 2, 8).unbind(1):
        assert torch.linalg.svdvals(head).max() / 0.02 < 1.3
    up = torch.linalg.svdvals(change["blocks.0.feed_forward.up.weight"]) / 0.02
    assert up.max() / math.sqrt(24 / 16) < 1.3  # a larger update, since it has more outputs than inputs


def test_muon_equals_torchs_muon_on_feed_forward_matrices(small):
    """Over three steps. These matrices are not split into heads; torch's Muon iterates in bfloat16."""
    model = small(d_model=16, n_heads=2, d_ff=24)
    other = copy.deepcopy(model)
    ours = muon(model, weight_decay=0.1)
    theirs = torch.optim.Muon(
        [p for name, p in other.named_parameters() if "feed_forward." in name], lr=0.02, weight_decay=0.1, momentum=0.95
    )
    for _ in range(3):
        give_gradients(model)
        for a, b in zip(model.parameters(), other.parameters(), strict=True):
            b.grad = a.grad.clone()
        ours.step(), theirs.step()
    for (name, a), b in zip(model.named_parameters(), other.parameters(), strict=True):
        if "feed_forward." in name:
            torch.testing.assert_close(a, b, rtol=0, atol=2e-3)


def test_all_other_weights_move_as_with_adamw_each_group_at_its_own_lr(small):
    model = small(d_model=16, n_heads=2, qk_norm=True)
    optimizer = muon(model)
    give_gradients(model)
    change = changes(model, optimizer)
    assert change["embedding.weight"].abs().max() == pytest.approx(0.01, rel=1e-3)
    assert change["norm.weight"].abs().max() == pytest.approx(0.004, rel=1e-3)
    assert change["head.weight"].abs().max() == pytest.approx(0.03 * WIDTH / 16, rel=1e-3)


def test_norm_weights_move_as_with_torchs_adamw(small):
    model = small(qk_norm=True)
    other, optimizer = copy.deepcopy(model), muon(model, weight_decay=0.1)
    norm_weights = [p for name, p in other.named_parameters() if "norm" in name]
    theirs = torch.optim.AdamW(norm_weights, lr=0.004, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0)
    for _ in range(3):
        give_gradients(model)
        for a, b in zip(model.parameters(), other.parameters(), strict=True):
            b.grad = a.grad.clone()
        optimizer.step(), theirs.step()
    for (name, a), b in zip(model.named_parameters(), other.parameters(), strict=True):
        if "norm" in name:
            torch.testing.assert_close(a, b)


def test_the_lr_of_each_group_is_its_initial_lr_times_the_factor(small):
    model = small()
    optimizer, scaler = muon(model), torch.amp.GradScaler("cpu", enabled=False)
    give_gradients(model)
    update(optimizer, scaler, factor=0.5, norm=torch.tensor(1.0), clip=1e9)
    assert [g["lr"] for g in optimizer.param_groups] == [g["initial_lr"] / 2 for g in optimizer.param_groups]
    assert optimizer.param_groups[0]["lr"] == 0.01


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_state_dict_holds_all_that_the_optimizer_needs(small, name):
    """A copy made from weights and state dict takes the same steps."""
    model = small(tied=True)
    settings = LRS | {"betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1, "momentum": 0.9}
    optimizer = build_optimizer(model, OptimizerConfig(name, **settings))
    give_gradients(model), optimizer.step()
    other = copy.deepcopy(model)
    twin = build_optimizer(other, OptimizerConfig(name, **settings))
    twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    give_gradients(model)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        b.grad = a.grad.clone()
    optimizer.step(), twin.step()
    assert isinstance(optimizer, Muon) == (name == "muon")
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
