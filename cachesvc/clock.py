"""The clock of the node: the storage layers' own, so that one manual clock moves both in a test."""

from storage_backends.clock import Clock, ManualClock, SystemClock

__all__ = ["Clock", "ManualClock", "SystemClock"]
