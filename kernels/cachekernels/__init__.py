"""The native core and its typed faces. ImportError where the core is not there, or not of the sources beside it."""

from cachekernels import sources

try:
    from cachekernels._core import source_digest
except ImportError as error:  # no core at all, or one from before it knew its sources
    raise ImportError(f"the native core is missing or of another version ({error}): run make build") from error

sources.check_built_from(source_digest)
