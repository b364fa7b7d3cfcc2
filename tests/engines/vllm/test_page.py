"""What docs/vllm.md tells people to type exists in this vLLM."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "vllm.md").read_text(encoding="utf-8")
OURS = {"--json", "--host-memory", "--address", "--storage", "--storage-config"}


def test_every_flag_is_vllms_or_ours() -> None:
    vllms = set(make_arg_parser(FlexibleArgumentParser())._option_string_actions)
    named = set(re.findall(r"--[a-z][a-z0-9-]*[a-z0-9]", PAGE))
    assert named - vllms == OURS


def test_every_module_that_is_run_is_there() -> None:
    modules = set(re.findall(r"python -m (\S+)", PAGE))
    assert modules and all(find_spec(module) for module in modules)


def test_other_connectors_have_these_names() -> None:
    named = set(re.findall(r"`(\w+Connector\w*)`", PAGE))
    assert named and named <= set(KVConnectorFactory._registry)
