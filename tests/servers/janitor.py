"""Remove the files that the test servers leave on disk, even if pytest was killed.

`python -I -S janitor.py DIRECTORY`: reads further paths from stdin, one per line, until pytest closes it or dies; then
removes the directory and those files. The servers exit on their own; this retries until they have.
"""

import shutil
import sys
import time
from pathlib import Path

TIMEOUT_S = 30.0


def main(directory: Path) -> None:
    others = [Path(line.rstrip("\n")) for line in sys.stdin]
    give_up_at = time.monotonic() + TIMEOUT_S
    while directory.exists() and time.monotonic() < give_up_at:
        # A server that is still shutting down may write new files into the directory.
        shutil.rmtree(directory, ignore_errors=True)
        time.sleep(0.05)
    for path in others:
        path.unlink(missing_ok=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
