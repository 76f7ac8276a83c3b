"""matplotlib, where it is installed."""


def pyplot():
    """matplotlib.pyplot, for files and not for a screen; ValueError with what to install."""
    try:
        import matplotlib
    except ImportError:
        raise ValueError("a picture needs matplotlib: pip install -c requirements.lock matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
