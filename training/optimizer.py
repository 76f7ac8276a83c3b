"""The optimizers: AdamW, or Muon for the matrices inside blocks and AdamW for the rest."""

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from annotated_types import Ge, Gt, Le, Lt
from einops import rearrange
from torch import Tensor, nn
from torch.optim.adamw import adamw

from model import GPT
from training.distributed import full_tensor, shard_like

WIDTH = 128  # the d_model for which lr_head is given with Muon


def parameter_groups(
    model: GPT, *, lr: float, lr_embedding: float, lr_head: float, lr_norm: float, weight_decay: float
) -> list[dict]:
    """The parameter groups, each with its initial_lr: matrices in blocks, head, embeddings, norms and biases.

    Weight decay applies to matrices and the head; a head tied to the embedding counts as an embedding.
    """
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    kinds: dict[str, list[nn.Parameter]] = {"matrices": [], "head": [], "embeddings": [], "norms": []}
    for parameter in model.parameters():  # yields a shared parameter once
        if id(parameter) in tables:
            kinds["embeddings"].append(parameter)
        elif parameter is model.head.weight:
            kinds["head"].append(parameter)
        else:
            kinds["matrices" if parameter.ndim == 2 else "norms"].append(parameter)
    peaks = {"matrices": lr, "head": lr_head, "embeddings": lr_embedding, "norms": lr_norm}
    return [
        {
            "name": kind,
            "params": parameters,
            "lr": peaks[kind],
            "initial_lr": peaks[kind],
            "weight_decay": weight_decay if kind in ("matrices", "head") else 0.0,
        }
        for kind, parameters in kinds.items()
        if parameters
    ]


Rate = Annotated[float, Gt(0), Le(1e30)]


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer and its initial learning rate for each parameter group, see parameter_groups.

    momentum: Muon's. grad_clip: gradients whose norm, all together, is larger are scaled down to it.
    """

    name: Literal["adamw", "muon"]
    lr: Rate
    lr_embedding: Rate
    lr_head: Rate
    lr_norm: Rate
    betas: list[Annotated[float, Ge(0), Lt(1)]]
    eps: Annotated[float, Gt(0), Le(1)]
    weight_decay: Annotated[float, Ge(0), Le(1e30)]
    momentum: Annotated[float, Ge(0), Lt(1)] | None = None
    grad_clip: Rate = math.inf

    def __post_init__(self):
        if self.name == "muon" and self.momentum is None:
            example = "give for example optimizer=muon"
            raise ValueError(f"optimizer.name=muon needs optimizer.momentum, got null: {example}")
        if len(self.betas) != 2:
            raise ValueError(f"optimizer.betas must be two numbers, got {self.betas}")


def build_optimizer(model: GPT, config: OptimizerConfig, precision: str = "fp32") -> torch.optim.Optimizer:
    """torch's fused AdamW, or Muon, whose matrix products run in bf16 if `precision` is bf16.

    With Muon a learning rate means the same at every width. lr_head is that of d_model WIDTH and falls in proportion to
    the width, since a logit is a sum of d_model products.
    """
    c, betas = config, (config.betas[0], config.betas[1])
    lr_head = c.lr_head * WIDTH / model.config.d_model if c.name == "muon" else c.lr_head
    rates = {"lr": c.lr, "lr_embedding": c.lr_embedding, "lr_head": lr_head, "lr_norm": c.lr_norm}
    groups = parameter_groups(model, **rates, weight_decay=c.weight_decay)
    if c.momentum is None or c.name == "adamw":
        return torch.optim.AdamW(groups, lr=c.lr, betas=betas, eps=c.eps, fused=True)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    return Muon(groups, cuts_by_head(model), lr=c.lr, momentum=c.momentum, betas=betas, eps=c.eps, dtype=dtype)


def cuts_by_head(model: GPT) -> dict[Tensor, tuple[int, int]]:
    """Into how many pieces (down, across) Muon cuts the attention's matrices: each head's part is one matrix."""
    cuts: dict[Tensor, tuple[int, int]] = {}
    for block in model.blocks:
        attention = block.attention
        cuts |= {attention.wq.weight: (attention.n_heads, 1), attention.wo.weight: (1, attention.n_heads)}
        cuts |= {w.weight: (attention.n_kv_heads, 1) for w in (attention.wk, attention.wv)}
    return cuts


def orthogonalised(x: Tensor, nothing: Tensor | float = 0.0) -> Tensor:
    """Orthogonalises matrices x (n rows columns), rows <= columns: brings all singular values close to 1.

    Five Newton-Schulz steps with the coefficients of "Muon" (Jordan, 2024), which do not converge, but bring them to
    0.7 to 1.2 in few steps: x becomes f x, where f = a I + b x x^T + c (x x^T)^2. All n in one batch of products. On a
    CPU in fp32, products are exact enough to multiply the factors f first and x last, which is less work for wide x.
    `nothing`: added to the norm that x is divided by; infinity gives zeros.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7 + nothing)
    wide = x.shape[-1] > 1.5 * x.shape[-2]
    if x.device.type != "cpu" or x.dtype == torch.bfloat16 or not wide:
        for _ in range(5):
            gram = x @ x.mT
            x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
        return x

    def f_of(gram: Tensor) -> Tensor:
        f = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        f.diagonal(dim1=-2, dim2=-1).add_(a)
        return f

    gram = x @ x.mT
    f = fs = f_of(gram)
    for _ in range(4):
        gram = f @ gram @ f  # of f x, since f is symmetric
        f = f_of(gram)
        fs = f @ fs
    return fs @ x


