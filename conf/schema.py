"""What may be set: the types, ranges and rules of every value in conf/*.yaml, and the one place that checks them.

No defaults here: a value is written once, in YAML. `parse` turns what Hydra composed into these dataclasses, before
anything is read or built, and says in one line what is wrong.
"""

import difflib
import math
import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from os.path import expanduser
from typing import get_args

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException


def number(*, at_least=None, above=None, at_most=None, below=None):
    """A field whose value (or every value of a list or a mapping) lies in a range; NaN lies in none."""
    return field(metadata={"at least": at_least, "above": above, "at most": at_most, "below": below})


def count(at_least: int = 1, at_most: int = 10**12):
    """A field of whole numbers, none of which is so large that what is computed with it would overflow."""
    return number(at_least=at_least, at_most=at_most)


def a_name():
    """A field that names something, a file say: a text that is not empty and holds no control characters."""
    return field(metadata={"a name": True})


def a_path():
    """A field that names a file or folder, or several: ~ and ~user stand for a home folder."""
    return field(metadata={"a name": True, "a path": True})


def one_of(*choices: str):
    """A field that holds one of some words."""
    return field(metadata={"choices": choices})


@dataclass
class Model:
    d_model: int = count(at_most=2**24)
    n_layers: int = count(at_most=10_000)
    n_heads: int = count(at_most=2**24)
    n_kv_heads: int | None = count(at_most=2**24)
    d_ff: int = count(at_most=2**24)
    max_seq_len: int = count(at_most=2**30)
    positions: str = one_of("rope", "learned", "sinusoidal", "alibi", "none")
    theta: float = number(above=1, at_most=1e15)
    pairing: str = one_of("half", "interleaved")
    rope_scaling: str | None = one_of("interpolation", "ntk", "yarn")
    rope_factor: float = number(at_least=1, at_most=1e6)
    norm: str = one_of("rmsnorm", "layernorm")
    norm_eps: float = number(above=0, at_most=1)
    feed_forward: str = one_of("swiglu", "gelu", "relu2")
    qk_norm: bool
    soft_cap: float | None = number(at_least=1e-6, at_most=1e6)
    window: int | None = count()
    dropout: float = number(at_least=0, below=1)
    attention_dropout: float | None = number(at_least=0, below=1)
    tied: bool
    embedding_norm: bool
    zero_init: bool
    vocab_multiple: int = count(at_most=2**24)


@dataclass
class Data:
    source: str = one_of("shakespeare", "files", "hub", "tokens", "corpus", "mixture")
    paths: list[str] = a_path()
    separator: str | None
    column: str = a_name()
    messages_column: str | None = a_name()
    prompt_column: str | None = a_name()
    answer_column: str | None = a_name()
    template: dict[str, str]
    encoding_errors: str = one_of("strict", "replace")
    wheel: str | None = a_path()
    repo: str | None = a_name()
    config: str | None = a_name()
    split: str = a_name()
    revision: str | None = a_name()
    corpora: dict[str, float] | None = number(above=0, at_most=1e12)
    max_tokens: int | None = count(at_most=10**15)
    validation: list[str] = a_path()
    validation_share: float = number(above=0, below=1)
    prompt: str


@dataclass
class Tokenizer:
    kind: str = one_of("bpe", "bytes", "chars", "tiktoken", "json", "saved")
    vocab_size: int | None = count(at_least=257, at_most=2**24)
    pattern: str | None
    special: list[str]
    parse_special: bool
    train_chars: int = count(at_most=10**15)
    encoding: str | None = a_name()
    path: str | None = a_path()
    beginning: str | None


@dataclass
class Optimizer:
    name: str = one_of("adamw", "muon")
    lr: float = number(above=0, at_most=1e30)
    lr_embedding: float = number(above=0, at_most=1e30)
    lr_head: float = number(above=0, at_most=1e30)
    lr_gain: float = number(above=0, at_most=1e30)
    momentum: float | None = number(at_least=0, below=1)
    betas: list[float] = number(at_least=0, below=1)
    eps: float = number(above=0, at_most=1)
    weight_decay: float = number(at_least=0, at_most=1e30)
    clip: float = number(above=0, at_most=1e30)


