"""Measures the claims of the attention literature.  python -m scripts.lessons [NAME | all]"""

import sys
from pathlib import Path

import torch

from conf.entry import check_output, entry_point
from conf.scripts import Lessons
from insight.drawing import pyplot
from insight.lessons import LESSONS
from insight.lessons.lesson import Lesson, as_text
from training import checkpoint

SEEDED = ("mask", "heads", "positions")  # lessons that train a model


@entry_point("lessons", Lessons, actions=(*LESSONS, "all"))
def main(cfg: Lessons, action: str | None):
    if not teach(cfg, action):
        sys.exit(1)


def teach(cfg: Lessons, action: str | None) -> bool:
    """Prints a lesson, or all, or the list of lessons without an action; returns whether every claim holds."""
    if cfg.checkpoint is not None and action != "shapes":
        raise ValueError(f"checkpoint has an effect in the lesson shapes only, got {action}")
    if action is None:
        for name, module in LESSONS.items():
            print(f"{name:10} {about(module)}")
        return True
    names = list(LESSONS) if action == "all" else [action]
    pictures = _pictures(cfg.plot, names)
    torch.set_num_threads(1)  # the tensors are small; and the numbers are the same on every machine
    all_hold = True
    for i, name in enumerate(names):
        module, given = LESSONS[name], {}
        if name in SEEDED:
            given["seed"] = cfg.seed
        if cfg.checkpoint is not None:
            given["model"] = checkpoint.load_model(checkpoint.find(cfg.checkpoint))
        lesson = module.lesson(**given)
        print("\n" * (i > 0) + page(name, lesson), flush=True)
        if name in pictures:
            _draw(module, lesson.numbers, pictures[name])
        all_hold &= lesson.holds
    return all_hold


def page(name: str, lesson: Lesson) -> str:
    """The printed form of a lesson."""
    return f"{name}: {about(LESSONS[name])}\n\n{as_text(lesson)}"


def about(module) -> str:
    """The subject of a lesson, in a line."""
    return module.__doc__.splitlines()[0]


def _pictures(plot: str | None, names: list[str]) -> dict[str, Path]:
    """The path of each lesson's picture."""
    if plot is None:
        return {}
    pyplot()  # before any work
    path = Path(plot)
    if path.suffix == ".png":
        if len(names) > 1:
            raise ValueError(f"plot must be a folder for several lessons, got {plot}")
        check_output("plot", path)
        return {names[0]: path}
    if path.suffix:
        raise ValueError(f"plot must be a folder or end in .png, got {plot}")
    path.mkdir(parents=True, exist_ok=True)
    return {name: path / f"{name}.png" for name in names}


def _draw(module, numbers: dict, path: Path):
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    FigureCanvasAgg(figure)
    module.draw(numbers, figure)
    figure.savefig(path, dpi=110)
    print(f"\n{path}")


if __name__ == "__main__":
    main()
