"""A resumed run keeps the settings in its config.yaml, except those given on the command line."""

import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from os.path import expanduser
from pathlib import Path

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from data.older import renamed

CONF = Path(__file__).resolve().parent
OF_A_START = ("resume", "init_from", "stop_after", "dry_run")  # apply to one start of a run, not to the run
INSTEAD = {"steps": "epochs", "epochs": "steps"}  # one replaces the other


def has_checkpoints(run: Path) -> bool:
    return any(run.glob("checkpoints/step_*/manifest.json"))


def run_of(checkpoint: str) -> Path | None:
    """The run folder of RUN, RUN:best, RUN:1200 or a step folder; None if it has no config.yaml."""
    path = Path(expanduser(checkpoint))
    if not path.is_dir() and (named := re.fullmatch(r"(.+):(best|\d+)", str(path))):
        path = Path(named[1])
    return next((run for run in (path, path.parent.parent) if (run / "config.yaml").is_file()), None)


def in_place(arguments: list[str]) -> list[str]:
    """The command line of train.py, with resume=RUN turned into resume=auto in RUN unless a name or folder is set."""
    given = dict(argument.partition("=")[::2] for argument in arguments)
    path = given.get("resume", "").strip("'\"")
    run = Path(expanduser(path))
    elsewhere = {"name", "hydra.run.dir", "hydra.sweep.dir", "-m", "--multirun"} & given.keys()
    if not path or elsewhere or run_of(path) != run or not has_checkpoints(run):
        return arguments
    others = [argument for argument in arguments if not argument.startswith("resume=")]
    return [*others, "resume=auto", f"hydra.run.dir={QuotedString(str(run), Quote.double).with_quotes()}"]


def with_its_own(composed: DictConfig, typed: list[str], run: Path, schema: type) -> DictConfig:
    """The composed config with the run's own settings, except those in `typed`, the command line.

    A group or an experiment that is chosen there replaces the run's settings. Settings that did not exist yet when the
    run started are as composed.
    """
    try:
        own = OmegaConf.load(run / "config.yaml")
    except (OSError, ValueError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise ValueError(f"{run}/config.yaml cannot be read: {' '.join(str(error).split())[:200]}") from error
    if not isinstance(own, DictConfig):
        raise ValueError(f"{run}/config.yaml is damaged: it holds no settings")
    own = OmegaConf.create(renamed(OmegaConf.to_container(own)))
    cfg, chosen = composed.copy(), {*_typed(typed)}
    for key in _settings(schema):
        group = key.partition(".")[0]
        if key in OF_A_START or {key, group, INSTEAD.get(key)} & chosen:
            continue
        value = OmegaConf.select(own, key, default=own)  # own: nothing is there
        if value is not own:
            OmegaConf.update(cfg, key, value, merge=False)
    return cfg


def _settings(schema: type) -> Iterator[str]:
    """All settings, by their dotted names."""
    for item in fields(schema):
        if is_dataclass(item.type):
            yield from (f"{item.name}.{one.name}" for one in fields(item.type))
        else:
            yield item.name


def _typed(arguments: list[str]) -> Iterator[str]:
    """The settings and groups that a command line sets, including those of an experiment."""
    for override in OverridesParser.create().parse_overrides(arguments):
        key = override.key_or_group
        yield key
        if key == "experiment" and (path := CONF / key / f"{override.value()}.yaml").is_file():
            yield from _of_experiment(yaml.safe_load(path.read_text(encoding="utf-8")) or {})


def _of_experiment(experiment: dict) -> Iterator[str]:
    for default in experiment.pop("defaults", []):
        yield from (name.split()[-1].strip("/") for name in default)  # override /model: nano
    for name, value in experiment.items():
        yield from (f"{name}.{one}" for one in value) if isinstance(value, dict) else (name,)
