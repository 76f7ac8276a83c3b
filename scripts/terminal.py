"""The output of the scripts: warnings, tables, numbers."""

import sys
from collections.abc import Collection, Iterable, Sequence

from rich.console import Console
from rich.table import Table

from conf.console import visible


def warn(text: str):
    print(visible(text, sys.stderr), file=sys.stderr)


def console() -> Console:
    """For tables on standard output; their lines are not wrapped in a file or a pipe."""
    return Console(width=None if sys.stdout.isatty() else 1000, highlight=False, markup=False, emoji=False)


def table(*columns: str, left: Collection[str], gap: int = 2) -> Table:
    """A table without rules; the columns in `left` are left-aligned, the others right-aligned."""
    empty = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0))
    for column in columns:
        empty.add_column(column, justify="left" if column in left else "right", overflow="fold")
    return empty


def show(columns: Sequence[str], rows: Iterable[Sequence[str]], left: Collection[str]):
    """Prints a table, see `table`."""
    filled = table(*columns, left=left)
    for row in rows:
        filled.add_row(*row)
    console().print(filled)


def number(value: float | None, digits: int = 4) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def percent(share: float) -> str:
    return f"{round(100 * share, 1) + 0.0:.1f} %"  # no -0.0
