import json
import subprocess
import sys
from pathlib import Path

from conf.entry import REPOSITORY


def test_the_benchmark_of_data_measures_both_sides(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    arguments = ["data", "--source", "repository", "--megabytes", "1", "--rounds", "1", "--json", "out.json"]
    result = subprocess.run(
        [sys.executable, "-m", "scripts.benchmark", *arguments], capture_output=True, text=True, timeout=200
    )
    assert result.returncode == 0, result.stderr
    writing, reading = json.loads(Path("out.json").read_text())["results"]
    assert [name.split(",")[0] for name in writing["measured"]] == ["inkling", "datasets.map"]
    assert all(value > 0 for table in (writing, reading) for values in table["measured"].values() for value in values)
    assert "times datasets.map" in result.stdout
