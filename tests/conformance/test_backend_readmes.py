"""Each backend's README: its table names every option and no other, and its example runs as it stands."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from storage_backends import registry
from storage_backends.file.config import FileConfig
from storage_backends.fsspec.config import FsspecConfig
from storage_backends.memory.config import MemoryConfig
from storage_backends.nixl.config import NixlConfig
from storage_backends.redis import config as redis_config
from storage_backends.s3.config import S3Config
from tests.helpers.redis_servers import Server
from tests.helpers.seaweed import ACCESS_KEY, SECRET_KEY, Seaweed

ROOT = Path(__file__).parents[2] / "storage_backends"
OPTIONS = {
    "file": [*FileConfig.__dataclass_fields__],
    "fsspec": [*FsspecConfig.__dataclass_fields__],
    "memory": [*MemoryConfig.__dataclass_fields__],
    "nixl": [*NixlConfig.__dataclass_fields__],
    "redis": [*redis_config.OPTIONS],
    "s3": [*S3Config.__dataclass_fields__],
}


def readme(backend: str) -> str:
    return (ROOT / backend / "README.md").read_text()


def run_example(backend: str, change: Callable[[str], str] = str) -> None:
    """The first block of Python, with places changed to those of the test."""
    block = re.search(r"```python\n(.*?)```", readme(backend), re.DOTALL)
    assert block is not None
    exec(compile(change(block[1]), f"{backend}/README.md", "exec"), {})


@pytest.mark.parametrize("backend", OPTIONS)
def test_the_table_names_the_options(backend: str) -> None:
    rows = re.findall(r"^\| (`[^|]*`) \|", readme(backend), re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(named) == sorted(OPTIONS[backend])


@pytest.mark.parametrize("backend", ["fsspec", "redis", "s3"])
def test_its_extra_is_installed_in_a_clone_and_with_a_wheel(backend: str) -> None:
    for line in (f"pip install -e '.[{backend}]'", f'pip install "$(ls cachesvc-*.whl)[{backend}]"'):
        assert line in readme(backend)
        assert line in registry.INSTALL[backend]


def test_file_example(tmp_path: Path) -> None:
    run_example("file", in_a_directory(tmp_path))
    assert (tmp_path / "writers").is_dir()


def test_memory_example() -> None:
    run_example("memory")


def test_s3_example(seaweed: Seaweed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its credentials come from the environment."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    run_example("s3", lambda code: code.replace("http://127.0.0.1:8333", seaweed.endpoint))


def test_redis_example(valkey_server: Server) -> None:
    run_example("redis", lambda code: code.replace("redis://127.0.0.1:6379", valkey_server.tcp_url))


def test_fsspec_example(tmp_path: Path) -> None:
    run_example("fsspec", lambda code: code.replace("/srv/pages", str(tmp_path)))
    assert len(list(tmp_path.glob("00/*.page"))) == 1


def test_nixl_example(tmp_path: Path) -> None:
    run_example("nixl", in_a_directory(tmp_path))
    assert (tmp_path / "writers").is_dir()


def in_a_directory(path: Path) -> Callable[[str], str]:
    return lambda code: code.replace("/var/cache/cachesvc", str(path)).replace("200 GiB", "1 MiB") + "\nbackend.close()"
