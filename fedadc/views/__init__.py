"""All that methods and objectives can see: a client's view, the server's view, and a run's settings."""

from fedadc.views.local import Local
from fedadc.views.local_work import LocalWork
from fedadc.views.round_info import RoundInfo
from fedadc.views.setup import Setup

__all__ = ["Local", "LocalWork", "RoundInfo", "Setup"]
