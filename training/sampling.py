"""A text that a run writes between its steps, to be read."""

import torch

from data.tokenizer import Tokenizer
from model import generate
from training.engine import Engine
from training.state import TrainState


def write_sample(engine: Engine, state: TrainState, tokenizer: Tokenizer, settings, seed: int):
    """Adds a text to state.samples, drawn with the run's seed; it draws no random number of training."""
    options = {"temperature": settings.temperature, "top_k": settings.top_k, "top_p": settings.top_p}
    prompt = tokenizer.prompt(settings.prompt)
    state.model.eval()
    with engine.autocast:
        start = torch.tensor([prompt], device=engine.device)
        columns = list(generate(state.model, start, settings.tokens, **options, seeds=[seed], overflow="slide"))
    state.model.train()
    text = settings.prompt + "".join(tokenizer.stream(torch.cat(columns).tolist(), after=prompt))
    state.samples.append({"step": state.step, "prompt": settings.prompt, "text": text})