@dataclass
class Schedule:
    decay: str = one_of("cosine", "linear", "wsd", "constant")
    warmup: int = count(at_least=0)
    cooldown: float = number(above=0, at_most=1)
    final: float = number(at_least=0, at_most=1)


@dataclass
class Every:
    log: int = count()
    evaluate: int = count()
    sample: int = count()
    checkpoint: int = count()


@dataclass
class Sample:
    prompt: str
    tokens: int = count(at_most=100_000)
    temperature: float = number(at_least=0, at_most=1e6)
    top_k: int | None = count()
    top_p: float | None = number(above=0, at_most=1)


@dataclass
class Tracking:
    mode: str = one_of("auto", "online", "offline", "disabled")
    project: str | None = a_name()
    name: str | None = a_name()
    timeout: float = number(above=0, at_most=1e6)
    finish_timeout: float = number(above=0, at_most=1e6)
    artifacts: bool


@dataclass
class DeviceSpec:
    """A device as its maker and its renters describe it, for estimates and for the mfu of a run on it."""

    name: str = a_name()
    kind: str = one_of("gpu", "cpu")
    flops_bf16: float | None = number(above=0, at_most=1e24)
    flops_fp32: float = number(above=0, at_most=1e24)
    memory: float = number(above=0, at_most=1e18)
    price_per_hour: float | None = number(at_least=0, at_most=1e9)


@dataclass
class Train:
    """Everything that `python train.py` can be told."""

    name: str = a_name()
    steps: int | None = count()
    epochs: float | None = number(above=0, at_most=1e6)
    stop_after: int | None = count()
    seed: int = count(at_least=0, at_most=2**62)
    device: str = a_name()
    precision: str = one_of("auto", "fp32", "bf16", "fp16")
    kernels: bool | str
    compile: bool | str
    attention: str = one_of("auto", "fused", "written")
    batch_tokens: int = count()
    micro_batch: int | str
    seq_len: int = count(at_most=2**30)
    seq_len_warmup: float = number(at_least=0, at_most=1)
    packing: str = one_of("stream", "documents")
    evaluation_tokens: int | None = count(at_most=10**15)
    dry_run: bool
    world: int = count(at_most=10**7)
    mfu: float = number(above=0, at_most=1)
    device_spec: DeviceSpec
    resume: str | None = a_path()
    init_from: str | None = a_path()
    keep: int | None = count()
    max_time: str | None
    patience: int | None = count()
    deterministic: bool
    on_nonfinite: str = one_of("stop", "skip")
    max_skips: int = count()
    on_spike: str = one_of("count", "rollback")
    spike_sigmas: float = number(above=0, at_most=1e30)
    spike_window: int = count(at_least=2, at_most=10**6)
    skip_batches: list[int] = count(at_least=0)
    parallel: str = one_of("ddp", "fsdp")
    activation_checkpointing: bool
    rank_timeout: float = number(above=0, at_most=1e7)
    every: Every
    model: Model
    data: Data
    tokenizer: Tokenizer
    optimizer: Optimizer
    schedule: Schedule
    sample: Sample
    tracking: Tracking


@dataclass
class Generate:
    """Everything that `python -m scripts.generate` can be told."""

    checkpoint: str = a_path()
    prompt: str | None
    prompt_file: str | None = a_path()
    prompts_file: str | None = a_path()
    interactive: bool
    num_samples: int = count(at_most=10**9)
    best_of: int = count(at_most=10**9)
    max_new_tokens: int = count(at_most=10**9)
    stop: list[str]
    temperature: float = number(at_least=0, at_most=1e6)
    top_k: int | None = count()
    top_p: float | None = number(above=0, at_most=1)
    min_p: float | None = number(above=0, at_most=1)
    repetition_penalty: float = number(at_least=1e-6, at_most=1e6)
    frequency_penalty: float = number(at_least=-1e6, at_most=1e6)
    seed: int | None = count(at_least=0, at_most=2**62)
    overflow: str = one_of("error", "slide", "extend")
    batch: int = count(at_most=10**6)
    device: str = a_name()
    precision: str = one_of("fp32", "bf16")
    quantize: str | None = one_of("int8")
    compile: bool


