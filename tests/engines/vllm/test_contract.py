"""Every hook of vLLM that the connector relies on, with its signature, against the vLLM that is installed."""

from __future__ import annotations

import inspect
import logging
from types import FunctionType

import pytest
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.output import SchedulerOutput

from engine_plugin.vllm import compatibility
from engine_plugin.vllm.connector import CachesvcConnector


def is_hook(name: str) -> bool:
    """A part of vLLM's interface, that a connector may override."""
    found = next((vars(base)[name] for base in (KVConnectorBase_V1, SupportsHMA) if name in vars(base)), None)
    return isinstance(found, FunctionType | classmethod | property) and name != "__init__"


def test_this_vllm_has_every_hook() -> None:
    assert compatibility.problems() == []
    compatibility.check(vllm.__version__)


def test_every_hook_that_is_overridden_is_listed() -> None:
    listed = {hook.name for hook in compatibility.OVERRIDDEN}
    overridden = {name for name in vars(CachesvcConnector) if is_hook(name)}
    assert overridden <= listed, overridden - listed


@pytest.mark.parametrize("name", sorted(name for name in vars(CachesvcConnector) if is_hook(name)))
def test_vllm_can_call_the_connector_as_it_calls_its_own(name: str) -> None:
    """Every parameter of the base is taken, under its name or position."""
    base = next(base for base in (SupportsHMA, KVConnectorBase_V1) if name in vars(base))
    theirs, ours = inspect.getattr_static(base, name), inspect.getattr_static(CachesvcConnector, name)
    if isinstance(theirs, property):
        assert isinstance(ours, property)
        return
    assert isinstance(ours, classmethod) == isinstance(theirs, classmethod)
    wanted = inspect.signature(getattr(base, name)).parameters
    taken = inspect.signature(getattr(CachesvcConnector, name)).parameters
    assert list(taken) == list(wanted)
    for parameter in wanted.values():
        assert taken[parameter.name].kind is parameter.kind
        if parameter.default is not inspect.Parameter.empty:
            assert taken[parameter.name].default == parameter.default


def test_all_that_is_abstract_is_there() -> None:
    assert not CachesvcConnector.__abstractmethods__


def test_an_unknown_version_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        compatibility.check("0.99.1")
    assert ["0.99.1" in record.getMessage() for record in caplog.records] == [True]


def test_what_has_gone_or_changed_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(BlockPool, "unpin_blocks")
    monkeypatch.delitem(SchedulerOutput.__dataclass_fields__, "finished_req_ids")
    monkeypatch.setattr(KVConnectorBase_V1, "wait_for_save", lambda self, step: None)
    with pytest.raises(compatibility.Incompatible) as refused:
        compatibility.check(vllm.__version__)
    for name in ("unpin_blocks", "finished_req_ids", "wait_for_save takes (step), expected ()"):
        assert name in str(refused.value)
