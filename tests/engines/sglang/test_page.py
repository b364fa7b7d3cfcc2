"""What docs/sglang.md tells people to type exists in this SGLang."""

from __future__ import annotations

import json
import re
from pathlib import Path

import sglang
from sglang.srt.mem_cache.unified_cache.linker_config import UnifiedCacheLinkerConfig
from sglang.srt.server_args import ServerArgs

from engine_plugin.sglang.metrics import NAME

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "sglang.md").read_text(encoding="utf-8")
OURS = {
    *("--json", "--memory.managed-bytes", "--model", "--host-memory", "--address", "--storage", "--storage-config"),
}
ROUTES = {"/flush_cache", "/hicache/storage-backend", "/hicache/storage-backend/clear", "/update_weights_from_disk"}


def test_every_flag_is_sglangs_or_ours() -> None:
    sglangs = {f"--{name.replace('_', '-')}" for name in ServerArgs.__struct_fields__}
    named = set(re.findall(r"--[a-z][a-z0-9.-]*[a-z0-9]", PAGE))
    assert named - sglangs == OURS


def test_every_route_is_served() -> None:
    source = (Path(sglang.__file__).parent / "srt" / "entrypoints" / "http_server.py").read_text(encoding="utf-8")
    named = set(re.findall(r"(?:POST|PUT|DELETE|GET)`?[ `]+(/[a-z_/-]+)", PAGE)) | ROUTES
    assert all(f'"{route}"' in source for route in named)


def test_every_metric_is_counted() -> None:
    source = (Path(sglang.__file__).parent / "srt" / "observability" / "metrics_collector.py").read_text(
        encoding="utf-8"
    )
    named = set(re.findall(r"`(sglang:[a-z_]+)`", PAGE))
    assert len(named) >= 5
    assert {name for name in named if f'"{name}"' not in source} == {f"{NAME}_total"}


def test_the_linkers_config_is_what_sglang_reads() -> None:
    written = re.search(r"--unified-cache-external-linker-config '(\{.*\})'", PAGE)
    assert written is not None
    config = UnifiedCacheLinkerConfig.from_dict(json.loads(written[1]))
    assert (config.linker, config.linker_module_path) == ("CachesvcLinker", "engine_plugin.sglang.linker")
