"""KV canary for JAX: detects and explains silent KV cache corruption in serving engines."""

from __future__ import annotations

import importlib.metadata
import pkgutil

# In a source checkout the compiled modules are those of the installed package.
__path__ = pkgutil.extend_path(__path__, __name__)

from jax_kvcanary.backend import BackendInfo, backend_info
from jax_kvcanary.batch import CanaryBatch
from jax_kvcanary.canary import Canary, Coverage, PoolGroup
from jax_kvcanary.canary_state import CanaryReport, CanaryState, CanaryVerdict, SweepPortion
from jax_kvcanary.capacities import CanaryLaunchCapacities
from jax_kvcanary.causes import Cause
from jax_kvcanary.config import CanaryConfig
from jax_kvcanary.digest import (
    RankDigest,
    RankDigestResult,
    RankDisagreement,
    RankView,
    check_rank_digests,
    find_deviating_ranks,
    rank_digest,
)
from jax_kvcanary.dump import Dump, Dumper, DumpError, load_dump
from jax_kvcanary.events import Event, KvCanaryError
from jax_kvcanary.explain import explain
from jax_kvcanary.faults import FaultKind, Faults, Injection
from jax_kvcanary.groups import (
    Group,
    GroupsDigestResult,
    GroupsState,
    GroupsVerifyResult,
    GroupsWriteResult,
    KvGroups,
    TaggedLog,
    join_layers,
    split_layers,
    translate_slots,
)
from jax_kvcanary.history import TableHistory
from jax_kvcanary.inspection import Inspection, inspect
from jax_kvcanary.layouts import Layout, PoolSources, SourceName, per_layer, pool_sources, rotation_period, rotation_window
from jax_kvcanary.lowering import export_disabled_checks
from jax_kvcanary.metrics import PrometheusMetrics
from jax_kvcanary.monitor import Health, Monitor
from jax_kvcanary.moves import (
    MoveResult,
    MoveStatus,
    TakenRecords,
    copy_records,
    export_records,
    import_records,
    permute_records,
    put_records,
    release_records,
    reset_records,
    take_records,
)
from jax_kvcanary.ops import adopt, plan, scatter_req_token_ids, verify, verify_fused, write
from jax_kvcanary.presets import PRESETS, Preset, preset
from jax_kvcanary.recorder import FlightRecorder
from jax_kvcanary.report import LogReport, Provenance, Violation, decode_log
from jax_kvcanary.report_header import ReportHeader, header_fields
from jax_kvcanary.sharding import ShardedOps, merge_reports, pack_verdicts, unpack_verdicts
from jax_kvcanary.sources import RealKvSource, clip_read_bytes_aligned, make_packed_source, make_row_source
from jax_kvcanary.spec import CanaryLaunchTag, FailReason, RealKvHashMode, RecordFlag, Verdict
from jax_kvcanary.state import (
    Plan,
    ScatterResult,
    VerifyPlan,
    VerifyResult,
    ViolationLog,
    WritePlan,
    WriteResult,
    allocate_records,
    allocate_source_tags,
)
from jax_kvcanary.sweep import SweepEntries, Sweeper, SweepResult, entries_of_nodes
from jax_kvcanary.tables import BlockTable, FlatTable, IdentityTable, RowTable
from jax_kvcanary.validation import validate_plan_statics

try:
    __version__ = importlib.metadata.version("jax_kvcanary")
except importlib.metadata.PackageNotFoundError:  # a source tree that is not installed
    __version__ = "0.0.0"

__all__ = [
    "PRESETS",
    "BackendInfo",
    "BlockTable",
    "Canary",
    "CanaryBatch",
    "CanaryConfig",
    "CanaryLaunchCapacities",
    "CanaryLaunchTag",
    "CanaryReport",
    "CanaryState",
    "CanaryVerdict",
    "Cause",
    "Coverage",
    "Dump",
    "DumpError",
    "Dumper",
    "Event",
    "FailReason",
    "FaultKind",
    "Faults",
    "FlatTable",
    "FlightRecorder",
    "Group",
    "GroupsDigestResult",
    "GroupsState",
    "GroupsVerifyResult",
    "GroupsWriteResult",
    "Health",
    "IdentityTable",
    "Injection",
    "Inspection",
    "KvCanaryError",
    "KvGroups",
    "Layout",
    "LogReport",
    "Monitor",
    "MoveResult",
    "MoveStatus",
    "Plan",
    "PoolGroup",
    "PoolSources",
    "Preset",
    "PrometheusMetrics",
    "Provenance",
    "RankDigest",
    "RankDigestResult",
    "RankDisagreement",
    "RankView",
    "RealKvHashMode",
    "RealKvSource",
    "RecordFlag",
    "ReportHeader",
    "RowTable",
    "ScatterResult",
    "ShardedOps",
    "SourceName",
    "SweepEntries",
    "SweepPortion",
    "SweepResult",
    "Sweeper",
    "TableHistory",
    "TaggedLog",
    "TakenRecords",
    "Verdict",
    "VerifyPlan",
    "VerifyResult",
    "Violation",
    "ViolationLog",
    "WritePlan",
    "WriteResult",
    "__version__",
    "adopt",
    "allocate_records",
    "allocate_source_tags",
    "backend_info",
    "check_rank_digests",
    "clip_read_bytes_aligned",
    "copy_records",
    "decode_log",
    "entries_of_nodes",
    "explain",
    "export_disabled_checks",
    "export_records",
    "find_deviating_ranks",
    "header_fields",
    "import_records",
    "inspect",
    "join_layers",
    "load_dump",
    "make_packed_source",
    "make_row_source",
    "merge_reports",
    "pack_verdicts",
    "per_layer",
    "permute_records",
    "plan",
    "pool_sources",
    "preset",
    "put_records",
    "rank_digest",
    "release_records",
    "reset_records",
    "rotation_period",
    "rotation_window",
    "scatter_req_token_ids",
    "split_layers",
    "take_records",
    "translate_slots",
    "unpack_verdicts",
    "validate_plan_statics",
    "verify",
    "verify_fused",
    "write",
]
