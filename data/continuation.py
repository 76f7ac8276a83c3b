"""A text while it is written: from tokens to what may be shown of them, until it ends."""

from collections.abc import Sequence

from data.tokenizer import Tokenizer


class Continuation:
    """What follows a prompt, from tokens that come one by one.

    It ends ("stop") at one of the tokenizer's stop tokens or where one of `stop_strings` is complete, which belongs to
    the text no more; or ("length") where no more tokens come. `text` grows by whole characters, and holds back what may
    be the beginning of a stop string, however the tokens cut it. `tokens` are all that it took, with their
    `log_probabilities` where they are given.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: list[int], stop_strings: Sequence[str] = ()):
        if "" in stop_strings:
            raise ValueError("a stop string must hold at least one character, got an empty one")
        self.stops, self.stop_strings = tokenizer.stops, stop_strings
        self.decoder = tokenizer.decoder(prompt)
        self.tokens: list[int] = []
        self.log_probabilities: list[float] = []
        self.text = ""
        self.held = ""
        self.finish_reason: str | None = None

    def push(self, token: int, log_probability: float | None = None):
        """Takes the next token; nothing, once the text has ended."""
        if self.finish_reason is not None:
            return
        self.tokens.append(token)
        if log_probability is not None:
            self.log_probabilities.append(log_probability)
        if token in self.stops:
            self.finish("stop")
        else:
            self._show(self.decoder.push(token))

    def finish(self, reason: str = "length"):
        """No more tokens come."""
        if self.finish_reason is None:
            self._show(self.decoder.end())
            if self.finish_reason is None:
                self.text += self.held
                self.finish_reason = reason

    def _show(self, piece: str):
        self.held += piece
        found = [(at + len(stop), at) for stop in self.stop_strings if (at := self.held.find(stop)) >= 0]
        if found:  # the one that was complete first, whatever came with it
            self.text += self.held[: min(found)[1]]
            self.finish_reason = "stop"
            return
        longest = max(map(len, self.stop_strings), default=1) - 1
        waits = (n for n in range(min(longest, len(self.held)), 0, -1) if self._begins_a_stop(self.held[-n:]))
        n = next(waits, 0)
        self.text += self.held[: len(self.held) - n]
        self.held = self.held[len(self.held) - n :]

    def _begins_a_stop(self, text: str) -> bool:
        return any(stop.startswith(text) for stop in self.stop_strings)

    @property
    def mean_log_probability(self) -> float:
        """In nats a token."""
        return sum(self.log_probabilities) / len(self.log_probabilities)
