import os

import pytest
import torch
from hardware import needs_compiler

from kernels import build
from kernels.decoding import pack_for_decoding


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """Runs load_kernels as in a new process, for a source that compiles quickly, with an empty folder."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "tiny.cpp").write_text("int one() { return 1; }\n")
    monkeypatch.setattr(build, "__file__", str(tmp_path / "kernels" / "build.py"))
    monkeypatch.setattr(build, "loaded", lambda: False)
    monkeypatch.setattr(torch.library, "register_fake", lambda name: lambda function: function)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))

    def load() -> tuple[list[str], list[str]]:
        """Returns the messages, and the libraries that torch loaded."""
        said, loaded = [], []
        with monkeypatch.context() as patch:
            patch.setattr(torch.ops, "load_library", loaded.append)
            build.load_kernels(said.append)
        return said, loaded

    return load


BUILDING = ["building the kernels for this machine, once"]


@needs_compiler
def test_a_damaged_library_is_rebuilt_and_never_loaded(tiny, tmp_path):
    """As after a power cut or on a full disk; loading it would end the process with a bus error."""
    assert tiny()[0] == BUILDING
    (path,) = (tmp_path / "extensions").iterdir()
    whole = path.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"", whole[:-1] + bytes([whole[-1] ^ 1]), whole + b"more"):
        path.write_bytes(damaged)
        assert tiny() == (BUILDING, [str(path)])
        assert path.read_bytes() == whole
        assert tiny() == ([], [str(path)])


@needs_compiler
def test_the_lock_of_a_killed_build_is_not_waited_for(tiny, tmp_path):
    for name in ("lock", "tmp123/lock", "tmp123/built.so"):
        (tmp_path / "extensions" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "extensions" / name).touch()
    said, (library,) = tiny()
    assert said == BUILDING and library.endswith(".so")


@needs_compiler
def test_a_library_that_does_not_load_here_is_rebuilt_next_to_it(tiny, tmp_path, monkeypatch):
    """It is complete, but from a machine with other libraries that shares the home folder."""
    tiny()
    (path,) = (tmp_path / "extensions").iterdir()
    content = b"for newer libraries than these"
    other = path.with_name(f"{path.stem.rpartition('-')[0]}-{build._digest(content)}.so")
    path.unlink()
    other.write_bytes(content)

    def load(library):
        if library == str(other):
            raise OSError("version `GLIBC_9' not found")

    monkeypatch.setattr(torch.ops, "load_library", load)
    said = []
    build.load_kernels(said.append)
    assert said == BUILDING and set((tmp_path / "extensions").iterdir()) == {path, other}


@pytest.mark.parametrize("quantize", [False, True])
def test_an_unusable_cache_folder_gives_one_warning_and_no_kernels(small, tmp_path, monkeypatch, quantize):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "file" / "extensions"))
    monkeypatch.setattr(build, "loaded", lambda: False)
    model, tokens, said = small().float(), torch.randint(17, (2, 8)), []
    before = model(tokens)
    pack_for_decoding(model, quantize, said.append)
    (line,) = said
    assert line.startswith("the kernels for generation cannot be built, continuing without them, more slowly: ")
    assert f"Not a directory: '{tmp_path}/file" in line and line.endswith(
        "TORCH_EXTENSIONS_DIR may name another folder"
    )
    torch.testing.assert_close(model(tokens), before, rtol=0, atol=0.3 if quantize else 0)


@pytest.mark.parametrize("command", ["false", "/no/such/compiler", "'unclosed", " ", "c++ -std=no"])
def test_a_program_that_does_not_compile_is_no_compiler(monkeypatch, command):
    monkeypatch.setenv("CXX", command)
    assert not build.has_compiler()


@needs_compiler
def test_a_compiler_may_have_options(monkeypatch):
    monkeypatch.setenv("CXX", f"{os.environ.get('CXX') or 'c++'} -O1")
    assert build.has_compiler()
