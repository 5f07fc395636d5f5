"""The ``hvdvars`` command: trains a model on all ranks under a variable-management mode of one's choice.

Nothing here loads TensorFlow or Horovod until the flags, the data and the folder have been checked.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from hvdvars.cli.errors import UsageError, end_job, refuse


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with ``argv`` (default: the process's own) and give the exit code: 0 done, 1 failed, 2 refused.

    A rank that fails ends the whole job, not only itself: the others would wait for it in a collective.
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
        return end_job(130, None)
    except Exception as problem:
        return end_job(1, problem)
