"""Devices, streams, events, memory, launches: the objects that a program holds.

Every operation names its stream; every object has one owner and a ``close()``; every refusal is
raised before the driver is asked.
"""

import atexit

from .arena import Arena
from .arguments import Operand
from .config import LaunchConfig, occupancy
from .device import Device
from .event import Event
from .launch import PreparedLaunch, launch, launch_many, prepare
from .lifetime import Leak, census, no_leaks
from .memory import Buffer, PinnedBuffer
from .stream import Stream
from .unseen import tell

__all__ = [
    "Arena",
    "Buffer",
    "Device",
    "Event",
    "LaunchConfig",
    "Leak",
    "Operand",
    "PinnedBuffer",
    "PreparedLaunch",
    "Stream",
    "census",
    "launch",
    "launch_many",
    "no_leaks",
    "occupancy",
    "prepare",
]

atexit.register(tell)
