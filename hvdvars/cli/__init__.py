"""The ``hvdvars`` command: trains a model on all ranks under a variable-management mode of one's choice.

Nothing here loads TensorFlow or Horovod until the flags, the data and the folder have been checked.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from hvdvars.cli.errors import UsageError, interrupt, refuse


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with ``argv`` (default: the process's own).

    Gives the exit code: 0 done, 1 diverged or replicas differ, 2 bad input, 130 interrupted. Whatever else goes wrong
    is raised, and ends the job as `hvdvars.init` arranges it.
    """
    from hvdvars.cli import flags

    try:
        parsed = flags.parse(sys.argv[1:] if argv is None else argv)
        if parsed is None:
            return 0
        from hvdvars.cli import train

        return train.run(parsed)
    except UsageError as problem:
        return refuse(problem)
    except KeyboardInterrupt:
        return interrupt()