@dataclass
class Evaluate:
    """Everything that `python -m scripts.evaluate` can be told."""

    checkpoint: str = a_path()
    stride: int | None = count()
    seq_len: int | None = count(at_most=2**30)
    batch: int = count(at_most=10**6)
    device: str = a_name()
    quantize: str | None = one_of("int8")
    report: bool
    json: str | None = field(metadata={"a path": True})  # or auto
    plot: str | None = field(metadata={"a path": True})
    ngram_order: int = count(at_most=100)
    ngram_tokens: int = count()
    samples: int = count(at_most=10**6)
    sample_tokens: int = count(at_most=10**6)
    temperature: float = number(at_least=0, at_most=1e6)
    seed: int = count(at_least=0, at_most=2**62)
    data: Data | None


@dataclass
class Doctor(Train):
    """Everything that `python -m scripts.doctor` can be told: a run's settings, or a checkpoint that has its own."""

    checkpoint: str | None = a_path()
    json: str | None = a_path()


@dataclass
class Prepare:
    """Everything that `python -m scripts.prepare` can be told."""

    shard_index: int | None = count(at_least=0)
    num_shards: int = count(at_most=10**6)
    report: bool
    verify: bool
    export: str | None = a_path()
    step: int = count(at_least=0)
    run: str | None = a_path()
    batch_tokens: int = count()
    seq_len: int = count(at_most=2**30)
    packing: str = one_of("stream", "documents")
    seed: int = count(at_least=0, at_most=2**62)
    data: Data
    tokenizer: Tokenizer


@dataclass
class Lessons:
    """Everything that `python -m scripts.lessons` can be told."""

    plot: str | None = a_path()
    checkpoint: str | None = a_path()
    seed: int = count(at_least=0, at_most=2**62)


@dataclass
class ImportHF:
    """Everything that `python -m scripts.import_hf` can be told."""

    source: str = a_path()
    target: str = a_path()


@dataclass
class Explain:
    """Everything that `python -m scripts.explain` can be told."""

    checkpoint: str = a_path()
    method: str = one_of(
        "attention", "occlusion", "swap", "gradient", "integrated_gradients", "ablation", "patching", "lens"
    )
    prompt: str | None
    answer: str | None
    against: str | None
    corrupted: str | None
    replacement: str | None
    ablation: str = one_of("zero", "mean")
    key: int | None = count(at_least=0)
    max_steps: int = count(at_most=10**6)
    batch: int = count(at_most=10**6)
    device: str = a_name()
    json: str | None = a_path()
    plot: str | None = a_path()
    page: str | None = a_path()


def parse(cfg: DictConfig, schema: type = Train):
    """The composed config as `schema`'s dataclass. ValueError names the setting, its value and what was expected."""
    try:
        typed = OmegaConf.merge(OmegaConf.structured(schema), cfg)
        OmegaConf.resolve(typed)
        parsed = OmegaConf.to_object(typed)
    except ConfigKeyError as error:
        raise ValueError(unknown_key(error.full_key, schema)) from error
    except MissingMandatoryValue as error:
        raise ValueError(f"{error.full_key} is needed: give {error.full_key}=...") from error
    except OmegaConfBaseException as error:
        reason, key = _reason(error), error.full_key or _culprit(cfg, schema)
        if own := reason.partition("ValueError raised while resolving interpolation: ")[2]:
            raise ValueError(own) from error
        raise ValueError(f"{key}: {reason}" if key else reason) from error
    _expand_paths(parsed)
    _check_ranges(parsed)
    check_rules(parsed)
    return parsed


