"""The host device: CUDA's call surface on the CPU, with the same kernels, streams and graphs."""

from .device import HostDriver
from .options import HostOptions, current_options, host_options

__all__ = ["HostDriver", "HostOptions", "current_options", "host_options"]
