"""Planes of an engine: keys and values of each layer, their lengths, rings, bytes and doors."""

from ..kernels.kv_append_heads import HeadTurn
from .accounting import (
    cache_bytes_per_token,
    cache_bytes_per_token_for_layers,
    cache_bytes_per_token_for_plan,
    cache_ring_bytes_per_token,
    cache_ring_bytes_per_token_for_layers,
    cache_ring_bytes_per_token_for_plan,
    cache_ring_row_cap,
    cache_ring_row_cap_for_plan,
    latent_kv_bytes_per_token_for_plan,
)
from .batch import KvBatch
from .cache import Cache
from .geometry import KvGeometry
from .group import CacheOptions, PlaneGroup
from .index_ring import (
    INDEX_RING_WORKING_ROWS,
    index_plane_physical_row,
    index_ring_default_rows,
    index_ring_rows,
    index_ring_rows_for,
    index_ring_take,
)
from .kv_layer import KvLayer
from .kvdev import KvDev, StreamKvDev
from .latent import LatentKvLayer
from .latent_snapshot import LatentPlaneSnapshot, LatentTailCapture
from .plan import (
    KvCache,
    LatentKvCache,
    LayerPlan,
    ModelPlan,
    Recurrent,
    SlidingKvCache,
    StatePlan,
    compile_plan,
)
from .planes import Lengths, Planes, Workspace
from .policy import (
    KV_FP8_FORCE,
    gkv_on,
    kv_blk_bytes,
    kv_cache_formats,
    kv_fp8_on,
    prime_chunk_tokens,
    set_swa_ring_default,
    swa_ring_on,
    wkv_on,
)
from .prefix import CachePrefix
from .recurrent import RecurLayer
from .ring import (
    PRIME_CHUNK_MAX_TOKENS,
    SWA_REWIND_SLACK_ROWS,
    KvRing,
    KvRingAppend,
    swa_retain_from,
    swa_ring_rows,
)
from .rows_at import RowsAt
from .snapshot import CacheSnapshot
from .taps import DflashTapSink, HcTapSink

__all__ = [
    "INDEX_RING_WORKING_ROWS",
    "KV_FP8_FORCE",
    "PRIME_CHUNK_MAX_TOKENS",
    "SWA_REWIND_SLACK_ROWS",
    "Cache",
    "CacheOptions",
    "CachePrefix",
    "CacheSnapshot",
    "DflashTapSink",
    "HcTapSink",
    "HeadTurn",
    "KvBatch",
    "KvCache",
    "KvDev",
    "KvGeometry",
    "KvLayer",
    "KvRing",
    "KvRingAppend",
    "LatentKvCache",
    "LatentKvLayer",
    "LatentPlaneSnapshot",
    "LatentTailCapture",
    "LayerPlan",
    "Lengths",
    "ModelPlan",
    "PlaneGroup",
    "Planes",
    "RecurLayer",
    "Recurrent",
    "RowsAt",
    "SlidingKvCache",
    "StatePlan",
    "StreamKvDev",
    "Workspace",
    "cache_bytes_per_token",
    "cache_bytes_per_token_for_layers",
    "cache_bytes_per_token_for_plan",
    "cache_ring_bytes_per_token",
    "cache_ring_bytes_per_token_for_layers",
    "cache_ring_bytes_per_token_for_plan",
    "cache_ring_row_cap",
    "cache_ring_row_cap_for_plan",
    "compile_plan",
    "gkv_on",
    "index_plane_physical_row",
    "index_ring_default_rows",
    "index_ring_rows",
    "index_ring_rows_for",
    "index_ring_take",
    "kv_blk_bytes",
    "kv_cache_formats",
    "kv_fp8_on",
    "latent_kv_bytes_per_token_for_plan",
    "prime_chunk_tokens",
    "set_swa_ring_default",
    "swa_retain_from",
    "swa_ring_on",
    "swa_ring_rows",
    "wkv_on",
]
