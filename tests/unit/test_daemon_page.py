"""docs/daemon.md names every key and every metric, and none that is not there."""

import asyncio
import re
from pathlib import Path

import pytest

from cachesvc.config.model import Config, Section, TierConfig
from cachesvc.config.text import as_toml
from cachesvc.daemon.up import compose
from storage_backends import registry

PAGE = (Path(__file__).parents[2] / "docs" / "daemon.md").read_text()
HISTOGRAM_ENDINGS = ("_bucket", "_count", "_sum")


@pytest.fixture(scope="module")
def metrics(tmp_path_factory):
    """Names of everything a daemon counts, gRPC's door included."""
    grpc_answers = pytest.importorskip("cachesvc.daemon.grpc_answers")
    config = Config.model_construct(
        **{name: field.get_default(call_default_factory=True) for name, field in Config.model_fields.items()}
    )
    config = config.model_copy(update={"tier": []})

    async def names():
        daemon = compose(config)
        grpc_answers.Answers(daemon.node.registry)
        found = {metric.name for metric in daemon.node.registry.metrics()}
        daemon.node.close()
        return found

    return asyncio.run(names())


def keys():
    for name, field in Config.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from (f"{name}.{key}" for key in field.annotation.model_fields)
    yield from (f"tier.{key}" for key in TierConfig.model_fields)


def test_every_key_is_there_and_no_other():
    part = PAGE[PAGE.index("## Configuration") : PAGE.index("## Doors")]
    first_cells = " ".join(line.split("|")[1] for line in part.splitlines() if line.startswith("| "))
    named = set(re.findall(r"`([a-z]+\.[a-z_]+)`", first_cells))
    assert named == set(keys())


def test_every_metric_is_there_and_no_other(metrics):
    named = set(re.findall(r"`(cachesvc_[a-z_]+)`", PAGE))
    assert named == metrics


def test_the_example_on_the_page_is_valid(tmp_path, monkeypatch):
    from cachesvc.config.sources import load_config

    blocks = [block for block in re.findall(r"^```\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL) if "[[tier]]" in block]
    assert blocks
    for number, block in enumerate(blocks):
        path = tmp_path / f"{number}.toml"
        path.write_text(block)
        config = load_config("cachesvc up", ["--config", str(path)])
        assert as_toml(config).count("[[tier]]") == block.count("[[tier]]") == len(config.tier)


def test_where_the_capacity_of_files_is_set_is_in_its_row():
    [row] = [line for line in PAGE.splitlines() if line.startswith("| `tier.capacity_bytes`")]
    assert "`tier.options.capacity_bytes`" in row
    for backend in sorted(registry.BUILT_IN.keys() - registry.WITHOUT_CAPACITY):
        assert f"`{backend}`" in row


def test_every_route_is_there():
    from cachesvc.daemon import admin

    named = set(re.findall(r"`(/[a-z/]+(?:TIER)?)`", PAGE))
    listed = set(re.findall(r"/(?:api/)?[a-z]+(?:/\{tier\})?", admin.__doc__[admin.__doc__.index("GET /healthz") :]))
    assert {name.replace("TIER", "{tier}") for name in named} >= {name for name in listed if name != "/api"}
