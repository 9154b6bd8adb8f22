"""libkda: Kimi Delta Attention from Python.

``import libkda`` gives the C ABI as plans over any tensor with ``__dlpack__`` (numpy, torch, jax, cupy); it needs no
other package. ``import libkda.torch`` adds ``torch.ops.libkda.*``. Nothing is patched by either.
"""

from libkda._errors import (
    DeviceError,
    Error,
    InvalidArgument,
    NotFound,
    OutOfMemory,
    PreconditionFailed,
    Unsupported,
)
from libkda._library import cpu_isas, get_include, library_path, source_hash, version
from libkda._stats import stats
from libkda.checkpoint import Checkpoint, LayerSpec
from libkda.context import Context, candidates, devices
from libkda.copies import CopySet
from libkda.plans import (
    CommitPlan,
    ConvPlan,
    DecodePlan,
    DecodeStepPlan,
    GatedNormPlan,
    MetadataPlan,
    Plan,
    PrefillPlan,
    SegmentMergePlan,
    SegmentSummaryPlan,
    StateCopyPlan,
)
from libkda.pool import StatePool
from libkda.tensors import Tensor, empty, from_dlpack

__version__ = version()

__all__ = [
    "Checkpoint",
    "CommitPlan",
    "Context",
    "ConvPlan",
    "CopySet",
    "DecodePlan",
    "DecodeStepPlan",
    "DeviceError",
    "Error",
    "GatedNormPlan",
    "InvalidArgument",
    "LayerSpec",
    "MetadataPlan",
    "NotFound",
    "OutOfMemory",
    "Plan",
    "PreconditionFailed",
    "PrefillPlan",
    "SegmentMergePlan",
    "SegmentSummaryPlan",
    "StateCopyPlan",
    "StatePool",
    "Tensor",
    "Unsupported",
    "candidates",
    "cpu_isas",
    "devices",
    "empty",
    "from_dlpack",
    "get_include",
    "library_path",
    "source_hash",
    "stats",
    "version",
]
