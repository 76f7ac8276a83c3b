"""Entry points; nothing imports them."""

from conf import console  # noqa: F401  first: from here on Ctrl-C ends them quietly
