"""`inkling NAME ...`, the console command: runs the module of that name as `python -m` would.  inkling --help"""

from conf import console  # first: from here on Ctrl-C ends it quietly

# isort: split
import difflib
import sys
from importlib import import_module
from importlib.metadata import version

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
    "benchmark": "measures speed, memory and learning, beside other programs",
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
    elif name in COMMANDS:
        sys.argv = [f"inkling {name}", *arguments]
        import_module("train" if name == "train" else f"scripts.{name}").main()
    else:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(COMMANDS)}"
        print(console.visible(f"error: unknown command {name}: {hint}", sys.stderr), file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
