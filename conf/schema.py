"""All settings of train.py: those of its components, each with its types and rules, and the rules between them.

There are no defaults here: each value is written once, in YAML.
"""

import re
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le

from data.config import DataConfig, Name, PathName, Text, TokenizerConfig, check_together
from model.config import ModelConfig
from training.auto import EngineConfig
from training.gate import GuardConfig
from training.optimizer import OptimizerConfig
from training.sampling import SampleConfig
from training.schedule import Every, ScheduleConfig
from training.tracking import TrackingConfig

Count = Annotated[int, Ge(1), Le(10**12)]
Seed = Annotated[int, Ge(0), Le(2**62)]
SeqLen = Annotated[int, Ge(1), Le(2**30)]
Packing = Literal["stream", "documents"]


@dataclass(frozen=True)
class Train(EngineConfig, GuardConfig):
    """The settings of `python train.py`. EngineConfig's and GuardConfig's are on the top level, see their classes."""

    name: Name
    steps: Count | None
    epochs: Annotated[float, Gt(0), Le(1e6)] | None
    stop_after: Count | None
    seed: Seed
    batch_tokens: Count
    seq_len: SeqLen
    seq_len_warmup: Annotated[float, Ge(0), Le(1)]
    packing: Packing
    eval_tokens: Annotated[int, Ge(1), Le(10**15)] | None
    dry_run: bool
    world: Annotated[int, Ge(1), Le(10**7)]
    mfu: Annotated[float, Gt(0), Le(1)]
    resume: PathName | None
    init_from: PathName | None
    keep: Count | None
    max_time: Text | None
    patience: Count | None
    rank_timeout: Annotated[float, Gt(0), Le(1e7)]
    every: Every
    model: ModelConfig
    data: DataConfig
    tokenizer: TokenizerConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    sample: SampleConfig
    tracking: TrackingConfig

    def __post_init__(self):
        check_together(self.data, self.tokenizer)
        check_batch("steps", self.steps or 0, self.batch_tokens, self.seq_len)
        if self.attention == "fused" and self.model.soft_cap is not None:
            got = f"got model.soft_cap {self.model.soft_cap}"
            raise ValueError(f"attention=fused has no soft cap, {got}: give math or auto")
        if self.seq_len_warmup and self.seq_len % 4:
            quarter = "seq_len_warmup starts with rows of a quarter of seq_len"
            raise ValueError(f"{quarter}, which must be a multiple of 4, got {self.seq_len}")
        if self.seq_len > self.model.max_seq_len:
            both = f"{self.seq_len} and {self.model.max_seq_len}"
            raise ValueError(f"seq_len must be at most model.max_seq_len, got {both}")
        rows = self.batch_tokens // self.seq_len
        if isinstance(self.micro_batch, int) and rows % self.micro_batch:
            of = "rows of a batch (batch_tokens / seq_len)"
            raise ValueError(f"micro_batch must divide the {rows} {of}, got {self.micro_batch}")
        if self.init_from is not None and self.resume not in (None, "auto"):
            both = f"{self.resume} and {self.init_from}"
            raise ValueError(f"a run starts from resume or from init_from, got both: {both}")
        a_time = r"(?=.)(\d{1,9}d)?(\d{1,9}h)?(\d{1,9}m)?(\d{1,9}s)?"
        if self.max_time is not None and not re.fullmatch(a_time, self.max_time):
            raise ValueError(f"max_time must look like 3h50m, 90m or 45s, got {self.max_time}")
        if (self.steps is None) == (self.epochs is None):
            given = "null and null"
            if self.steps is not None:
                given = f"{self.steps} and {self.epochs}: set one of them to null"
            raise ValueError(f"give the length of a run as steps or as epochs, got {given}")
        if self.dry_run and self.steps is None:
            need = f"which epochs={self.epochs} would need"
            raise ValueError(f"dry_run=true reads no text, {need}: give steps instead")
        if self.steps is not None:
            self.schedule.check_steps(self.steps)


def check_batch(name: str, steps: int, batch_tokens: int, seq_len: int):
    """ValueError unless batch_tokens is a multiple of seq_len and steps * batch_tokens is not absurd.

    `name`: the setting that `steps` comes from.
    """
    if steps * batch_tokens > 10**18:
        raise ValueError(f"{name} x batch_tokens must be at most 10^18 tokens, got {steps} x {batch_tokens}")
    if batch_tokens % seq_len:
        near = max(1, round(batch_tokens / seq_len)) * seq_len
        both = f"{batch_tokens} and {seq_len}"
        raise ValueError(f"batch_tokens must be a multiple of seq_len, got {both}: {near} would do")
