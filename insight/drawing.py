"""matplotlib, if it is installed."""


def pyplot():
    """matplotlib.pyplot, for files; ValueError with the command to install it if it is missing."""
    try:
        import matplotlib
    except ImportError:
        raise ValueError("a picture needs matplotlib: pip install -c requirements.lock matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