class Muon(torch.optim.Optimizer):
    """Muon (Jordan, 2024) for the group "matrices": orthogonalised updates. AdamW for the other groups.

    Args:
        groups: see parameter_groups.
        cuts: into how many pieces (down, across) a matrix is cut before it is orthogonalised; by default it is not.
        momentum: Nesterov momentum, for the matrices.
        betas, eps: AdamW's, for the other groups.
        dtype: the type in which matrices are orthogonalised.
    """

    def __init__(self, groups: list[dict], cuts: dict, *, lr: float, momentum: float, betas, eps: float, dtype):
        super().__init__(groups, {"lr": lr, "momentum": momentum, "betas": betas, "eps": eps})
        self.cuts, self.dtype = cuts, dtype

    @torch.no_grad()
    def step(self):
        """An update; nothing changes if the attribute `found_inf` is a tensor that holds 1, as GradScaler sets it."""
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            (self._muon if group["name"] == "matrices" else self._adamw)(group, parameters)

    def _muon(self, group: dict, parameters: list[Tensor]):
        batches = defaultdict(list)  # pieces of equal shape, to be orthogonalised together
        shut, momentum, decay = getattr(self, "found_inf", None), group["momentum"], group["lr"] * group["weight_decay"]
        for p in parameters:
            if not self.state[p]:
                self.state[p]["momentum"] = torch.zeros_like(p)
        moments, gradients = [self.state[p]["momentum"] for p in parameters], [p.grad for p in parameters]
        keep, nothing = 1 - decay, 0.0
        if shut is not None:  # 1: no decay, an update of zeros, and a momentum that stays
            closed, keep = shut > 0, 1 - decay * (1 - shut.double())
            nothing = torch.where(closed, math.inf, 0.0)
            gradients = [torch.where(closed, *pair) for pair in zip(moments, gradients, strict=True)]
        torch._foreach_lerp_(moments, gradients, 1 - momentum)
        for i, (p, direction) in enumerate(
            zip(parameters, torch._foreach_lerp(gradients, moments, momentum), strict=True)
        ):
            down, across = self.cuts.get(p, (1, 1))
            pieces = rearrange(full_tensor(direction), "(i r) (j c) -> (i j) r c", i=down, j=across).to(self.dtype)
            tall = pieces.shape[1] > pieces.shape[2]
            batches[pieces.mT.shape[1:] if tall else pieces.shape[1:]].append((i, tall, pieces.mT if tall else pieces))
        for batch in batches.values():
            result = orthogonalised(torch.cat([pieces for _, _, pieces in batch]), nothing)
            for (i, tall, _), o in zip(batch, result.split([len(pieces) for _, _, pieces in batch]), strict=True):
                p = parameters[i]
                down, across = self.cuts.get(p, (1, 1))
                o = rearrange(o.mT if tall else o, "(i j) r c -> (i r) (j c)", i=down, j=across).to(p.dtype)
                rate = group["lr"] * math.sqrt(max(1, p.shape[0] / p.shape[1]))
                p.mul_(keep).add_(shard_like(o, p), alpha=-rate)

    def _adamw(self, group: dict, parameters: list[Tensor]):
        for p in parameters:
            if not self.state[p]:
                zeros = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
                self.state[p].update(step=torch.zeros((), device=p.device), **zeros)
        states = [self.state[p] for p in parameters]
        adamw(
            parameters,
            [p.grad for p in parameters],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            found_inf=getattr(self, "found_inf", None),
            amsgrad=False,
            maximize=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
        )
