"""The settings of a model."""

from dataclasses import dataclass
from typing import Annotated, Literal, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, Lt

from model.attention import check_heads

Count = Annotated[int, Ge(1), Le(2**24)]


@dataclass(frozen=True)
class ModelConfig:
    """The settings of a GPT, except vocab_size, which is the tokenizer's.

    d_model, n_layers, n_heads, n_kv_heads, d_ff: the shape; n_kv_heads None means n_heads.
    max_seq_len: the longest sequence, in tokens.
    positions: see model/positions.py. theta, pairing, rope_scaling, rope_factor: see RotaryPositionalEmbedding.
    norm, norm_eps: see model/norm.py. feed_forward: see model/feed_forward.py.
    qk_norm, soft_cap: RMSNorm on queries and keys, a bound on the scores; see CausalMultiHeadAttention.
    window: a token attends to itself and the window - 1 tokens before it; None: to all before it.
    dropout: on embeddings and both residual branches.
    attention_dropout: on the attention weights; None: the same as `dropout`.
    tied: embedding and head share one matrix.
    embedding_norm: a norm after the embedding, whose rows are then initialised to unit RMS, unless tied.
    zero_init: initialise the matrices that write into the residual stream to zero, and the head unless it is tied: a
        new model then predicts the uniform distribution.
    vocab_multiple: pad the rows of embedding and head to a multiple of this, for speed. Padding rows produce no logit
        and are never looked up.
    """

    d_model: Count
    n_layers: Annotated[int, Ge(1), Le(10_000)]
    n_heads: Count
    d_ff: Count
    max_seq_len: Annotated[int, Ge(1), Le(2**30)]
    n_kv_heads: Count | None = None
    positions: Literal["rope", "learned", "sinusoidal", "alibi", "none"] = "rope"
    theta: Annotated[float, Gt(1), Le(1e15)] = 10000.0
    pairing: Literal["half", "interleaved"] = "half"
    rope_scaling: Literal["interpolation", "ntk", "yarn"] | None = None
    rope_factor: Annotated[float, Ge(1), Le(1e6)] = 1.0
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    norm_eps: Annotated[float, Gt(0), Le(1)] = 1e-6
    feed_forward: Literal["swiglu", "gelu", "relu2"] = "swiglu"
    qk_norm: bool = False
    soft_cap: Annotated[float, Ge(1e-6), Le(1e6)] | None = None
    window: Annotated[int, Ge(1), Le(10**12)] | None = None
    dropout: Annotated[float, Ge(0), Lt(1)] = 0.0
    attention_dropout: Annotated[float, Ge(0), Lt(1)] | None = None
    tied: bool = False
    embedding_norm: bool = False
    zero_init: bool = False
    vocab_multiple: Count = 1

    def __post_init__(self):
        """ValueError if no model can be built from these settings."""
        for name, kind in get_type_hints(type(self)).items():
            value, parts = getattr(self, name), [kind, *get_args(kind)]
            choices = [word for part in parts if get_origin(part) is Literal for word in get_args(part)]
            if choices and value not in choices and (value is not None or type(None) not in parts):
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value}")
        for name in ("d_model", "n_layers", "d_ff", "max_seq_len", "window", "vocab_multiple"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        check_heads(self.d_model, self.n_heads, self.n_kv_heads or self.n_heads, use_rope=self.positions == "rope")
        if self.positions == "sinusoidal" and self.d_model % 2:
            raise ValueError(f"positions=sinusoidal needs an even d_model, got {self.d_model}")
        scaling, factor = self.rope_scaling, self.rope_factor
        if (scaling is None) != (factor == 1):
            what = "a method and a factor above 1, or null and 1"
            raise ValueError(f"rope_scaling and rope_factor go together ({what}), got {scaling} and {factor}")
        if scaling is not None and self.positions != "rope":
            raise ValueError(f"rope_scaling needs positions=rope, got {scaling}, {factor} and {self.positions}")
        if scaling == "ntk" and self.d_head < 4:
            got = f"{self.d_model} / {self.n_heads} = {self.d_head}"
            raise ValueError(f"rope_scaling=ntk needs a head width d_model / n_heads of at least 4, got {got}")

    @property
    def d_head(self) -> int:
        """The width of a head."""
        return self.d_model // self.n_heads
