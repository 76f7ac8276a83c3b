"""Exports a vocabulary of bytes as a tokenizer.json, which spells each byte as a character, as GPT-2 does."""

from collections.abc import Iterable


def byte_level_json(
    ranks: list[bytes], merges: Iterable[tuple[bytes, bytes]], special: dict[str, int], pattern: str | None
) -> str:
    """Returns a tokenizer.json whose tokens are bytes, spelled as in GPT-2's vocabulary."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    alphabet = byte_level_alphabet()

    def spell(token: bytes) -> str:
        return "".join(alphabet[byte] for byte in token)

    vocabulary = {spell(token): id for id, token in enumerate(ranks) if token} | special
    pairs = [(spell(a), spell(b)) for a, b in merges]
    other = Tokenizer(models.BPE(vocabulary, pairs, ignore_merges=True))
    cut = [] if pattern is None else [pre_tokenizers.Split(Regex(pattern), "isolated")]
    spelled = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    other.pre_tokenizer = pre_tokenizers.Sequence([*cut, spelled])
    other.decoder = decoders.ByteLevel()
    other.add_special_tokens(list(special))
    return other.to_str()


def byte_level_alphabet() -> list[str]:
    """Returns the character for each byte in GPT-2's vocabulary: itself if printable, else one from 256 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)]
