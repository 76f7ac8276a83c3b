"""Arguments of models for tests of what holds for every model: each choice occurs once."""

ARCHITECTURES = [
    {},
    {"qk_norm": True, "tied": True},
    {"pairing": "interleaved", "n_kv_heads": None},
    {"rope_scaling": "yarn", "rope_factor": 4.0},
    {"positions": "learned"},
    {"positions": "sinusoidal", "n_kv_heads": 1},
    {"positions": "alibi"},
    {"positions": "none"},
    {"window": 3},
    {"soft_cap": 2.0},
    {"norm": "layernorm", "feed_forward": "gelu"},
    {"feed_forward": "relu2", "vocab_multiple": 8},
    {"embedding_norm": True, "zero_init": True},
]
