"""All settings of the scripts, with their rules. No defaults here: a value is written once, in YAML."""

from dataclasses import dataclass
from os.path import expanduser
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, MinLen
from pydantic import AfterValidator

from conf.schema import Count, Packing, Seed, SeqLen, Train, check_batch
from data.config import DataConfig, Name, PathName, Text, TokenizerConfig, check_together
from model.generation import check_temperature

Million = Annotated[int, Ge(1), Le(10**6)]
Billion = Annotated[int, Ge(1), Le(10**9)]


def _output(value: str) -> str:
    if not value:
        raise ValueError("must be a file, auto or null, got an empty string")
    return expanduser(value)


Output = Annotated[Text, AfterValidator(_output)]
Temperature = Annotated[float, Ge(0), Le(1e6)]


@dataclass(frozen=True)
class Generate:
    """The settings of `python -m scripts.generate`."""

    checkpoint: PathName
    prompt: Text | None
    prompt_file: PathName | None
    prompts_file: PathName | None
    interactive: bool
    num_samples: Billion
    best_of: Billion
    max_new_tokens: Billion
    stop: list[Text]
    temperature: Temperature
    top_k: Count | None
    top_p: Annotated[float, Gt(0), Le(1)] | None
    min_p: Annotated[float, Gt(0), Le(1)] | None
    repetition_penalty: Annotated[float, Ge(1e-6), Le(1e6)]
    frequency_penalty: Annotated[float, Ge(-1e6), Le(1e6)]
    seed: Seed | None
    overflow: Literal["error", "slide", "extend"]
    batch: Million
    device: Name
    precision: Literal["fp32", "bf16"]
    quantize: Literal["int8"] | None
    compile: bool

    def __post_init__(self):
        check_temperature(self.temperature)
        given = [name for name in ("prompt", "prompt_file", "prompts_file") if getattr(self, name) is not None]
        if len(given) > 1 or (self.interactive and given):
            names = ", ".join([*given, *(["interactive"] if self.interactive else [])])
            raise ValueError(f"give the prompt in one way only, got {names} (text after -- is prompt)")
        if self.best_of > 1 and self.temperature == 0:
            needs = "best_of needs different texts, and so a temperature above 0"
            raise ValueError(f"{needs}, got {self.best_of} and 0")
        if self.interactive and (self.num_samples > 1 or self.best_of > 1):
            raise ValueError("interactive=true generates one text at a time: num_samples and best_of must be 1")
        if "" in self.stop:
            raise ValueError("stop must hold strings of at least one character, got an empty one")


@dataclass(frozen=True)
class Evaluate:
    """The settings of `python -m scripts.evaluate`."""

    checkpoint: PathName
    stride: Count | None
    seq_len: SeqLen | None
    batch: Million
    device: Name
    quantize: Literal["int8"] | None
    report: bool
    json: Output | None
    plot: Output | None
    ngram_order: Annotated[int, Ge(1), Le(100)]
    ngram_tokens: Count
    samples: Million
    sample_tokens: Million
    temperature: Temperature
    seed: Seed
    data: DataConfig | None

    def __post_init__(self):
        check_temperature(self.temperature)
        for name in ("json", "plot"):
            path = getattr(self, name)
            if not self.report and path not in (None, "auto"):
                raise ValueError(f"{name} needs report=true, got {name}={path}")


@dataclass(frozen=True)
class Doctor(Train):
    """The settings of `python -m scripts.doctor`: a run's settings, or a checkpoint that has its own."""

    checkpoint: PathName | None
    json: PathName | None


@dataclass(frozen=True)
class Prepare:
    """The settings of `python -m scripts.prepare`."""

    shard_index: Annotated[int, Ge(0), Le(10**12)] | None
    num_shards: Million
    report: bool
    verify: bool
    export: PathName | None
    step: Annotated[int, Ge(0), Le(10**12)]
    run: PathName | None
    batch_tokens: Count
    seq_len: SeqLen
    packing: Packing
    seed: Seed
    data: DataConfig
    tokenizer: TokenizerConfig

    def __post_init__(self):
        check_together(self.data, self.tokenizer)
        check_batch("step", self.step, self.batch_tokens, self.seq_len)
        if self.shard_index is not None and self.num_shards == 1:
            raise ValueError(f"shard_index needs num_shards above 1, got {self.shard_index} and 1")
        if self.shard_index is not None and self.shard_index >= self.num_shards:
            both = f"{self.shard_index} and {self.num_shards}"
            raise ValueError(f"shard_index must be below num_shards, got {both}")


@dataclass(frozen=True)
class Lessons:
    """The settings of `python -m scripts.lessons`."""

    plot: PathName | None
    checkpoint: PathName | None
    seed: Seed


@dataclass(frozen=True)
class ImportHF:
    """The settings of `python -m scripts.import_hf`."""

    source: PathName
    target: PathName


@dataclass(frozen=True)
class Explain:
    """The settings of `python -m scripts.explain`."""

    checkpoint: PathName
    method: Literal[
        "attention", "occlusion", "swap", "gradient", "integrated_gradients", "ablation", "patching", "lens"
    ]
    prompt: Text | None
    answer: Text | None
    against: Text | None
    corrupted: Text | None
    replacement: Text | None
    ablation: Literal["zero", "mean"]
    key: Annotated[int, Ge(0), Le(10**12)] | None
    max_steps: Million
    batch: Million
    device: Name
    json: PathName | None
    plot: PathName | None
    page: PathName | None

    def __post_init__(self):
        if self.method in ("swap", "patching") and self.corrupted is None:
            raise ValueError(
                f"method={self.method} needs corrupted, a text with as many tokens as the prompt, got null"
            )
        uses = {
            "corrupted": ("swap", "patching", "attention", "integrated_gradients"),
            "replacement": ("occlusion", "integrated_gradients", "attention"),
            "key": ("attention",),
            "page": ("attention",),
        }
        for name, methods in uses.items():
            if getattr(self, name) is not None and self.method not in methods:
                raise ValueError(f"{name} has no effect with method={self.method}, only with {', '.join(methods)}")
        if self.corrupted is not None and self.replacement is not None:
            raise ValueError("give corrupted or replacement, not both")


@dataclass(frozen=True)
class Runs:
    """The settings of `python -m scripts.runs`."""

    folder: PathName
    runs: list[PathName]
    output: PathName


@dataclass(frozen=True)
class Benchmark:
    """The settings of `python -m scripts.benchmark`; scripts/benchmark.py says which action uses which."""

    json: PathName | None
    rounds: Billion | None
    seconds: Annotated[float, Gt(0), Le(1e7)] | None
    threads: Annotated[int, Ge(1), Le(10**4)] | None
    device: Name
    peer: PathName | None
    shape: Literal["small", "medium", "gpt2"]
    d_model: Billion | None
    n_layers: Billion | None
    n_heads: Billion | None
    vocabulary: Billion | None
    rows: Billion | None
    seq_len: Billion | None
    seq_lens: Annotated[list[Billion], MinLen(1)]
    overrides: list[Text]
    seeds: Annotated[list[Seed], MinLen(1)]
    picture: PathName | None
    new_tokens: Billion
    batch: Million
    far: Billion
    source: Name
    megabytes: Million
