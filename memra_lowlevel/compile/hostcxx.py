"""Compiling of kernels for the host device.

The work is done by :mod:`memra_lowlevel.driver.host.cxx`, beside the runtime whose table, flags and
cache it shares; this is the compile layer's name for it.
"""

from __future__ import annotations

from ..driver.host.cxx import HostImage, compile_host
from ..driver.host.translate import plain_kernels

__all__ = ["HostImage", "compile_host", "plain_kernels"]
