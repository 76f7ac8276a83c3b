"""Settings as the command line would compose them, for tests, in a tenth of the time.

Hydra reads YAML files and builds its list of defaults again for each command line. The config of a choice of groups
is the same in all tests, so it is composed once; single values are then set in a copy, by Hydra's own function.
"""

import copy
import re
from functools import cache

from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig

from conf.entry import REPOSITORY
from conf.parsing import parse
from conf.schema import Train

CONF = REPOSITORY / "conf"
PARSER = OverridesParser.create()


def settings(*overrides: str, config: str = "train", kind: type = Train):
    """The parsed config of a command line."""
    values = [one for one in overrides if is_value(one)]
    cfg = copy.deepcopy(composed(config, *(one for one in overrides if not is_value(one))))
    ConfigLoaderImpl._apply_overrides_to_config(PARSER.parse_overrides(values), cfg)
    return parse(cfg, kind)


def is_value(override: str) -> bool:
    """Whether it sets an existing setting of ours, rather than choosing from a group or using + or ~."""
    name = re.match(r"([A-Za-z_][\w.]*)=", override)
    return bool(name) and not name[1].startswith("hydra") and not (CONF / name[1]).is_dir()


@cache
def composed(config: str, *overrides: str) -> DictConfig:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose(config, overrides=list(overrides))
