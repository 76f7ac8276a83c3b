"""Evaluation in depth: where a model is good and bad at a held-out text, beside what counting n-grams achieves.

| file | what it does |
| --- | --- |
| measure.py | measures, and gives plain dicts and lists, as they go into a JSON file |
| tables.py | prints them |
| pictures.py | draws them |
| bands.py | what both show alike |

A text is anything with len and read(start, length), such as memory-mapped tokens: it is read in pieces, and sums are
all that is kept.
"""

from insight.report.measure import copies, count, losses
from insight.report.pictures import plot
from insight.report.tables import show

__all__ = ["copies", "count", "losses", "plot", "show"]
