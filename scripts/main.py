"""The console command `inkling NAME ...`: runs the module of that name as `python -m` would.  inkling --help"""

from conf import console  # first: from here on Ctrl-C ends it quietly

# isort: split
import difflib
import os
import sys
from importlib import import_module
from importlib.metadata import version

import hydra

from conf import entry  # noqa: F401  what the configs compute

COMMANDS = {
    "train": "trains a GPT",
    "generate": "generates text with a trained model",
    "evaluate": "loss, perplexity and bits per byte of a trained model on validation text",
    "runs": "lists, compares and plots runs",
    "prepare": "turns text into token shards",
    "explain": "which parts of a text and of a model lead to what it predicts",
    "doctor": "examines a model and says what is wrong with it",
    "lessons": "lessons on attention, measured here",
    "import_hf": "turns a Llama in the Hugging Face layout into a checkpoint",
    "benchmark": "measures speed, memory and learning next to other programs",
}


def main():
    """Imports the module of the first argument, and no other, and calls its `main`."""
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        print("usage: inkling NAME [name=value ...]      inkling NAME --help lists the settings\n")
        for command, about in COMMANDS.items():
            print(f"  {command:<10} {about}")
    elif name == "--version":
        print(f"inkling {version('inkling-lm')}")
    elif name in ("-sc", "--shell-completion"):
        complete(arguments)
    elif name in COMMANDS:
        sys.argv = [f"inkling {name}", *arguments]
        import_module("train" if name == "train" else f"scripts.{name}").main()
    else:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(COMMANDS)}"
        print(console.visible(f"error: unknown command {name}: {hint}", sys.stderr), file=sys.stderr)
        sys.exit(2)


def complete(arguments: list[str]):
    """Shell completion as Hydra offers it, of a command's settings; before these, of the commands themselves.

    https://hydra.cc/docs/1.3/tutorials/basic/running_your_app/tab_completion/
    """
    command = "train"
    if (line := os.environ.get("COMP_LINE")) is not None:  # what was typed, up to where TAB was pressed
        command, space, rest = line.partition(" ")[2].lstrip().partition(" ")
        if not space:
            print(*COMMANDS)
            return
        *words, last = rest.split(" ")
        line = " ".join(["inkling", *(word for word in words if "=" in word), last])  # without actions
        os.environ |= {"COMP_LINE": line, "COMP_POINT": str(len(line))}
    if command in COMMANDS:
        sys.argv = ["inkling", "-sc", *arguments]
        hydra.main(version_base="1.3", config_path="../conf", config_name=command)(print)()


if __name__ == "__main__":
    main()
