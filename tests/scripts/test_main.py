"""`inkling NAME ...`, the console command."""

import subprocess
import sys
import tomllib

import pytest

from conf.entry import REPOSITORY
from scripts import main


def inkling(monkeypatch, capsys, *arguments: str) -> tuple[int, str, str]:
    """Returns the exit code, stdout and stderr."""
    monkeypatch.setattr(sys, "argv", ["inkling", *arguments])
    try:
        main.main()
        code = 0
    except SystemExit as ended:
        code = ended.code
    return code, *capsys.readouterr()


def test_it_is_installed_and_knows_every_entry_point():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"inkling": "scripts.main:main"}
    modules = [path for path in (REPOSITORY / "scripts").glob("*.py") if "@entry_point(" in path.read_text()]
    assert {"train", *(path.stem for path in modules)} == set(main.COMMANDS)


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_help_lists_the_commands_with_a_line_each(monkeypatch, capsys, arguments):
    code, out, err = inkling(monkeypatch, capsys, *arguments)
    assert (code, err) == (0, "")
    assert [line.split()[0] for line in out.splitlines()[2:]] == list(main.COMMANDS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "unknown command trian: did you mean train?"),
        (["xyz"], "unknown command xyz: there are train, generate, "),
        (["runs"], "there is no run in runs: start one with python train.py"),
        (["runs", "compare", "a", "b"], "settings have the form name=value, got a b: give 'runs=[a,b]'"),
        (["train", "modle.d_model=3"], "unknown setting modle.d_model: did you mean model.d_model?"),
        (["train", "--steps", "3"], "settings have the form name=value, got --steps: give steps=3"),
        (["train", "--stesp=3"], "got --stesp: unknown setting stesp: did you mean steps?"),
        (["generate", "checkpoint=x", "To", "be"], "got To be: a prompt comes last, after --"),
        (["generate", "--interactive"], "got --interactive: give interactive=true"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(monkeypatch, capsys, arguments, message):
    code, out, err = inkling(monkeypatch, capsys, *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("error: ") and message in err


@pytest.mark.parametrize(
    ("line", "choices"),
    [
        ("inkling tr", list(main.COMMANDS)),
        ("inkling train model.d_", ["model.d_ff=", "model.d_model="]),
        ("inkling prepare show data=tin", ["data=tinystories"]),
        ("inkling nope x", []),
    ],
)
def test_a_shell_completes_commands_settings_and_choices(monkeypatch, capsys, line, choices):
    monkeypatch.setenv("COMP_LINE", line)
    monkeypatch.setenv("COMP_POINT", str(len(line)))
    assert inkling(monkeypatch, capsys, "-sc", "query=bash")[1].split() == choices


@pytest.mark.slow
def test_help_imports_nothing_slow():
    code = "import sys; from scripts import main; main.main(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=True, capture_output=True)
