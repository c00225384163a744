"""Where clients run. An engine maps `local_update` over the tasks of a round and yields their sums in cohort order."""

from fedadc.engines.base import Engine
from fedadc.engines.inprocess import InProcess
from fedadc.engines.remote import Remote

__all__ = ["Engine", "InProcess", "Remote"]
