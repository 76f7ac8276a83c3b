"""Shared by train.py and the scripts: from the command line to a checked config, and from an error to one line."""

import atexit
import difflib
import json
import os
import re
import secrets
import shlex
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from conf import console, resumed
from conf.overrides import SHOWN, is_list, kind_of, readable
from conf.parsing import parse, setting_names, unknown_key

REPOSITORY = Path(__file__).resolve().parent.parent
MAKERS = ("train", "prepare", "import_hf")  # these write a folder; the result of the others is what they print
# Hydra's own, and those that a value follows
OPTIONS = "-h --help --hydra-help --version -r --run -m --multirun --resolve -sc --shell-completion -i --info"
OPTIONS_WITH_VALUE = "-c --cfg -p --package -cp --config-path -cn --config-name -cd --config-dir --experimental-rerun"
RUN_NAME = re.compile(r"\d{8}-\d{6}-(.+)-[0-9a-f]{6}")


def check_output(setting: str, path: str | Path | None):
    """ValueError, before any work, if an output file cannot be written."""
    if path is None:
        return
    path = Path(path)
    if not path.parent.is_dir() or path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"{path} cannot be written: give {setting}=FILE in an existing folder, or {setting}=null")


def newest_run(name: str) -> Path | None:
    """The newest run of that name that has a checkpoint."""
    runs = [run for run in Path("runs").glob("*") if resumed.has_checkpoints(run)]
    runs = [run for run in runs if (found := RUN_NAME.fullmatch(run.name)) and found[1] == name]
    return max(runs, default=None)


def run_dir(resume: str | None, name: str) -> str:
    """The run's folder: with resume=auto the newest run of that name that has a checkpoint, else a new one.

    Rank 0 decides; the other ranks get a temporary folder until it tells them.
    """
    if not re.fullmatch(r"[\w.-]+", name):
        raise ValueError(f"name must consist of letters, digits, '.', '_' and '-', got {name!r}")
    if int(os.environ.get("RANK", 0)) > 0:
        folder = tempfile.mkdtemp()
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        return folder
    if resume == "auto" and (run := newest_run(name)) is not None:
        return str(run)
    return f"runs/{datetime.now():%Y%m%d-%H%M%S}-{name}-{secrets.token_hex(3)}"


def of_checkpoint(path: str | None, name: str):
    """An argument of a checkpoint's model, the seq_len of its training, or the folder of its tokenizer."""
    if path is None:
        raise ValueError("a model and tokenizer from_checkpoint need init_from, got null: give init_from=RUN")
    path = os.path.expanduser(path)
    run = Path(path) if Path(path).is_dir() else Path(path.rpartition(":")[0] or path)  # RUN:best: all have one model
    folders = [run, *sorted(run.glob("checkpoints/step_*"), reverse=True)]
    folder = next((folder for folder in folders if (folder / "model.json").is_file()), None)
    if folder is None:
        raise ValueError(f"init_from: there is no checkpoint in {path}: give a run folder or a step folder")
    if name == "tokenizer":
        return str(folder / "tokenizer")
    try:
        about = json.loads((folder / "model.json").read_text(encoding="utf-8"))
        return about["seq_len"] if name == "seq_len" else about["arguments"][name]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"init_from: {folder}/model.json does not say {name} ({error!r})") from error


OmegaConf.register_new_resolver("of_checkpoint", of_checkpoint, replace=True)
OmegaConf.register_new_resolver("times", lambda a, b: a * b, replace=True)
OmegaConf.register_new_resolver("run_dir", run_dir, use_cache=True, replace=True)
OmegaConf.register_new_resolver("unless", lambda other, value: value if other is None else None, replace=True)
OmegaConf.register_new_resolver("repository", lambda _="": str(REPOSITORY), replace=True)


