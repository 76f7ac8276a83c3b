"""Entry points; nothing imports them."""
