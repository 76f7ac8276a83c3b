"""Shared by tables and pictures: rows merged into bands, and their labels."""

import math


def position_bands(rows: list[dict]) -> list[tuple[int, int, dict]]:
    """Rows of `by_position` in bands 1, 2, 3 to 4, 5 to 8 and so on: (first, last, their means)."""
    out, low = [], 1
    while low <= len(rows):
        high = min(len(rows), 1 if low == 1 else 2 * (low - 1))
        band = [row for row in rows[low - 1 : high] if row["tokens"]]
        n = sum(row["tokens"] for row in band)
        if n:
            merged = {"tokens": n, "error": math.sqrt(sum((row["tokens"] * row["error"]) ** 2 for row in band)) / n}
            for name in ("loss", "ngram_loss"):
                known = band[0][name] is not None
                merged[name] = sum(row["tokens"] * row[name] for row in band) / n if known else None
            out.append((low, high, merged))
        low = high + 1
    return out


def copied_shares(found: dict) -> list[tuple[str, float, float]]:
    """(length, fraction of the generated text, of the validation text): three lengths, and longer ones if found."""
    both = [(n, share, found["validation"]["shares"][n]) for n, share in found["generated"]["shares"].items()]
    return [row for i, row in enumerate(both) if i < 3 or any(row[1:])]


def counted_documents(found: dict) -> str:
    of_length = f" of {found['at_least']} tokens or more" if found["at_least"] > 1 else ""
    return f"{found['count']:,} documents{of_length}"


def highest_ngram(report: dict) -> str:
    return f"{len(report['ngram_losses'])}-gram"  # the highest order


def shortened(text: str, n: int) -> str:
    return text if len(text) <= n else text[: n - 3] + "..."