def _culprit(cfg: DictConfig, schema: type) -> str | None:
    """The setting that cannot be had, or cannot be what it is, where OmegaConf's error does not name it."""
    typed, keys = OmegaConf.structured(schema), setting_names(schema)
    groups = {key.rpartition(".")[0] for key in keys}
    for key in sorted(keys, key=lambda key: (key in groups, key.count("."))):
        try:
            value = OmegaConf.select(cfg, key, default="???")
            if OmegaConf.is_config(value):
                value = OmegaConf.to_container(value, resolve=True)
            for part in reversed(key.split(".")):
                value = {part: value}
            OmegaConf.merge(typed, value)
        except OmegaConfBaseException:
            return key
    return None


def _reason(error: Exception) -> str:
    reason = str(error).split("\n")[0].replace("'", "")
    return "must be a list, such as [one,two]" if "is not a ListConfig" in reason else reason


def changed(cfg, key: str, value: str):
    """A parsed config with one of its values set anew, as a command line would; ValueError as from parse."""
    if key not in {item.name for item in fields(cfg)}:
        raise ValueError(unknown_key(key, type(cfg)))
    try:
        new = OmegaConf.merge(OmegaConf.structured(cfg), OmegaConf.from_dotlist([f"{key}={value}"]))
    except Exception as error:  # of the YAML reader and OmegaConf, of several kinds
        raise ValueError(f"{key} cannot be {value}: {_reason(error)}") from error
    return parse(new, type(cfg))


def unknown_key(key: str, schema: type = Train) -> str:
    """The message for a setting that does not exist, with the nearest that does."""
    known = setting_names(schema)
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.75)
    if not near:  # the last part of a name, or the right one in another group
        by_last = {name.split(".")[-1]: name for name in reversed(known)}
        near = [by_last[last] for last in difflib.get_close_matches(key.split(".")[-1], by_last, n=1)]
    return f"unknown setting {key}: " + (f"did you mean {near[0]}?" if near else "--help lists all there are")


def setting_names(schema: type) -> list[str]:
    """Of all there are, each with those of the groups that it is in, and the groups themselves."""
    return list(_keys(schema))


def _keys(schema: type, prefix: str = "") -> Iterator[str]:
    for item in fields(schema):
        yield prefix + item.name
        for kind in get_args(item.type) or [item.type]:
            if is_dataclass(kind):
                yield from _keys(kind, f"{prefix}{item.name}.")


def _expand_paths(node):
    """Home folders instead of ~, in place."""
    for item in fields(node):
        value = getattr(node, item.name)
        if is_dataclass(value):
            _expand_paths(value)
        elif isinstance(value, dict):  # data.corpora: folders with weights
            setattr(node, item.name, {expanduser(name): weight for name, weight in value.items()})
        elif "a path" in item.metadata and value is not None:
            setattr(node, item.name, list(map(expanduser, value)) if isinstance(value, list) else expanduser(value))


def _check_ranges(node, prefix: str = ""):
    for item in fields(node):
        key, value = prefix + item.name, getattr(node, item.name)
        if is_dataclass(value):
            _check_ranges(value, key + ".")
            continue
        if isinstance(value, dict):
            value = list(value.values())
        for one in value if isinstance(value, list) else [value]:
            _check_value(key, one, item.metadata)


