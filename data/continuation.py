"""Text while it is generated: turns tokens into text that can be shown, until a stop token or string."""

from collections.abc import Sequence

from data.tokenizer import Tokenizer


class Continuation:
    """The continuation of a prompt, built from tokens one by one.

    It ends with `finish_reason` "stop" at one of the tokenizer's stop tokens, or when one of `stop_strings` is complete
    (which is not part of the text); or with "length" when `finish` is called. `text` grows by whole characters and
    leaves out an end that could be the start of a stop string, even one split across tokens. `tokens` are all tokens
    taken, `log_probabilities` theirs if given.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: list[int], stop_strings: Sequence[str] = ()):
        if "" in stop_strings:
            raise ValueError("a stop string must have at least one character, got an empty one")
        self.stops, self.stop_strings = tokenizer.stops, stop_strings
        self.decoder = tokenizer.decoder(prompt)
        self.tokens: list[int] = []
        self.log_probabilities: list[float] = []
        self.text = ""
        self.held = ""
        self.finish_reason: str | None = None

    def push(self, token: int, log_probability: float | None = None):
        """Adds the next token; does nothing once the text has ended."""
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
        """Ends the text: no more tokens follow."""
        if self.finish_reason is None:
            self._show(self.decoder.end())
            if self.finish_reason is None:
                self.text += self.held
                self.finish_reason = reason

    def _show(self, piece: str):
        self.held += piece
        found = [(at + len(stop), at) for stop in self.stop_strings if (at := self.held.find(stop)) >= 0]
        if found:  # the stop string that was complete first; the text after it is dropped
            self.text += self.held[: min(found)[1]]
            self.finish_reason = "stop"
            return
        longest = max(map(len, self.stop_strings), default=1) - 1
        lengths = (n for n in range(min(longest, len(self.held)), 0, -1) if self._starts_a_stop(self.held[-n:]))
        n = next(lengths, 0)
        self.text += self.held[: len(self.held) - n]
        self.held = self.held[len(self.held) - n :]

    def _starts_a_stop(self, text: str) -> bool:
        return any(stop.startswith(text) for stop in self.stop_strings)

    @property
    def mean_log_probability(self) -> float:
        """In nats per token."""
        return sum(self.log_probabilities) / len(self.log_probabilities)
