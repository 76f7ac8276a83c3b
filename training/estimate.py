"""What a run would need, before it runs: parameters, FLOPs, memory, time and money, by formulas, without its text.

The same formulas answer for two cores and for thousands of GPUs. Bytes, FLOPs and seconds throughout; only `report`
rounds. Memory is that of eager code, beside what torch's profiler finds in tests/training/test_estimate.py; compiled
code keeps less.
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
RESERVED = 2**30  # bytes of a GPU that CUDA, its libraries and fragmentation take, about
GIB = 2**30
OBJECTS = 50_000  # bytes of what Python and torch remember of a block, beside its numbers


def meta_model(vocab_size: int, config: ModelConfig) -> GPT:
    """The model with all of its shapes and none of its numbers (torch's meta device)."""
    with torch.device("meta"):
        return GPT(vocab_size, config)


def size(vocab_size: int, c: ModelConfig) -> tuple[int, int]:
    """Of GPT(vocab_size, c), which is not built: n_parameters(), and the bytes that it takes in memory.

    The values of `c` are believed: they may be any numbers from 1.
    """
    d_kv = c.d_head * (c.n_kv_heads or c.n_heads)
    a_norm = c.d_model * (2 if c.norm == "layernorm" else 1)
    rows = -(-vocab_size // c.vocab_multiple) * c.vocab_multiple
    block = 2 * c.d_model * (c.d_model + d_kv) + (3 if c.feed_forward == "swiglu" else 2) * c.d_model * c.d_ff
    block += 2 * a_norm + (2 * c.d_head if c.qk_norm else 0)
    n = c.n_layers * block + (1 if c.tied else 2) * rows * c.d_model + (2 if c.embedding_norm else 1) * a_norm
    table = c.max_seq_len * c.d_model
    n += table if c.positions == "learned" else 0
    rotary = c.max_seq_len * c.d_head
    a_table = {"rope": rotary, "sinusoidal": table}.get(c.positions, 0)  # made in float64, in three steps
    tables = a_table * (c.n_layers if c.positions == "rope" else 1)
    return n, WEIGHT * (n + tables) + 12 * a_table + OBJECTS * c.n_layers


def least(model: GPT, rows: int, micro_batch: int, seq_len: int) -> int:
    """Bytes that a step needs at least, beside the weights: the batch, the residual stream and the logits, twice."""
    m = model.config
    return 16 * rows * seq_len + 4 * micro_batch * seq_len * (m.d_model * m.n_layers + 2 * model.vocab_size)


def keys_and_values(model: GPT, tokens: int) -> int:
    """Bytes of a cache of so many tokens."""
    m = model.config
    d_kv = m.d_model // m.n_heads * (m.n_kv_heads or m.n_heads)
    return 2 * model.embedding.weight.element_size() * m.n_layers * d_kv * tokens


def available_memory() -> int:
    """Bytes that this process may still take: what the machine has to spare, within the limit of its cgroup."""
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
        for place in (group, ""):  # seen from outside a container, and from inside
            limit = Path(base.get(controllers, "{}").format(place.rstrip("/")))
            if limit.is_file() and (text := limit.read_text().strip()).isdigit():
                room = min(room, int(text))
    return room


def check_fits(what: str, n_bytes: int):
    """ValueError, before anything is allocated, where `what` needs more bytes than this machine has to spare."""
    if n_bytes > (room := available_memory()):
        needs, has = (f"{min(n, 2**80) / GIB:,.1f}" for n in (n_bytes, room))
        raise ValueError(f"{what} needs {needs} GiB of memory, this machine has {has} to spare")


# --- parameters and FLOPs -------------------------------------------------------------------------------------------


def parameters(model: GPT) -> dict[str, int]:
    """Trainable numbers by module, exact: they add up to model.n_parameters(). A tied head has none of its own."""
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

    N counts the matrices that are multiplied: not the embedding and learned positions, which are looked up, but the
    head, tied or not. The second term is attention's whole squares, also where the half above the diagonal is skipped.
    `again`: and the blocks' forward, a third of theirs, once more, as activation checkpointing does.
    """
    blocks = 6 * _count(*model.blocks, matrices_only=True)
    blocks += 12 * len(model.blocks) * model.config.d_model * seq_len
    return blocks + 6 * _count(model.head) + (blocks // 3 if again else 0)


# --- memory ---------------------------------------------------------------------------------------------------------


def block_memory(
    model: GPT, rows: int, seq_len: int, *, half: bool, attention: str, documents: bool, gpu: bool
) -> tuple[int, int, int]:
    """Bytes of one block: what its attention and its feed-forward keep for the backward, and what that works with.

    Read beside model/*.py. `half`: matrix products by autocast in 2 bytes, in which each product keeps its own copy of
    its input; what is computed in fp32 (norms, softmax, the residual stream) keeps 4.
    """
    m = model.config
    tokens, width = rows * seq_len, 2 if half else 4
    d, heads = m.d_model, m.n_heads
    kv_heads = m.n_kv_heads or heads
    d_kv = d // heads * kv_heads
    a_number = 1 if gpu else width  # of dropout's noise
    within = m.dropout if m.attention_dropout is None else m.attention_dropout
    noise, inside = (a_number if share else 0 for share in (m.dropout, within))
    stream = 4 * tokens * d

    def norm(readers: int) -> int:  # its input, that over its rms, the rms; and what is read of its output
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
    elif not gpu and (inside or m.positions == "alibi"):  # the CPU's kernel can neither: torch writes out, in fp32
        kept += square * 4 * (3 if inside else 1) + (4 - width) * tokens * (d + 2 * d_kv) + 8 * tokens * (d - d_kv)
        working = 8 * square
    else:
        kept += 4 * tokens * heads  # the logarithms of softmax's sums
        if m.positions == "rope":
            kept += width * tokens * d  # the kernel keeps its result as RoPE laid q out, wo reads it by token
        if m.positions == "alibi":
            kept += width * heads * seq_len**2
        elif documents or m.window:
            kept += width * (rows if documents else 1) * seq_len**2

    inner = width * tokens * m.d_ff
    gated = m.feed_forward == "swiglu"
    kept_by_feed_forward = norm(readers=2 if gated else 1) + noise * tokens * d + inner * (4 if gated else 2)
    # the backward begins with the feed-forward; what that kept is gone when attention works
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
    """Bytes on one device at the moments of a step that may need most, by what they are for; from the second step on.

    rows: of a step, on this device; they pass micro_batch at a time. documents: packing, which needs a mask.
    optimizer: AdamW keeps two moments of every weight, Muon one of the matrices in blocks, of which it makes copies.

    activation_checkpointing: a block keeps its input, and while its backward runs all it would have kept.
    parallel, in a world of several devices: "ddp" holds everything on each; "fsdp" weights, gradients and optimizer
    in shares; whole are, in `precision`, the matrices of a block and of the next, in fp32 what is outside them, the
    gradient of the larger of both, and all gradients where micro-batches add up before they are exchanged (see
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
    ends = 2 * stream + 4 * tokens + (stream // 2 if half else stream)  # the last norm and what the head reads
    begin = batch + (stream // (4 if gpu else 1) if m.dropout else 0)
    if m.embedding_norm:
        begin += 2 * stream + 4 * tokens

    # autocast's copies of matrices: products keep them for the backward; FSDP's in blocks are gathered in that type
    copies, of_block = 2 if half else 0, 0 if sharded else in_block
    cast = copies * (n_head + of_block * len(model.blocks))
    all_copies = copies * n_head if activation_checkpointing else cast

    def gradients(done: int, waiting: int = 0) -> int:
        """Bytes of so many parameters' gradients; where they add up, of all, and of those that wait to be added."""
        if rows > micro_batch:
            return WEIGHT * (n + waiting)
        if world > 1 and not sharded:
            return WEIGHT * n  # in the buckets in which they travel, which stay
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
            "logits": (10 if half else 8) * logits,  # as they come, in fp32, and their log-softmax
        },
        "backward of the loss": {
            "gradients": gradients(0),
            "copies": all_copies,
            "activations": begin + blocks + ends,
            "logits": 12 * logits,  # their log-softmax, the gradients behind and before it, fp32
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
    """The moment that needs most, and how much."""
    return max(((moment, sum(sizes.values())) for moment, sizes in moments.items()), key=lambda pair: pair[1])


def what_fits(model: GPT, room: float, *, rows: int, world: int, gpu: bool, **settings) -> dict | None:
    """Settings under which a step of `rows` rows, of all devices together, would fit into `room` bytes on each.

    Those that change least: a smaller micro-batch, the largest that fits; activation checkpointing too; the same in
    shares, by FSDP, on as many devices or on more. None if none of these helps.
    """
    parallel, checkpointing = settings.pop("parallel"), settings.pop("activation_checkpointing")
    spreads = [(world, parallel), *((n, "fsdp") for n in auto.divisors(rows) if n >= max(world, 2))]
    for n, how in spreads:
        share = rows // n
        for again in sorted({checkpointing, True}):
            for micro_batch in reversed(auto.divisors(share)):
                changed = {"world": n, "parallel": how, "activation_checkpointing": again, "micro_batch": micro_batch}
                if at_peak(memory(model, rows=share, gpu=gpu, **settings, **changed))[1] <= room:
                    return changed
    return None


# --- the whole ------------------------------------------------------------------------------------------------------


def report(cfg: "Train", vocab_size: int, vocabulary: str) -> str:
    """The answer to "will it fit, how long, how much", as a plain table.

    vocabulary: where its size comes from.
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

    if gpu and cfg.micro_batch == "auto":  # as training finds it there, by trial
        sizes = reversed(auto.divisors(micro_batch))
        micro_batch = next((n for n in sizes if at_peak(moments_with(n))[1] <= room), 1)
    moments, fit = moments_with(micro_batch), None
    if at_peak(moments)[1] > room:
        fit = what_fits(model, room, rows=rows, world=world, gpu=gpu, **plan)

    speed = spec.flops(precision)
    computed = flops_per_token(model, seq_len, again=cfg.activation_checkpointing) * cfg.batch_tokens * steps
    seconds = computed / (speed * cfg.mfu * world)

    pieces = f"{rows // world // micro_batch:,} x {micro_batch:,}"
    more = "activation checkpointing computes a third more" if cfg.activation_checkpointing else ""
    how = f"{precision}, {choices.attention} attention, eager" + (f", {cfg.parallel}" if world > 1 else "")
    devices = f"{world:,} x {spec.name}" if world > 1 else spec.name
    lines = [
        "parameters",
        *(_row(name, f"{n:,}") for name, n in parameters(model).items() if n),
        _row("all", f"{model.n_parameters():,}", f"vocabulary {vocab_size:,} ({vocabulary})"),
        "",
        "work",
        _row("tokens a step", f"{cfg.batch_tokens:,}", f"{rows:,} rows of {seq_len:,}; a device takes {pieces}"),
        _row("steps", f"{steps:,}", f"{steps * cfg.batch_tokens:,} tokens; evaluation not counted"),
        _row("FLOPs a token", f"{flops:,}", "6 N + 12 n_layers d_model seq_len, N without the embedding"),
        _row("FLOPs", f"{total:.3e}", more),
        "",
        f"memory of a device in GiB, at its peak (the {at_peak(moments)[0]}; {how})",
        *_memory_rows(moments, room, f"{spec.name} has {spec.memory / GIB:,.1f}" + ", 1 of it reserved" * gpu),
    ]
    if at_peak(moments)[1] > room:
        changes = [f"{name}={str(value).lower()}" for name, value in (fit or {}).items() if getattr(cfg, name) != value]
        nothing = "nothing of these settings helps: take a smaller model, or a shorter seq_len"
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
    "gathered": "of FSDP: what is whole for a while",
    "gradients": "fp32",
    "copies": "of the matrices, in 2 bytes, for autocast",
    "activations": "what the backward needs again",
    "logits": "of a micro-batch, and what the loss makes of them",
    "working": "what an operation needs while it runs",
}


def _memory_rows(moments: dict[str, dict[str, int]], room: float, has: str) -> list[str]:
    moment, need = at_peak(moments)
    sizes = moments[moment]
    rows = [_row(name, f"{sizes[name] / GIB:,.3f}", what) for name, what in WHAT.items() if sizes.get(name)]
    most = {name: max(some.get(name, 0) for some in moments.values()) for name in ("gradients", "logits")}
    elsewhere = [f"{name} {n / GIB:,.3f}" for name, n in most.items() if n > sizes.get(name, 0)]
    rows.append(_row("all", f"{need / GIB:,.3f}", "at another moment: " + ", ".join(elsewhere) if elsewhere else ""))
    if need <= room:
        return [*rows, _row("fits", f"{(room - need) / GIB:,.3f}", f"to spare: {has}")]
    return [*rows, _row("TOO MUCH", f"{(need - room) / GIB:,.3f}", f"too many: {has}")]


def _row(name: str, value: str, note: str = "") -> str:
    return f"  {name:<14}{value:>22}  {note}".rstrip()


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.2f} s"
    if seconds >= 48 * 3600:
        return f"{seconds / 86400:,.1f} days"
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02} h"