def _check_value(key: str, value, allowed):
    if value is None:
        return
    if isinstance(value, str) and "\0" in value:
        raise ValueError(f"{key} must not hold the character NUL, got {value!r}")
    if "a name" in allowed and (not value.strip() or any(unicodedata.category(c) == "Cc" for c in value)):
        raise ValueError(f"{key} must be a text that is not empty, without control characters, got {value!r}")
    if not allowed or "a name" in allowed or "a path" in allowed:
        return
    if "choices" in allowed:
        if value not in allowed["choices"]:
            near = difflib.get_close_matches(str(value), allowed["choices"], n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise ValueError(f"{key} must be one of {', '.join(allowed['choices'])}, got {value}{hint}")
        return
    if isinstance(value, float) and math.isinf(value):
        raise ValueError(f"{key} must be finite, got {value}")
    tests = {
        "at least": lambda bound: value >= bound,
        "above": lambda bound: value > bound,
        "at most": lambda bound: value <= bound,
        "below": lambda bound: value < bound,
    }
    for name, holds in tests.items():
        if allowed[name] is not None and not holds(allowed[name]):
            raise ValueError(f"{key} must be {name} {allowed[name]}, got {value}")


def _check_data(data: Data):
    if data.source in ("files", "tokens") and not data.paths:
        raise ValueError(f"data={data.source} needs data.paths, got []: give for example data.paths='[books/*.txt]'")
    if data.source == "hub" and data.repo is None:
        raise ValueError("data=hub needs data.repo, got null: give for example data.repo=roneneldan/TinyStories")
    if data.source == "mixture" and not data.corpora:
        raise ValueError("data=mixture needs data.corpora, for example data.corpora='{corpora/A: 0.7, corpora/B: 0.3}'")
    if data.source == "corpus" and len(data.paths) != 1:
        raise ValueError(f"data=corpus needs one folder, data.paths='[corpora/NAME]', got {data.paths}")
    if data.source in ("tokens", "corpus", "mixture") and data.max_tokens is not None:
        raise ValueError(f"data.max_tokens has no use for data={data.source}, got {data.max_tokens}")
    if data.separator == "":
        raise ValueError("data.separator must hold at least one character, or be null, got an empty text")
    chat = [name for name in ("messages_column", "prompt_column", "answer_column") if getattr(data, name) is not None]
    if not chat:
        return
    if data.source not in ("files", "hub"):
        raise ValueError(f"data.{chat[0]} is for data=files and data=hub, got data={data.source}")
    if chat not in (["messages_column"], ["prompt_column", "answer_column"]):
        given = ", ".join(f"data.{name}" for name in chat)
        raise ValueError(f"give data.messages_column, or data.prompt_column and data.answer_column, got {given}")
    for role in ("user", "assistant"):
        if role not in data.template:
            raise ValueError(
                f"data.template must say how {role} is written, got {', '.join(data.template) or 'nothing'}"
            )
    for role, text in data.template.items():
        if text.count("{}") != 1:
            raise ValueError(f"data.template.{role} must hold {{}} once, where the content goes, got {text!r}")


def _check_generate(cfg: Generate):
    given = [name for name in ("prompt", "prompt_file", "prompts_file") if getattr(cfg, name) is not None]
    if len(given) > 1 or (cfg.interactive and given):
        names = ", ".join([*given, *(["interactive"] if cfg.interactive else [])])
        raise ValueError(f"one way to give a prompt is enough, got {names} (what follows -- is prompt)")
    if cfg.best_of > 1 and cfg.temperature == 0:
        raise ValueError(f"best_of draws different texts: it needs a temperature above 0, got {cfg.best_of} and 0")
    if cfg.interactive and (cfg.num_samples > 1 or cfg.best_of > 1):
        raise ValueError("interactive=true writes one text at a time: num_samples and best_of must be 1")
    if "" in cfg.stop:
        raise ValueError("stop must hold texts of at least one character, got an empty one")


def _check_explain(cfg: Explain):
    if cfg.method in ("swap", "patching") and cfg.corrupted is None:
        raise ValueError(f"method={cfg.method} needs corrupted, a text of as many tokens, got null")
    uses = {
        "corrupted": ("swap", "patching", "attention", "integrated_gradients"),
        "replacement": ("occlusion", "integrated_gradients", "attention"),
        "key": ("attention",),
        "page": ("attention",),
    }
    for name, methods in uses.items():
        if getattr(cfg, name) is not None and cfg.method not in methods:
            raise ValueError(f"{name} has no use for method={cfg.method}, only for {', '.join(methods)}")
    if cfg.corrupted is not None and cfg.replacement is not None:
        raise ValueError("one of corrupted and replacement is enough: got both")


def _check_evaluate(cfg: Evaluate):
    for name in ("json", "plot"):
        path = getattr(cfg, name)
        if path == "":
            raise ValueError(f"{name} must be a file, auto or null, got an empty text")
        if not cfg.report and path not in (None, "auto"):
            raise ValueError(f"{name} is of the report, got {path}: give report=true, too")


def check_warmup(schedule: Schedule, steps: int):
    if schedule.warmup >= steps:
        raise ValueError(f"schedule.warmup must be below steps, got {schedule.warmup} and {steps}")


def check_rules(cfg):
    """Rules between fields."""
    if hasattr(cfg, "tokenizer"):
        t = cfg.tokenizer
        if t.kind == "bpe" and (t.vocab_size is None or t.pattern is None):
            raise ValueError("tokenizer.kind=bpe needs tokenizer.vocab_size and tokenizer.pattern, got null")
        if t.kind in ("json", "saved") and t.path is None:
            raise ValueError(f"tokenizer={t.kind} needs tokenizer.path, got null")
        if t.kind == "tiktoken" and t.encoding is None:
            raise ValueError("tokenizer=tiktoken needs tokenizer.encoding, got null")
        if t.kind == "bpe" and t.vocab_size < 256 + len(t.special):
            raise ValueError(
                f"tokenizer.vocab_size must hold the 256 bytes and the special tokens, "
                f"{256 + len(t.special)}, got {t.vocab_size}"
            )
        if not t.special or len(set(t.special)) < len(t.special) or "" in t.special:
            raise ValueError(f"tokenizer.special must be different names, at least one and none empty, got {t.special}")
        if t.parse_special and t.kind not in ("bpe", "tiktoken", "json"):
            why = "a saved one does as it was made" if t.kind == "saved" else "others have no special tokens to name"
            raise ValueError(
                f"tokenizer.parse_special=true is of tokenizer=bpe, tiktoken and json, got {t.kind}: {why}"
            )
        begins = [(a, b) for a in t.special for b in t.special if a != b and b.startswith(a)]
        if t.parse_special and begins:
            raise ValueError(
                f"tokenizer.special: with parse_special no name may begin with another, got {begins[0][1]} and "
                f"{begins[0][0]}"
            )
    data = getattr(cfg, "data", None)
    if data is not None:
        _check_data(data)
        ready = ("bytes", "tiktoken", "json", "saved")
        if data.source == "tokens" and hasattr(cfg, "tokenizer") and cfg.tokenizer.kind not in ready:
            raise ValueError(
                f"data=tokens needs the tokenizer that made them, {', '.join(ready)}, got {cfg.tokenizer.kind}"
            )
    for name, some in (("", cfg), ("sample.", getattr(cfg, "sample", None))):
        if 0 < getattr(some, "temperature", 0) < 1e-5:
            raise ValueError(f"{name}temperature must be 0, or at least 1e-5, got {some.temperature}")
    if hasattr(cfg, "batch_tokens"):
        name = "steps" if hasattr(cfg, "steps") else "step"
        if (getattr(cfg, name) or 0) * cfg.batch_tokens > 10**18:
            raise ValueError(
                f"{name} x batch_tokens must be at most 10^18 tokens, got {getattr(cfg, name)} x {cfg.batch_tokens}"
            )
    if hasattr(cfg, "batch_tokens") and cfg.batch_tokens % cfg.seq_len:
        raise ValueError(
            f"batch_tokens must be a multiple of seq_len, got {cfg.batch_tokens} and {cfg.seq_len}: "
            f"{max(1, round(cfg.batch_tokens / cfg.seq_len)) * cfg.seq_len} would do"
        )
    if isinstance(cfg, Prepare) and cfg.shard_index is not None and cfg.num_shards == 1:
        raise ValueError(f"shard_index needs num_shards above 1, got {cfg.shard_index} and 1")
    if isinstance(cfg, Prepare) and cfg.shard_index is not None and cfg.shard_index >= cfg.num_shards:
        raise ValueError(f"shard_index must be below num_shards, got {cfg.shard_index} and {cfg.num_shards}")
    if isinstance(cfg, Generate):
        _check_generate(cfg)
    if isinstance(cfg, Explain):
        _check_explain(cfg)
    if isinstance(cfg, Evaluate):
        _check_evaluate(cfg)
    if not isinstance(cfg, Train):
        return
    m, o = cfg.model, cfg.optimizer
    if o.name == "muon" and o.momentum is None:
        raise ValueError("optimizer.name=muon needs optimizer.momentum, got null: give for example optimizer=muon")
    if m.d_model % m.n_heads:
        raise ValueError(f"model.d_model must be a multiple of model.n_heads, got {m.d_model} and {m.n_heads}")
    if m.n_kv_heads is not None and m.n_heads % m.n_kv_heads:
        raise ValueError(f"model.n_heads must be a multiple of model.n_kv_heads, got {m.n_heads} and {m.n_kv_heads}")
    if m.positions == "rope" and (m.d_model // m.n_heads) % 2:
        raise ValueError(
            f"RoPE turns pairs of dimensions: the head width model.d_model / model.n_heads must be even, "
            f"got {m.d_model} / {m.n_heads} = {m.d_model // m.n_heads}"
        )
    if m.positions == "sinusoidal" and m.d_model % 2:
        raise ValueError(f"model.positions=sinusoidal needs an even model.d_model, got {m.d_model}")
    if (m.rope_scaling is None) != (m.rope_factor == 1):
        raise ValueError(
            "model.rope_scaling and model.rope_factor go together, a word and a number above 1 (or null and 1), "
            f"got {m.rope_scaling} and {m.rope_factor}"
        )
    if m.rope_scaling is not None and m.positions != "rope":
        raise ValueError(f"model.rope_scaling needs model.positions=rope, got {m.rope_scaling} and {m.positions}")
    if m.rope_scaling == "ntk" and m.d_model // m.n_heads < 4:
        raise ValueError(
            f"model.rope_scaling=ntk needs a head width model.d_model / model.n_heads of at least 4, "
            f"got {m.d_model} / {m.n_heads} = {m.d_model // m.n_heads}"
        )
    if cfg.attention == "fused" and m.soft_cap is not None:
        raise ValueError(f"attention=fused has no soft cap, got model.soft_cap {m.soft_cap}: take written or auto")
    if cfg.seq_len_warmup and cfg.seq_len % 4:
        raise ValueError(
            f"seq_len_warmup begins with rows of a quarter of seq_len, which must be a multiple of 4, got {cfg.seq_len}"
        )
    if cfg.seq_len > m.max_seq_len:
        raise ValueError(f"seq_len must be at most model.max_seq_len, got {cfg.seq_len} and {m.max_seq_len}")
    rows = cfg.batch_tokens // cfg.seq_len
    if cfg.micro_batch != "auto":
        if not isinstance(cfg.micro_batch, int) or isinstance(cfg.micro_batch, bool) or cfg.micro_batch < 1:
            raise ValueError(f"micro_batch must be auto or a number of rows, got {cfg.micro_batch}")
        if rows % cfg.micro_batch:
            raise ValueError(
                f"micro_batch must divide the {rows} rows of a batch (batch_tokens / seq_len), got {cfg.micro_batch}"
            )
    if cfg.init_from is not None and cfg.resume not in (None, "auto"):
        raise ValueError(f"a run begins with resume or with init_from, got both: {cfg.resume} and {cfg.init_from}")
    a_time = r"(?=.)(\d{1,9}d)?(\d{1,9}h)?(\d{1,9}m)?(\d{1,9}s)?"
    if cfg.max_time is not None and not re.fullmatch(a_time, cfg.max_time):
        raise ValueError(f"max_time must look like 3h50m, 90m or 45s, got {cfg.max_time}")
    for name in ("kernels", "compile"):
        if getattr(cfg, name) not in (True, False, "auto"):
            raise ValueError(f"{name} must be auto, true or false, got {getattr(cfg, name)}")
    if (cfg.steps is None) == (cfg.epochs is None):
        given = "null and null" if cfg.steps is None else f"{cfg.steps} and {cfg.epochs}: set one of them to null"
        raise ValueError(f"a run is as long as steps or epochs, one of them, says, got {given}")
    if cfg.dry_run and cfg.steps is None:
        raise ValueError(f"dry_run=true reads no text, which epochs={cfg.epochs} would need: give steps in their place")
    if cfg.steps is not None:
        check_warmup(cfg.schedule, cfg.steps)
    if len(o.betas) != 2:
        raise ValueError(f"optimizer.betas must be two numbers, got {o.betas}")
