"""A native core that was built from other sources is told at its import."""

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from cachekernels import _core
from cachekernels.sources import SOURCES, check_built_from, digest_of

# Without `site`, by which an editable installation would answer for the package.
COMMAND = [sys.executable, "-S", "-c", "import sys; sys.path[:0] = sys.argv[1:]; import cachekernels.region"]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The package and the sources beside it, with the core that there is."""
    package = tmp_path / "kernels" / "cachekernels"
    shutil.copytree(SOURCES, tmp_path / "kernels" / "host")
    shutil.copytree(SOURCES.parent / "cachekernels", package, ignore=shutil.ignore_patterns("_core*", "__pycache__"))
    shutil.copy(str(_core.__file__), package)
    return package.parent


def imported(tree: Path) -> subprocess.CompletedProcess[str]:
    paths = [str(tree), str(Path(np.__file__).parents[1])]
    return subprocess.run([*COMMAND, *paths], capture_output=True, text=True, check=False, env={}, cwd=tree)


def test_the_core_is_of_the_sources_beside_it(tree: Path) -> None:
    assert _core.source_digest == digest_of(SOURCES)
    assert imported(tree).returncode == 0, imported(tree).stderr


@pytest.mark.parametrize("name", ["region.hpp", "bind_region.cpp"])
def test_a_core_of_other_sources_says_what_to_do(tree: Path, name: str) -> None:
    with (tree / "host" / name).open("a") as source:
        source.write("// one line more\n")
    error = imported(tree).stderr.splitlines()[-1]
    assert error == f"ImportError: the native core is of another version than {tree}/host: run make build"


def test_a_core_that_is_not_there_says_what_to_do(tree: Path) -> None:
    for core in (tree / "cachekernels").glob("_core*"):
        core.unlink()
    error = imported(tree).stderr.splitlines()[-1]
    assert error.startswith("ImportError: the native core is missing or of another version (")
    assert error.endswith("): run make build")


def test_a_core_from_before_it_knew_its_sources_says_what_to_do(tree: Path) -> None:
    for core in (tree / "cachekernels").glob("_core*"):
        core.unlink()
    (tree / "cachekernels" / "_core.py").write_text("")
    assert imported(tree).stderr.splitlines()[-1].endswith("): run make build")


def test_an_installed_package_has_no_sources_to_differ_from(tree: Path, tmp_path: Path) -> None:
    shutil.rmtree(tree / "host")
    assert imported(tree).returncode == 0
    check_built_from("anything", tmp_path / "nowhere")


def test_names_count_and_what_is_no_source_does_not(tmp_path: Path) -> None:
    (tmp_path / "a.cpp").write_text("one")
    before = digest_of(tmp_path)
    (tmp_path / "a.cpp~").write_text("two")
    assert digest_of(tmp_path) == before
    (tmp_path / "a.cpp").rename(tmp_path / "b.cpp")
    assert digest_of(tmp_path) != before
