"""Which packages may import which."""

import ast

import pytest

from conf.entry import REPOSITORY

ALLOWED = {
    "kernels": {"kernels"},
    "model": {"model"},
    "data": {"data"},
    "conf": {"conf", "model", "data", "training"},  # their settings are composed in conf
    "training": {"training", "model", "kernels", "data", "conf.console"},
    "insight": {"insight", "model", "data.files"},
    "scripts": {"scripts", "model", "kernels", "data", "conf", "training", "insight"},
}
LAZY = {"wandb", "datasets", "rustbpe", "transformers", "tiktoken", "captum"}  # imported only in functions, or never


def imports(path) -> set[tuple[str, bool]]:
    """Returns (module, whether at the top of the file) for every import, except those for type checkers only."""
    tree = ast.parse(path.read_text())
    blocks = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    unseen, found = {node for block in blocks for node in ast.walk(block)}, set()
    for node in ast.walk(tree):
        names = []
        if node in unseen:
            continue
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module]
        found |= {(name, node in tree.body) for name in names}
    return found


@pytest.mark.parametrize("package", ALLOWED)
def test_packages_import_only_from_lower_layers(package):
    ours = {*ALLOWED, "train", "tests"}
    files = sorted((REPOSITORY / package).rglob("*.py"))
    assert files
    for path in files:
        for module, at_top in imports(path):
            top = module.split(".")[0]
            assert top not in ours or {top, module} & ALLOWED[package], f"{path} imports {module}"
            assert not (at_top and top in LAZY), f"{path} imports {module} at its top"