def entry_point(
    config_name: str,
    schema: type,
    actions: tuple[str, ...] | dict[str, tuple[str, ...]] = (),
    default_action: str | None = None,
) -> Callable:
    """Decorates `run(cfg)` of an entry point: composes conf/CONFIG_NAME.yaml with the command line and parses it.

    With `actions` it calls run(cfg, action): one of these words may come first on the command line; the default is
    `default_action`. As a dict, `actions` maps each action to the settings that it uses, the main one first; settings
    of other actions are then refused, and so is a command line without an action.

    The text after `--` on the command line becomes the setting `prompt`. Only train.py has a run folder; the other
    scripts leave nothing behind. A user's mistake, or a file that cannot be read or written, prints one line and exits
    with 2; Ctrl-C exits with 130. A closed output pipe is not an error and does not stop a run. Of several runs (-m),
    failed ones are reported and do not stop the others.
    """

    def decorate(run: Callable) -> Callable:
        def main():
            os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # Hydra then raises its errors instead of printing them
            makes = config_name in MAKERS
            console.guard_output(config_name == "generate", note="continuing without it" if makes else "")
            console.hear_signals()
            _check_ranks()
            text = _cut_text(sys.argv)
            action = default_action
            if actions and len(sys.argv) > 1 and re.fullmatch(r"\w+", sys.argv[1]):
                action = sys.argv.pop(1)
                if action not in actions:
                    _fail(f"{action} is not an action: it must be one of {', '.join(actions)}")
            several = not {"-m", "--multirun"}.isdisjoint(sys.argv)
            if config_name != "train" and several:
                _fail("only train.py takes several runs (-m)")
            uses = actions[action] if isinstance(actions, dict) and action is not None else (None,)
            begun, failed, process = [], {}, os.getpid()  # of several runs: their numbers, and exit codes

            def checked_run(composed: DictConfig):  # submitit pickles it with everything that it refers to
                begun.append(HydraConfig.get().job.num if several else None)
                try:
                    if isinstance(actions, dict):
                        _check_uses(action, actions)
                    if config_name == "train":
                        composed = _resumed(composed, schema)
                    cfg: Any = parse(composed, schema)
                    if text is not None:
                        if not hasattr(cfg, "prompt"):
                            raise ValueError(f"text after -- has no effect here, got {text!r}")
                        cfg = replace(cfg, prompt=text)
                    run(cfg, action) if actions else run(cfg)
                    sys.stdout.flush()
                    if not makes:
                        console.check()
                except (ValueError, OmegaConfBaseException, OSError) as error:
                    if isinstance(error, BrokenPipeError) and error.filename == console.STDOUT:
                        return  # the reader of the output, such as `head`, has closed it
                    if HydraConfig.get().mode != RunMode.MULTIRUN:
                        _fail(one_line(error))
                    say_failed(one_line(error), 2)
                except Exception as error:
                    if HydraConfig.get().mode != RunMode.MULTIRUN:
                        raise
                    traceback.print_exc()
                    say_failed(type(error).__name__, 1)
                finally:
                    _remove_empty_run_folder()  # after a mistake, a dry run, or a signal before the first step

            def say_failed(message: str, code: int):
                """Reports that one of several runs failed; the next one still starts."""
                job = HydraConfig.get()
                message = f"job {job.job.num} ({shlex.join(job.overrides.task)}): {message}"
                if os.getpid() != process:  # in a launcher's own process, which passes errors on
                    raise ValueError(message)
                _say(message)
                failed[job.job.num] = code

            try:
                if not makes:
                    console.check()
                _check_form(sys.argv[1:], schema, uses[0])
                sys.argv[1:] = [readable(argument, schema, several) for argument in sys.argv[1:]]
                if config_name == "train":
                    sys.argv[1:] = resumed.in_place(sys.argv[1:])
                hydra.main(version_base="1.3", config_path="../conf", config_name=config_name)(checked_run)()
            except (HydraException, OmegaConfBaseException, ValueError, OSError) as error:
                _fail(_explain(error, schema))
            except KeyboardInterrupt:
                print("\ninterrupted", file=sys.stderr)
                sys.exit(130)
            if failed:
                _say(f"{len(failed)} of {len(begun)} jobs failed: {', '.join(map(str, failed))}")
                sys.exit(min(failed.values()))

        return main

    return decorate


def _resumed(composed: DictConfig, schema: type) -> DictConfig:
    """The config with the settings of the run that is resumed, if there is one."""
    job, resume = HydraConfig.get(), OmegaConf.select(composed, "resume")
    if resume is None:
        return composed
    folder = Path(job.runtime.output_dir)
    if resume == "auto" and int(os.environ.get("RANK", 0)) > 0 and not resumed.has_checkpoints(folder):
        folder = newest_run(composed.name) or folder  # the folder of rank 0
    run = resumed.run_of(str(folder if resume == "auto" else resume))
    if run is None or not resumed.has_checkpoints(run):
        return composed
    return resumed.with_its_own(composed, list(job.overrides.task), run, schema)


def _cut_text(argv: list[str]) -> str | None:
    """Removes `--` and the words after it from argv; returns these words joined by single spaces."""
    if "--" not in argv:
        return None
    at = argv.index("--")
    text = " ".join(argv[at + 1 :])
    del argv[at:]
    return text


