"""Variable management for TensorFlow on Horovod: who owns a variable, how gradients meet, how values get back.

Names resolve on first use, so that `import hvdvars` loads neither TensorFlow nor Horovod.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "collectives": ("init", "shutdown", "is_initialized"),
    "session": ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size"),
    "meeting": ("barrier",),
    "guard": ("verify",),
    "mgr": (
        "create",
        "VariableMgr",
        "VariableMgrIndependent",
        "VariableMgrHorovod",
        "VariableMgrLocalReplicated",
        "VariableMgrDistributedAllReduce",
        "VariableMgrCollectiveAllReduce",
        "VariableMgrLocalFetchFromPS",
        "VariableMgrDistributedFetchFromPS",
        "VariableMgrLocalFetchFromStagedPS",
        "VariableMgrDistributedFetchFromStagedPS",
        "VariableMgrDistributedReplicated",
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
_MODULES = ("checkpoint", "mgr", "broadcast", "fusion", "options", "spec", "tf_cnn_benchmarks")

__all__ = [*sorted(_HOME_OF), *_MODULES]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"hvdvars.{name}")
    if name in _HOME_OF:
        return getattr(importlib.import_module(f"hvdvars.{_HOME_OF[name]}"), name)
    raise AttributeError(f"module 'hvdvars' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
