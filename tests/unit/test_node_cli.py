"""The command line: sub-commands from entry points, what follows their name untouched, and a hint where an extra is
missing."""

import builtins
import re
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from cachesvc import cli
from cachesvc.rpc.codec import versions
from engine_plugin.flags.command import ENGINES
from storage_backends import registry

SEEN = []


def command(argv):
    SEEN.append(argv)
    return 3


def entry(name, value):
    return EntryPoint(name=name, value=value, group=cli.GROUP)


@pytest.fixture
def commands(monkeypatch):
    SEEN.clear()
    # importlib import mode does not put test modules into sys.modules under a name an entry point could use
    monkeypatch.setitem(sys.modules, "some_command", sys.modules[__name__])
    found = [entry("engine", "some_command:command"), entry("broken", "no_such_module:command")]
    monkeypatch.setattr(cli, "entry_points", lambda group: found)


@pytest.mark.usefixtures("commands")
@pytest.mark.parametrize("arguments", [[], ["--help"], ["--port=3", "-x", "a", "--", "b"], ["version"]])
def test_a_command_gets_everything_behind_its_name_and_its_status_is_the_exit_status(arguments):
    assert cli.main(["engine", *arguments]) == 3
    assert [arguments] == SEEN


@pytest.mark.usefixtures("commands")
def test_our_own_commands_need_no_entry_point(capsys):
    assert cli.main(["version"]) == 0
    assert capsys.readouterr().out.strip() == versions().software
    for name in cli.OWN:
        assert cli.main([name, "--help"]) == 0


@pytest.mark.usefixtures("commands")
def test_an_unknown_command_is_an_error(capsys):
    assert cli.main(["engin"]) == 2
    assert "engin" in capsys.readouterr().err


@pytest.mark.usefixtures("commands")
def test_help_lists_the_commands_without_loading_them(capsys):
    assert cli.main(["--help"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "broken A command of another package; see `cachesvc broken --help`." in told.replace("│ ", "").replace(
        "│", ""
    )


def test_help_says_of_each_command_what_it_does(capsys, monkeypatch):
    monkeypatch.setattr(cli, "entry_points", lambda group: [entry(name, "some:command") for name in cli.OTHERS])
    assert cli.main(["--help"]) == 0
    told = capsys.readouterr().out
    for text in (*cli.OTHERS.values(), *(text for _, text in cli.OWN.values())):
        assert text in told
    assert ":command" not in told
    assert all(engine in told.lower() for engine in ENGINES)


@pytest.mark.usefixtures("commands")
def test_a_command_of_others_that_cannot_be_imported_names_no_extra_of_ours(capsys):
    assert cli.main(["broken"]) == 1
    error = capsys.readouterr().err
    assert "no_such_module" in error
    assert "another package" in error
    assert "extra" not in error


@pytest.mark.parametrize(
    ("name", "extra"), [("status", "server"), ("engine", "engine"), ("demo", "engine"), ("flags", "server")]
)
def test_a_command_that_cannot_be_imported_names_its_extra_and_both_ways_to_it(capsys, monkeypatch, name, extra):
    monkeypatch.setattr(cli, "entry_points", lambda group: [entry(name, "no_such_module:command")])
    monkeypatch.setitem(cli.OWN, "status", ("no_such_module:command", ""))
    assert cli.main([name]) == 1
    error = capsys.readouterr().err
    assert f"install the extra {extra!r}" in error
    assert f"pip install -e '.[{extra}]'" in error
    assert f'pip install "$(ls cachesvc-*.whl)[{extra}]"' in error


def test_every_extra_that_a_message_names_is_one():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].keys()
    assert {*cli.EXTRAS.values(), "redis", "s3", "fsspec", "zstd"} == extras
    named = re.findall(r"install the extra '(\w+)'", " ".join(registry.INSTALL.values()))
    assert set(named) == {"redis", "s3", "fsspec"}
    assert cli.EXTRAS.keys() == {*cli.OWN, *cli.OTHERS}


@pytest.fixture
def no_typer(monkeypatch):
    real_import = builtins.__import__

    def without_typer(name, *args, **kwargs):
        if name == "typer":
            raise ImportError("No module named 'typer'")
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_typer)


@pytest.mark.usefixtures("commands", "no_typer")
def test_without_typer_the_error_names_the_server_extra(capsys):
    assert cli.main(["--help"]) == 1
    assert "install the extra 'server'" in capsys.readouterr().err


@pytest.mark.usefixtures("no_typer")
def test_the_nodes_own_commands_do_not_load_typer(capsys):
    assert cli.main(["version", "--json"]) == 0
    assert "protocol" in capsys.readouterr().out
