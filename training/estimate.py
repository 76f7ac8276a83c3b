"""Estimates what a run needs before it starts: parameters, FLOPs, memory, time and cost. Formulas only; reads no text.

The same formulas serve two cores and thousands of GPUs. Units are bytes, FLOPs and seconds throughout; only `report`
rounds. Memory is that of eager code, compared with torch's profiler in tests/training/test_estimate.py; compiled code
keeps less.
"""

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from model import GPT, ModelConfig
from training import auto

if TYPE_CHECKING:
    from conf.schema import Train

WEIGHT = 4  # bytes: weights, gradients and both moments of AdamW are fp32
RESERVED = 2**30  # bytes of a GPU for CUDA, its libraries and fragmentation, about
GIB = 2**30
OBJECTS = 50_000  # bytes of Python and torch objects per block, besides its weights


def meta_model(vocab_size: int, config: ModelConfig) -> GPT:
    """The model on torch's meta device: shapes without numbers."""
    with torch.device("meta"):
        return GPT(vocab_size, config)


def size(vocab_size: int, c: ModelConfig) -> tuple[int, int]:
    """(n_parameters, bytes in memory) of GPT(vocab_size, c), without building it. The values of `c` are not checked."""
    d_kv = c.d_head * (c.n_kv_heads or c.n_heads)
    a_norm = c.d_model * (2 if c.norm == "layernorm" else 1)
    rows = -(-vocab_size // c.vocab_multiple) * c.vocab_multiple
    block = 2 * c.d_model * (c.d_model + d_kv) + (3 if c.feed_forward == "swiglu" else 2) * c.d_model * c.d_ff
    block += 2 * a_norm + (2 * c.d_head if c.qk_norm else 0)
    n = c.n_layers * block + (1 if c.tied else 2) * rows * c.d_model + (2 if c.embedding_norm else 1) * a_norm
    table = c.max_seq_len * c.d_model
    n += table if c.positions == "learned" else 0
    rotary = c.max_seq_len * c.d_head
    a_table = {"rope": rotary, "sinusoidal": table}.get(c.positions, 0)  # computed in float64, in three steps
    tables = a_table * (c.n_layers if c.positions == "rope" else 1)
    return n, WEIGHT * (n + tables) + 12 * a_table + OBJECTS * c.n_layers


def min_step_memory(model: GPT, rows: int, micro_batch: int, seq_len: int) -> int:
    """Bytes that a step needs at least, besides the weights: the batch, the residual stream and twice the logits."""
    m = model.config
    return 16 * rows * seq_len + 4 * micro_batch * seq_len * (m.d_model * m.n_layers + 2 * model.vocab_size)


def keys_and_values(model: GPT, tokens: int) -> int:
    """Bytes of the KV cache of `tokens` tokens."""
    m = model.config
    d_kv = m.d_model // m.n_heads * (m.n_kv_heads or m.n_heads)
    return 2 * model.embedding.weight.element_size() * m.n_layers * d_kv * tokens


def available_memory() -> int:
    """Bytes that this process may still allocate: the machine's free memory, within the limit of its cgroup."""
    try:
        lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
        free = {line[0]: 1024 * int(line[1]) for line in lines if len(line) == 3}
        room = free["MemAvailable:"] + free.get("SwapFree:", 0)
    except (OSError, KeyError):  # not Linux
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        groups = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    except OSError:
        groups = []
    for _, controllers, group in groups:
        base = {"": "/sys/fs/cgroup{}/memory.max", "memory": "/sys/fs/cgroup/memory{}/memory.limit_in_bytes"}
        for place in (group, ""):  # as seen from outside a container, and from inside
            limit = Path(base.get(controllers, "{}").format(place.rstrip("/")))
            if limit.is_file() and (text := limit.read_text().strip()).isdigit():
                room = min(room, int(text))
    return room


def check_fits(what: str, n_bytes: int):
    """ValueError, before anything is allocated, if `what` needs more bytes than this machine has free."""
    if n_bytes > (room := available_memory()):
        needs, has = (f"{min(n, 2**80) / GIB:,.1f}" for n in (n_bytes, room))
        raise ValueError(f"{what} needs {needs} GiB of memory, this machine has {has} GiB free")


# --- parameters and FLOPs -------------------------------------------------------------------------------------------


def parameters(model: GPT) -> dict[str, int]:
    """Parameters by module, exact: they add up to model.n_parameters(). A tied head has none of its own."""
    blocks = model.blocks
    norms = (norm for block in blocks for norm in (block.attention_norm, block.feed_forward_norm))
    return {
        "embedding": _count(model.embedding),
        "positions": 0 if model.position_embedding is None else _count(model.position_embedding),
        "attention": _count(*(block.attention for block in blocks)),
        "feed forward": _count(*(block.feed_forward for block in blocks)),
        "norms": _count(model.norm, *norms),
        "head": 0 if model.config.tied else _count(model.head),
    }


def _count(*modules: nn.Module, matrices_only: bool = False) -> int:
    return sum(p.numel() for m in modules for p in m.parameters() if p.ndim == 2 or not matrices_only)


def flops_per_token(model: GPT, seq_len: int, *, again: bool = False) -> int:
    """6 N + 12 n_layers d_model seq_len, forward and backward: appendix B of "PaLM" (2022).

    N counts the weights of matrix products: the head, tied or not, but not the embedding and learned positions, which
    are looked up. The second term is attention's full square, even where the half above the diagonal is skipped.
    `again`: plus the blocks' forward once more, a third of theirs, as activation checkpointing computes it.
    """
    blocks = 6 * _count(*model.blocks, matrices_only=True)
    blocks += 12 * len(model.blocks) * model.config.d_model * seq_len
    return blocks + 6 * _count(model.head) + (blocks // 3 if again else 0)


# --- memory ---------------------------------------------------------------------------------------------------------


def block_memory(
    model: GPT, rows: int, seq_len: int, *, half: bool, attention: str, documents: bool, gpu: bool
) -> tuple[int, int, int]:
    """Bytes of one block: kept for the backward by attention and by the feed-forward, and used while the backward runs.

    Mirrors model/*.py. `half`: autocast runs matrix products in 2 bytes, and each keeps its own copy of its input; what
    is computed in fp32 (norms, softmax, the residual stream) keeps 4.
    """
    m = model.config
    tokens, width = rows * seq_len, 2 if half else 4
    d, heads = m.d_model, m.n_heads
    kv_heads = m.n_kv_heads or heads
    d_kv = d // heads * kv_heads
    a_number = 1 if gpu else width  # bytes per element of a dropout mask
    within = m.dropout if m.attention_dropout is None else m.attention_dropout
    noise, inside = (a_number if p else 0 for p in (m.dropout, within))
    stream = 4 * tokens * d

    def norm(readers: int) -> int:  # keeps its input, the input over its rms, the rms; each reader keeps the output
        return 2 * stream + 4 * tokens + (readers * stream // 2 if half else stream)

    kept = norm(readers=3)
    kept += width * tokens * (2 * d + 2 * d_kv)  # q, k, v and what comes out of them
    kept += noise * tokens * d
    if m.qk_norm:
        kept += 8 * tokens * (d + d_kv) + 4 * tokens * (heads + kv_heads)
    if m.positions == "rope":
        kept += 8 * seq_len * d // heads  # cos and sin, for q and for k
    square = rows * heads * seq_len**2  # attention's weights, a number each
    working = 0
    if attention == "math":  # exponentials in fp32, a boolean mask, the weights
        kept += square * (4 + 1 + width + inside + (width if m.soft_cap else 0))
        kept += 2 * width * tokens * (d - d_kv)  # a key and value for each query head
        working = 16 * square
    elif not gpu and (inside or m.positions == "alibi"):  # the CPU's kernel supports neither: torch's math path, fp32
        kept += square * 4 * (3 if inside else 1) + (4 - width) * tokens * (d + 2 * d_kv) + 8 * tokens * (d - d_kv)
        working = 8 * square
    else:
        kept += 4 * tokens * heads  # the logarithms of softmax's sums
        if m.positions == "rope":
            kept += width * tokens * d  # the kernel keeps its result in q's layout, wo reads it by token
        if m.positions == "alibi":
            kept += width * heads * seq_len**2
        elif documents or m.window:
            kept += width * (rows if documents else 1) * seq_len**2

    inner = width * tokens * m.d_ff
    gated = m.feed_forward == "swiglu"
    kept_by_feed_forward = norm(readers=2 if gated else 1) + noise * tokens * d + inner * (4 if gated else 2)
    # the backward starts with the feed-forward; what that kept is free when attention's backward runs
    return kept, kept_by_feed_forward, max(2 * inner + 2 * stream, working + 3 * stream - kept_by_feed_forward)


def memory(
    model: GPT,
    *,
    rows: int,
    micro_batch: int,
    seq_len: int,
    precision: str,
    attention: str,
    documents: bool,
    gpu: bool,
    world: int = 1,
    parallel: str = "ddp",
    activation_checkpointing: bool = False,
    optimizer: str = "adamw",
) -> dict[str, dict[str, int]]:
    """Bytes on one device at the moments of a step that may be its peak, by purpose; from the second step on.

    rows: of a step, on this device, computed micro_batch at a time. documents: packing=documents, which needs a mask.
    optimizer: AdamW keeps two moments per weight; Muon keeps one per weight of the matrices in blocks, and copies them.

    activation_checkpointing: a block keeps its input only, and everything while its own backward runs.
    parallel, with several devices: "ddp" holds everything on each; "fsdp" shards weights, gradients and optimizer
    state. Gathered are then the matrices of a block and of the next in `precision`, everything outside the blocks in
    fp32, the gradient of the larger of the two, and all gradients if micro-batches accumulate before the exchange (see
    distributed.synchronised).
    """
    m, half, sharded = model.config, precision != "fp32", parallel == "fsdp" and world > 1
    width, tokens = 2 if half else 4, micro_batch * seq_len
    n, n_block, n_head = model.n_parameters(), _count(model.blocks[0]), _count(model.head)
    n_outside = n - n_block * len(model.blocks)
    in_block = _count(model.blocks[0], matrices_only=True)
    stream, batch, logits = 4 * tokens * m.d_model, 16 * rows * seq_len, tokens * n_head // m.d_model

    *kept, working = block_memory(
        model, micro_batch, seq_len, half=half, attention=attention, documents=documents, gpu=gpu
    )
    block = sum(kept)
    blocks = len(model.blocks) * (stream if activation_checkpointing else block)
    recomputed = block - stream if activation_checkpointing else 0
    ends = 2 * stream + 4 * tokens + (stream // 2 if half else stream)  # the last norm and the head's input
    begin = batch + (stream // (4 if gpu else 1) if m.dropout else 0)
    if m.embedding_norm:
        begin += 2 * stream + 4 * tokens

    # autocast's copies of matrices, kept for the backward; FSDP gathers those in blocks in that type already
    copies, of_block = 2 if half else 0, 0 if sharded else in_block
    cast = copies * (n_head + of_block * len(model.blocks))
    all_copies = copies * n_head if activation_checkpointing else cast

    def gradients(done: int, waiting: int = 0) -> int:
        """Bytes of the gradients of `done` parameters; if they accumulate, of all and of those `waiting`."""
        if rows > micro_batch:
            return WEIGHT * (n + waiting)
        if world > 1 and not sharded:
            return WEIGHT * n  # DDP's buckets, which persist
        return WEIGHT * (n // world if sharded else done)

    orthogonal = in_block * len(model.blocks) if optimizer == "muon" else 0
    fixed = {"weights": WEIGHT * n, "optimizer": WEIGHT * (2 * n - orthogonal)}
    if sharded:
        fixed = {name: size // world for name, size in fixed.items()}
        n_rest = n - in_block * len(model.blocks)
        fixed["gathered"] = WEIGHT * n_rest + width * 2 * in_block + WEIGHT * max(in_block, n_rest)
    tied = n_head if m.tied else 0  # the head's gradient waits for the embedding's
    moments = {
        "end of the forward": {
            "gradients": gradients(0),
            "copies": cast,
            "activations": begin + blocks + ends,
            "logits": (10 if half else 8) * logits,  # as computed, in fp32, and their log-softmax
        },
        "backward of the loss": {
            "gradients": gradients(0),
            "copies": all_copies,
            "activations": begin + blocks + ends,
            "logits": 12 * logits,  # their log-softmax and the gradients on both sides of it, fp32
        },
        "backward of the head": {
            "gradients": gradients(n_head, waiting=n_head),
            "copies": all_copies + copies * n_head,
            "activations": begin + blocks + ends,
            "logits": width * logits,
            "working": stream,
        },
        "backward of the last block": {
            "gradients": gradients(n_head, waiting=tied),
            "copies": max(all_copies - copies * n_head, copies * of_block),
            "activations": begin + blocks + recomputed,
            "working": working,
        },
        "backward of the first block": {
            "gradients": gradients(n - n_outside + n_head - n_block, waiting=tied),
            "copies": copies * of_block,
            "activations": begin + block,
            "working": working,
        },
        "backward of the embedding": {
            "gradients": gradients(n + tied, waiting=n_head + tied),
            "activations": begin,
            "working": 2 * stream,
        },
        "update": {"gradients": gradients(n), "activations": batch, "working": 3 * WEIGHT * orthogonal},
    }
    return {moment: fixed | sizes for moment, sizes in moments.items()}


def at_peak(moments: dict[str, dict[str, int]]) -> tuple[str, int]:
    """The moment of peak memory, and its bytes."""
    return max(((moment, sum(sizes.values())) for moment, sizes in moments.items()), key=lambda pair: pair[1])


def what_fits(model: GPT, room: float, *, rows: int, world: int, gpu: bool, **settings) -> dict | None:
    """Settings with which a step of `rows` rows, on all devices together, fits into `room` bytes on each.

    Changes as little as possible: the largest micro-batch that fits; then activation checkpointing; then FSDP, on as
    many devices or on more. None if nothing helps.
    """
    parallel, checkpointing = settings.pop("parallel"), settings.pop("activation_checkpointing")
    spreads = [(world, parallel), *((n, "fsdp") for n in auto.divisors(rows) if n >= max(world, 2))]
    for n, how in spreads:
        rows_each = rows // n
        for again in sorted({checkpointing, True}):
            for micro_batch in reversed(auto.divisors(rows_each)):
                changed = {"world": n, "parallel": how, "activation_checkpointing": again, "micro_batch": micro_batch}
                if at_peak(memory(model, rows=rows_each, gpu=gpu, **settings, **changed))[1] <= room:
                    return changed
    return None


# --- the report -----------------------------------------------------------------------------------------------------


def report(cfg: "Train", vocab_size: int, vocabulary: str) -> str:
    """The answer to "will it fit, how long will it take, what will it cost", as a plain table.

    vocabulary: where vocab_size comes from.
    """
    spec, world, seq_len, rows = cfg.device_spec, cfg.world, cfg.seq_len, cfg.batch_tokens // cfg.seq_len
    if rows % world:
        raise ValueError(
            f"world must divide the {rows} rows of a batch (batch_tokens / seq_len), got {world}: "
            f"batch_tokens={-(-rows // world) * world * seq_len} would do"
        )
    gpu = spec.kind == "gpu"
    model = meta_model(vocab_size, cfg.model)
    assert cfg.steps is not None  # with dry_run
    steps = min(cfg.steps, cfg.stop_after or cfg.steps)
    flops = flops_per_token(model, seq_len)
    total = flops * cfg.batch_tokens * steps
    precision = cfg.precision
    if precision == "auto":
        precision = "fp32" if spec.flops_bf16 is None else "bf16"
    choices = auto.choose(
        replace(cfg, precision=precision, kernels=False),
        device=torch.device("cuda" if gpu else "cpu"),
        rows=rows // world,
        seq_len=seq_len,
        vocab_size=vocab_size,
        soft_cap=cfg.model.soft_cap,
        flops=total,
        saved={},
    )
    plan = {name: getattr(cfg, name) for name in ("seq_len", "parallel", "activation_checkpointing")}
    plan["optimizer"] = cfg.optimizer.name
    plan |= {"precision": precision, "attention": choices.attention, "documents": cfg.packing == "documents"}
    room, micro_batch = spec.memory - (RESERVED if gpu else 0), choices.micro_batch

    def moments_with(micro_batch: int) -> dict[str, dict[str, int]]:
        return memory(model, rows=rows // world, micro_batch=micro_batch, world=world, gpu=gpu, **plan)

    if gpu and cfg.micro_batch == "auto":  # which training finds by trial
        sizes = reversed(auto.divisors(micro_batch))
        micro_batch = next((n for n in sizes if at_peak(moments_with(n))[1] <= room), 1)
    moments, fit = moments_with(micro_batch), None
    if at_peak(moments)[1] > room:
        fit = what_fits(model, room, rows=rows, world=world, gpu=gpu, **plan)

    speed = spec.flops(precision)
    computed = flops_per_token(model, seq_len, again=cfg.activation_checkpointing) * cfg.batch_tokens * steps
    seconds = computed / (speed * cfg.mfu * world)

    pieces = f"{rows // world // micro_batch:,} x {micro_batch:,}"
    more = "plus a third for activation checkpointing" if cfg.activation_checkpointing else ""
    how = f"{precision}, {choices.attention} attention, eager" + (f", {cfg.parallel}" if world > 1 else "")
    devices = f"{world:,} x {spec.name}" if world > 1 else spec.name
    lines = [
        "parameters",
        *(_row(name, f"{n:,}") for name, n in parameters(model).items() if n),
        _row("all", f"{model.n_parameters():,}", f"vocabulary {vocab_size:,} ({vocabulary})"),
        "",
        "work",
        _row("tokens/step", f"{cfg.batch_tokens:,}", f"{rows:,} rows of {seq_len:,}; each device computes {pieces}"),
        _row("steps", f"{steps:,}", f"{steps * cfg.batch_tokens:,} tokens; evaluation not counted"),
        _row("FLOPs/token", f"{flops:,}", "6 N + 12 n_layers d_model seq_len, N without the embedding"),
        _row("FLOPs", f"{total:.3e}", more),
        "",
        f"peak memory of a device in GiB (in the {at_peak(moments)[0]}; {how})",
        *_memory_rows(moments, room, f"{spec.name} has {spec.memory / GIB:,.1f}" + ", 1 of it reserved" * gpu),
    ]
    if at_peak(moments)[1] > room:
        changes = [f"{name}={str(value).lower()}" for name, value in (fit or {}).items() if getattr(cfg, name) != value]
        nothing = "no such setting helps: give a smaller model or a shorter seq_len"
        lines.append(_row("what fits", "", " ".join(changes) or nothing))
    lines += [
        "",
        f"time and cost of {devices}, at {cfg.mfu:.0%} of {speed / 1e12:,.4g} TFLOP/s each (mfu, an assumption)",
        _row("time", _duration(seconds)),
        _row("device hours", f"{seconds * world / 3600:,.2f}"),
    ]
    if (price := spec.price_per_hour) is not None:
        cost = seconds * world / 3600 * price
        lines.append(_row("cost", f"{cost:,.2f}", f"USD, at {price:,.2f} an hour (device_spec.price_per_hour)"))
    return "\n".join(lines)


WHAT = {
    "weights": "fp32",
    "optimizer": "moments, fp32",
    "gathered": "what FSDP gathers while it is used",
    "gradients": "fp32",
    "copies": "of the matrices, in 2 bytes, for autocast",
    "activations": "kept for the backward",
    "logits": "of a micro-batch, and the loss's intermediate results",
    "working": "of an operation while it runs",
}


def _memory_rows(moments: dict[str, dict[str, int]], room: float, has: str) -> list[str]:
    moment, need = at_peak(moments)
    sizes = moments[moment]
    rows = [_row(name, f"{sizes[name] / GIB:,.3f}", what) for name, what in WHAT.items() if sizes.get(name)]
    most = {name: max(at.get(name, 0) for at in moments.values()) for name in ("gradients", "logits")}
    elsewhere = [f"{name} {n / GIB:,.3f}" for name, n in most.items() if n > sizes.get(name, 0)]
    rows.append(_row("all", f"{need / GIB:,.3f}", "at another moment: " + ", ".join(elsewhere) if elsewhere else ""))
    if need <= room:
        return [*rows, _row("fits", f"{(room - need) / GIB:,.3f}", f"free: {has}")]
    return [*rows, _row("TOO MUCH", f"{(need - room) / GIB:,.3f}", f"over: {has}")]


def _row(name: str, value: str, note: str = "") -> str:
    return f"  {name:<14}{value:>22}  {note}".rstrip()


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.2f} s"
    if seconds >= 48 * 3600:
        return f"{seconds / 86400:,.1f} days"
    total = round(seconds)
    return f"{total // 3600}:{total // 60 % 60:02}:{total % 60:02} h"
