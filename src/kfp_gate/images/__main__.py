"""`python -m kfp_gate.images`: verify the image that this runs in, as the last step of its build.

The same as `kfp-gate images verify`, without the command line's own imports: those are no part of what an image needs.
"""

import sys

from kfp_gate.errors import KfpGateError
from kfp_gate.images.verify import refuse, summary, verify


def main() -> int:
    """Returns the exit code; writes what passed to stdout, or what failed to stderr."""
    try:
        verification = verify()
        refuse(verification)
    except KfpGateError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    sys.stdout.write(f"{summary(verification)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
