"""Keys of the tests here, outcomes as they come in lists, and what a tier has."""

from cachekernels.pages import object_ids

from cachesvc.identity import store_keys
from storage_backends.base import Outcome
from tests.helpers.store_user import NAMESPACE, PAGE_BYTES, TENANT, some_keys

OK, EXISTS, MISS, CORRUPT, CHANGED = (int(o) for o in Outcome if o <= Outcome.CHANGED and o != Outcome.UNSUPPORTED)
NO_SPACE, THROTTLED, UNAVAILABLE, FAILED, CANCELLED = (
    int(o) for o in (Outcome.NO_SPACE, Outcome.THROTTLED, Outcome.UNAVAILABLE, Outcome.FAILED, Outcome.CANCELLED)
)
KEYS = some_keys(40)
FRAMES = 8


def held(backend, keys, tenant=TENANT, namespace=NAMESPACE):
    own = store_keys(tenant, namespace, PAGE_BYTES, keys)
    return (backend.contains(object_ids(own)) == Outcome.OK).tolist()


def stored(backend, keys, user=None):
    """Without a question that the backend would count."""
    whose = (user.request.tenant, user.request.namespace) if user else ()
    return held(backend.inner, keys, *whose)
