"""The per-layer host cache of a decoder: rows, recurrent state, ring, override and wire.

:class:`LayerKvCache` holds one layer; :class:`KvCache` the layers of a model and their eviction.
All arithmetic is float32 with one fixed order of operations: the compiled loops (baseline, AVX2 and
AVX-512) and the NumPy path give the same bits.
"""

from .attend import attention_head
from .bounded import (
    BoundedRope,
    BoundedSnapshot,
    BoundedState,
    BoundedWeights,
    validate_anchor,
)
from .evict import KvCache, Mass, Recent
from .layer import LayerKvCache
from .modes import KvMode, O1Rect, WireKind
from .nystrom import NystromState, O1DeviceView, O1HeadView, O1Snapshot, O1State
from .o1_plan import O1Plan
from .recurrent import PhaseCore, decay_from_log, validate_delta_layers
from .wire import hash64, identity_of

__all__ = [
    "BoundedRope",
    "BoundedSnapshot",
    "BoundedState",
    "BoundedWeights",
    "KvCache",
    "KvMode",
    "LayerKvCache",
    "Mass",
    "NystromState",
    "O1DeviceView",
    "O1HeadView",
    "O1Plan",
    "O1Rect",
    "O1Snapshot",
    "O1State",
    "PhaseCore",
    "Recent",
    "WireKind",
    "attention_head",
    "decay_from_log",
    "hash64",
    "identity_of",
    "validate_anchor",
    "validate_delta_layers",
]
