"""The samples that a run generates between its steps."""

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from annotated_types import Ge, Gt, Le

from data.config import Text
from data.tokenizer import Tokenizer
from model import generate
from model.generation import check_temperature
from training.engine import Engine
from training.state import TrainState


@dataclass(frozen=True)
class SampleConfig:
    """The prompt, the number of tokens and how they are drawn, see model.generation.Sampling."""

    prompt: Text
    tokens: Annotated[int, Ge(1), Le(100_000)]
    temperature: Annotated[float, Ge(0), Le(1e6)]
    top_k: Annotated[int, Ge(1), Le(10**12)] | None
    top_p: Annotated[float, Gt(0), Le(1)] | None

    def __post_init__(self):
        check_temperature(self.temperature)


def write_sample(engine: Engine, state: TrainState, tokenizer: Tokenizer, settings: SampleConfig, seed: int):
    """Generates a text and adds it to state.samples. Drawn with `seed`, so that training's random state stays."""
    options: dict[str, Any] = {"temperature": settings.temperature, "top_k": settings.top_k, "top_p": settings.top_p}
    prompt = tokenizer.prompt(settings.prompt)
    state.model.eval()
    with engine.autocast:
        start = torch.tensor([prompt], device=engine.device)
        columns = list(generate(state.model, start, settings.tokens, **options, seeds=[seed], overflow="slide"))
    state.model.train()
    text = settings.prompt + "".join(tokenizer.stream(torch.cat(columns).tolist(), after=prompt))
    state.samples.append({"step": state.step, "prompt": settings.prompt, "text": text})
