"""The world this process belongs to, and what is set up on this machine for it: MPI, threads, GPUs, the last words.

No Horovod here: `collectives.init` starts it between the calls below.
"""

from __future__ import annotations

import ctypes
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from hvdvars import launchenv


@dataclass(frozen=True)
class World:
    """This process's place among all ranks.

    `cross_size` counts the nodes that have this local rank, `nodes` all of them (under Gloo it is `cross_size`).
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    nodes: int
    transport: str
    """What carries CPU tensors: `MPI` or `Gloo`; `NCCL` where the build moves GPU tensors with it."""


@dataclass(frozen=True)
class Group:
    """Some ranks of the world, ascending, and the number of the Horovod process set that joins them (0: all ranks)."""

    ranks: tuple[int, ...]
    number: int = 0

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return len(self.ranks)

    @property
    def place(self) -> int:
        """This process's number within the group, from 0."""
        return self.ranks.index(world().rank)


_current: World | None = None


def start(world: World) -> None:
    """Make `world` the one that `world()` returns. Local."""
    global _current
    _current = world


def stop() -> None:
    """Forget the world. Local."""
    global _current
    _current = None


def is_started() -> bool:
    """Whether `hvdvars.init` has been called, and `shutdown` has not. Local."""
    return _current is not None


def require_started(function: str) -> World:
    """The world, or an error that names the function called too early.

    Local. Raises RuntimeError before `hvdvars.init` and after `hvdvars.shutdown`.
    """
    if _current is None:
        raise RuntimeError(f"hvdvars.{function} was called before hvdvars.init(). Call hvdvars.init() once, first.")
    return _current


def world() -> World:
    """The world that `hvdvars.init` joined. Local. Raises RuntimeError before `hvdvars.init`."""
    return require_started("world")


def everyone() -> Group:
    """All ranks. Local. Raises RuntimeError before `hvdvars.init`."""
    return Group(tuple(range(world().size)))


def rank() -> int:
    """This process's number among all, from 0. Local. Raises RuntimeError before `init`."""
    return require_started("rank").rank


def size() -> int:
    """How many ranks there are. Local. Raises RuntimeError before `init`."""
    return require_started("size").size


def local_rank() -> int:
    """This process's number among those of its node. Local. Raises RuntimeError before `init`."""
    return require_started("local_rank").local_rank


def local_size() -> int:
    """How many ranks this node has. Local. Raises RuntimeError before `init`."""
    return require_started("local_size").local_size


def cross_rank() -> int:
    """The number of this rank's node among those that have its local rank. Local. Raises RuntimeError before `init`."""
    return require_started("cross_rank").cross_rank


def cross_size() -> int:
    """How many nodes have this rank's local rank. Local. Raises RuntimeError before `init`."""
    return require_started("cross_size").cross_size


def start_mpi() -> Any:
    """Initialise MPI through mpi4py, so that it lives as long as the process, and give mpi4py's `MPI` module. Local."""
    try:
        # Open MPI carries a copy of hwloc, and so does TensorFlow. Bound lazily, a symbol of one is answered by the
        # other once both are loaded, and MPI_Finalize crashes: bind MPI's own to itself, first.
        mode = os.RTLD_NOW | os.RTLD_GLOBAL | getattr(os, "RTLD_DEEPBIND", 0)
        for name in ("libopen-pal.so.40", "libmpi.so.40"):
            ctypes.CDLL(_in_environment(name), mode=mode)
    except OSError:
        pass  # another MPI: mpi4py finds its library by itself
    from mpi4py import MPI

    return MPI


def _in_environment(library: str) -> str:
    path = os.path.join(sys.prefix, "lib", library)
    return path if os.path.exists(path) else library


def keep_memory() -> bool:
    """Let the C library keep freed buffers instead of returning them to the system; whether it was done. Local.

    A step allocates and frees the same large buffers again and again. By default glibc gets each from the system and
    gives it back, and the page faults cost more than the copies into them. `HVDVARS_MEMORY_DEFAULTS=0`, or any setting
    of the user's own, leaves everything as it is.
    """
    own = ("GLIBC_TUNABLES", "MALLOC_ARENA_MAX", "MALLOC_MMAP_MAX_", "MALLOC_TRIM_THRESHOLD_", "LD_PRELOAD")
    if os.environ.get("HVDVARS_MEMORY_DEFAULTS", "1") == "0" or any(os.environ.get(name) for name in own):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    # M_MMAP_MAX, M_TRIM_THRESHOLD, M_TOP_PAD, M_ARENA_MAX of malloc.h: no mappings of their own for large buffers, no
    # trimming, growth in large steps, and one heap, since the others are limited to 64 MB and given back when empty.
    settings = ((-4, 0), (-1, -1), (-2, 64 * 1024 * 1024), (-8, 1))
    answers = [mallopt(option, value) for option, value in settings]
    return all(answers)


def set_threads(masks: Sequence[Sequence[int]], local_rank: int) -> None:
    """Give TensorFlow as many threads as this rank has CPUs to itself, where the user asked for no number.

    `masks` holds the allowed CPUs of every local rank. Local; does nothing once TensorFlow has started its threads.
    """
    import tensorflow as tf

    threading = tf.config.threading
    if "TF_NUM_INTRAOP_THREADS" in os.environ or threading.get_intra_op_parallelism_threads():
        return
    share = launchenv.share_threads(masks, local_rank)
    try:
        threading.set_intra_op_parallelism_threads(share)
        if "TF_NUM_INTEROP_THREADS" not in os.environ and not threading.get_inter_op_parallelism_threads():
            # One more than the work needs: a collective waits in one while another computes.
            threading.set_inter_op_parallelism_threads(max(2, share))
    except RuntimeError:
        pass  # the context exists already: its threads cannot be changed any more


def pin_gpu(local_rank: int) -> None:
    """Show TensorFlow this rank's GPU only, and let its memory grow.

    One visible GPU (the launcher pinned it) is taken as it is. Local. Raises RuntimeError where a node has more ranks
    than GPUs.
    """
    import tensorflow as tf

    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        return
    if len(gpus) > 1:
        if local_rank >= len(gpus):
            raise RuntimeError(
                f"hvdvars.init: local rank {local_rank} finds {len(gpus)} GPUs on this node. "
                "Start one rank per GPU, or hide the GPUs with CUDA_VISIBLE_DEVICES= to train on CPUs."
            )
        gpus = [gpus[local_rank]]
    try:
        tf.config.set_visible_devices(gpus, "GPU")
        tf.config.experimental.set_memory_growth(gpus[0], True)
    except RuntimeError as error:
        raise RuntimeError(
            f"hvdvars.init: TensorFlow used its GPUs before local rank {local_rank} could pin one ({error}). "
            "Call hvdvars.init() before anything that creates a tensor."
        ) from error


def end_job_on_error(world: World, mpi: Any) -> None:
    """Let an uncaught exception end the whole job: the traceback first, named by rank, then every other rank. Local."""
    previous = sys.excepthook

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt) or world.size == 1:
            previous(kind, error, trace)
            return
        lines = "".join(traceback.format_exception(kind, error, trace))
        print(f"[rank {world.rank}/{world.size}] {lines}", file=sys.stderr, end="", flush=True)
        sys.stdout.flush()
        if mpi is not None:
            mpi.COMM_WORLD.Abort(1)
        os._exit(1)  # under Gloo the launcher ends the others; a normal exit would wait for them

    sys.excepthook = report
