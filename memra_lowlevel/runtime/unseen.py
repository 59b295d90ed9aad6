"""What is said when the process ends and nobody waited for the work of a device.

A device that is closed waits, and raises what failed. One that is never closed has nobody to raise
to. No driver is called then, for a call could wait for ever: what is known without one goes to the
logger ``memra_lowlevel``.
"""

from __future__ import annotations

import logging
import os

from . import context as contexts
from . import lifetime
from .context import Context
from .stream import Stream

__all__ = ["notes", "tell"]

log = logging.getLogger("memra_lowlevel")
_process = os.getpid()
_SHOWN = 5  # streams that a line names


def notes() -> list[str]:
    """Give one line per device that was never closed and has work nobody waited for."""
    found = []
    for context in contexts.opened():
        if context.lost or lifetime.recordings:
            continue  # told when it happened; a capture runs nothing
        names, errors = _of_host(context) or (_unwaited(context), [])
        if errors:
            text = f"work failed and nobody waited for it: {str(errors[0]).rstrip('.')}"
            if len(errors) > 1:
                text += f" ({len(errors) - 1} more operations failed)"
        elif names:
            shown = ", ".join(names[:_SHOWN])
            if len(names) > _SHOWN:
                shown += f" and {len(names) - _SHOWN} more"
            text = f"nobody waited for the last work on {shown}; if it fails, none hears"
        else:
            continue
        found.append(
            f"{context} was never closed: {text}. Call stream.sync(), or close the device "
            "(with Device() as device: …), which waits and raises."
        )
    return found


def _of_host(context: Context) -> tuple[list[str], list[Exception]] | None:
    """Ask the host device, whose queues are plain data; None for another driver."""
    unseen = getattr(context.driver, "unseen", None)
    if unseen is None:
        return None
    names, errors = unseen(context.ordinal)
    for error in errors[:1]:
        context.describe(error)
    keeper = f"stream {f'{context} housekeeping'!r}"
    return ["closed streams" if name == keeper else name for name in names], errors


def _unwaited(context: Context) -> list[str]:
    """Name streams on which more was issued than is known to be done."""
    return [
        f"stream {owned.name!r} (made at {owned.where or '?'})"
        for owned in lifetime.living(context)
        if isinstance(owned, Stream) and owned.cell is not None
        and owned.cell.issued > owned.cell.seen
    ]  # fmt: skip


def tell() -> None:
    """Log the notes; :mod:`memra_lowlevel.runtime` has it called at the end of the process."""
    if os.getpid() != _process:
        return  # a forked child: the devices are its parent's
    for note in notes():
        log.warning("%s", note)
