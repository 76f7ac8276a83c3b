"""The evaluation report: where a model is good and bad on a validation text, compared with n-gram models.

| file | content |
| --- | --- |
| measure.py | measures; returns plain dicts and lists, for JSON |
| tables.py | prints them |
| pictures.py | draws them |
| bands.py | shared by tables and pictures |

A text is anything with len and read(start, length), such as memory-mapped tokens. It is read in pieces, and only sums
are kept.
"""

from insight.report.measure import copies, count, losses
from insight.report.pictures import plot
from insight.report.tables import show

__all__ = ["copies", "count", "losses", "plot", "show"]