def _check_form(arguments: list[str], schema: type, main_setting: str | None):
    """ValueError for arguments that are neither name=value nor Hydra's options: `--name value`, or a single word.

    It shows the correct form; a single word is taken for a value of `main_setting`.
    """
    wrong: list[str] = []
    values: dict[str, list[str]] = {}  # of the settings that are meant
    names, setting, after_option, rest = setting_names(schema), main_setting, False, iter(arguments)
    for argument in rest:
        option, equals, value = argument.partition("=")
        if option in OPTIONS_WITH_VALUE.split():
            if not equals:
                next(rest, None)
        elif option in OPTIONS.split() or argument.startswith("~"):
            continue
        elif option.startswith("-"):
            wrong.append(option)
            setting, after_option = option.lstrip("-").replace("-", "_"), True
            values.setdefault(setting, []).extend([value] if equals else [])
        elif not equals or (main_setting == "overrides" and "." in option and not option.startswith(("hydra.", "+"))):
            if not after_option:
                wrong.append(argument)
            values.setdefault(setting or argument, []).append(argument if setting else "...")
            if not is_list(setting or argument, schema):
                setting, after_option = main_setting, False
    if not wrong:
        return
    said = f"settings have the form name=value, got {' '.join(wrong)[:SHOWN]}"
    if all("=" in argument for argument in wrong):
        said = f"settings for train.py belong in overrides, got {' '.join(wrong)[:SHOWN]}"
    if unknown := next((name for name in values if name not in names), None):
        if "prompt" in names and not unknown.startswith("-"):
            raise ValueError(f"{said}: a prompt comes last, after --")
        raise ValueError(f"{said}: {unknown_key(unknown, schema)}")
    given = []
    for name, typed in values.items():
        if is_list(name, schema):
            given.append(f"{name}=[{','.join(typed) or '...'}]")
        else:
            given.append(f"{name}={' '.join(typed) or ('true' if kind_of(name, schema) is bool else '...')}")
    raise ValueError(f"{said}: give {' '.join(map(shlex.quote, given))}")


def _check_uses(action: str | None, actions: dict[str, tuple[str, ...]]):
    """ValueError if there is no action, or for a setting that the action does not use."""
    if action is None:
        raise ValueError(f"an action must come first, one of {', '.join(actions)}")
    for typed in HydraConfig.get().overrides.task:
        name = typed.partition("=")[0].lstrip("+~")
        others = [other for other, uses in actions.items() if name in uses]
        if others and action not in others:
            raise ValueError(f"{name} has no effect with {action}, only with {', '.join(others)}")


def _explain(error: Exception, schema: type) -> str:
    """One line for an error that Hydra found on the command line."""
    message = one_line(error)
    if key := re.search(r"Could not override '([^']+)'", message):
        group, _, setting = key[1].rpartition(".")
        if key[1] in setting_names(schema):
            choices = " or ".join(f"{group}={choice}" for choice in _choices_with(group, setting))
            return f"{key[1]} is a setting of the group {group}, but no {group} is chosen: give {choices} as well"
        return unknown_key(key[1], schema)
    if key := re.search(r"Could not append to config.*? '([^']+)'", message):
        if "already at" in message:
            return f"{key[1]} exists already: give {key[1]}=... without +"
        return unknown_key(key[1], schema)
    if setting := re.search(r"Error parsing override '(.*?)' missing EQUAL", message):
        return f"{setting[1]} is not a setting: settings have the form name=value"
    if choice := re.search(
        r"Could not find '(.+)/(.*?)' Available options in '.*?': (.*?) Config search path", message
    ):
        group, given, options = choice.groups()
        near = difflib.get_close_matches(given, options.split(), n=1)
        hint = f": did you mean {near[0]}?" if near else f": there are {', '.join(options.split())}"
        return f"{group}={given} is unknown{hint}"
    if setting := re.search(r"^(.*) full_key: (\S+)", message):  # from OmegaConf, about an interpolation
        return f"{setting[2]}: {setting[1]}"
    return message


def _choices_with(group: str, setting: str) -> list[str]:
    """The YAML files of a group that have a value for this setting."""
    paths = sorted((REPOSITORY / "conf" / group).glob("*.yaml"))
    return [path.stem for path in paths if re.search(rf"^{setting}:", path.read_text(encoding="utf-8"), re.MULTILINE)]


def _check_ranks():
    """Checks the environment variables in which torchrun passes the rank of a process."""
    for name, least in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1)):
        value = os.environ.get(name, "1")
        if not (value.isdecimal() and int(value) >= least):
            os.environ["RANK"] = "0"  # so that the error is printed
            _fail(f"the environment's {name} must be a number from {least}, got {value!r}: unset it, or use torchrun")


def one_line(error: Exception) -> str:
    """The message of an error on one line; for a file its path and the reason."""
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split())


def _fail(message: str):
    _say(message)
    sys.exit(2)


def _say(mistake: str):
    rank = int(os.environ.get("RANK", 0))
    if rank > 0:  # if rank 0 reports the same error, torchrun ends this process meanwhile
        time.sleep(2)
    where = f" on rank {rank}" if rank else ""
    print(console.visible(f"error{where}: {mistake}", sys.stderr), file=sys.stderr)


def _remove_empty_run_folder():
    """Removes a run folder that is still empty: Hydra makes it before anything is checked.

    Only folders named by run_dir are removed; of a sweep, the job's folder, and then the sweep's if it is empty too.
    """
    folder = Path(HydraConfig.get().runtime.output_dir)
    of_several = RUN_NAME.fullmatch(folder.parent.name)
    if (of_several or RUN_NAME.fullmatch(folder.name)) and folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
        if of_several and {file.name for file in folder.parent.iterdir()} <= {"multirun.yaml"}:
            shutil.rmtree(folder.parent)
