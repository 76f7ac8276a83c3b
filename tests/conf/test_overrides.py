"""Values that Hydra's grammar refuses."""

import shlex

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import example, given, settings
from hypothesis import strategies as st

from conf.overrides import IF_ONE, MOST_ITEMS, readable
from conf.schema import Train
from conf.scripts import Benchmark, Evaluate, Generate, Runs

STRANGE = [
    "ü.txt",
    "a=b.txt",
    "(x).txt",
    "a#b",
    "<|endoftext|>",
    "$(id)",
    "a^b",
    "it's",
    'say "a"',
    "\\'",
    "'",
    "☃",
    "= ",
]
MORE = [
    "Hello, world",
    "runs/lr=0.1",
    "1e3",
    "1_0",
    "007",
    "true",
    "[INST]",
    "{a: b}",
    "a,b",
    "a\\",
    "choice(a,b)",
    "a\nb",
]
characters = st.characters(exclude_categories=["Cs"])


def value_of(override: str):
    return OverridesParser.create().parse_override(override).value()


@pytest.mark.parametrize("text", [*STRANGE, *MORE])
def test_a_string_is_taken_literally(text):
    assert value_of(readable(f"prompt={text}", Generate, several=False)) == text


@given(st.sampled_from(STRANGE), st.text(characters, max_size=8))
@settings(deadline=None)
def test_strings_that_hydra_refuses_are_taken_literally(strange, more):
    argument = f"sample.prompt={more}{strange}"
    read = readable(argument, Train, several=False)
    assert value_of(read) == more + strange or (read == argument and isinstance(value_of(read), str))


@given(st.sampled_from(STRANGE), st.lists(st.text(characters, max_size=8), max_size=2))
@settings(deadline=None)
@example("ü.txt", ["FALSE", "null", "1e3", "a\\(b"])
def test_a_list_is_suggested_with_quotes_for_shell_and_hydra(strange, others):
    items = ["a" + "".join(c for c in item if c not in ",\"'[]\\").strip() for item in others] + [strange.strip()]
    with pytest.raises(ValueError, match="needs quotes: ") as refused:
        readable(f"data.paths=[{','.join(items)}]", Train, several=False)
    ways = str(refused.value).rpartition(" needs quotes: ")[2].split(IF_ONE)
    (pasted,), *one = map(shlex.split, ways)
    assert pasted.startswith("data.paths=[")
    assert value_of(pasted) == items
    may_be_one = others and not any(item.startswith("'") for item in items)  # no quotes yet that decide it
    assert [value_of(*way) for way in one] == ([[",".join(items)]] if may_be_one else [])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("data.paths=[q/ü.txt]", """data.paths=[q/ü.txt] needs quotes: 'data.paths=["q/ü.txt"]'"""),
        ("data.paths=['x,y',c=d]", """'data.paths=['"'"'x,y'"'"',"c=d"]'"""),
        ("resume=a=b,c", """resume=a=b,c needs quotes: 'resume="a=b",c'""" + IF_ONE + """'resume="a=b,c"'"""),
        ("data.paths=[ü,x.txt]", """'data.paths=["ü",x.txt]'""" + IF_ONE + """'data.paths=["ü,x.txt"]'"""),
        ("data.paths=[,]", """data.paths=[,] needs quotes: 'data.paths=[","]'"""),
        ("data.paths=[ü,,b]", """needs quotes: 'data.paths=["ü",b]'""" + IF_ONE + """'data.paths=["ü,,b"]'"""),
        ("data.paths=[ü],[b]", "data.paths=[ü],[b] cannot be read: put it into a YAML file"),
        (
            "data.corpora={corpora/ü: 1}",
            "data.corpora={corpora/ü: 1} cannot be read: put it into a YAML file in conf/",
        ),
        ("steps=[[", "steps=[[ cannot be read"),
        ("ü=3", "ü=3 is not a setting: settings have the form name=value"),
        (f"skip_batches=[{'1,' * MOST_ITEMS}1]", "skip_batches has 2,001 items, too many for a command line"),
        ("data.paths=" + "[" * 4000, "cannot be read"),
        ("data.paths=[\udcff.txt]", "data.paths=[\\udcff.txt] is not valid UTF-8"),
    ],
)
def test_values_with_several_parts_are_refused_with_a_suggestion(given, message):
    with pytest.raises(ValueError) as refused:
        readable(given, Train, several=given.startswith("resume"))
    assert message in str(refused.value)


@pytest.mark.parametrize(
    "argument",
    [
        "steps=1,2",
        "model.positions=rope,alibi",
        "steps",
        "--help",
        "~data",
        "+a=3",
        "data.paths=[a b,c]",
        "resume=null",
    ],
)
def test_values_that_hydra_parses_are_unchanged(argument):
    assert readable(argument, Train, several=False) == argument
    assert readable(argument, Train, several=True) == argument


def test_the_values_of_a_sweep_stay_separate():
    assert readable("name=a,b", Train, several=True) == "name=a,b"
    assert readable("checkpoint=a,b", Evaluate, several=False) == 'checkpoint="a,b"'


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("runs=runs/A,runs/20261201-122516-b-00", "runs=[runs/A,runs/20261201-122516-b-00]"),
        ("runs=runs/A", "runs=[runs/A]"),
        ("seeds=1,2", "seeds=[1,2]"),
        ("runs=[runs/A,runs/B]", "runs=[runs/A,runs/B]"),
        ("runs=null", "runs=null"),
        ("rounds=1,2", "rounds=1,2"),
        ("overrides=[model.n_layers=6,optimizer.lr=1e-3]", 'overrides=["model.n_layers=6","optimizer.lr=1e-3"]'),
    ],
)
def test_a_list_needs_no_brackets_and_settings_in_it_no_quotes(given, read):
    schema = Runs if given.startswith("runs") else Benchmark
    assert readable(given, schema, several=False) == read
