"""Removes what the test servers leave on disk, also when pytest was killed.

`python -I -S janitor.py DIRECTORY`: reads further paths from stdin, a line each, until pytest closes it or dies; then
removes the directory and those files. The servers die by themselves; this waits for them to let go.
"""

import shutil
import sys
import time
from pathlib import Path

PATIENCE_S = 30.0


def main(directory: Path) -> None:
    others = [Path(line.rstrip("\n")) for line in sys.stdin]
    give_up_at = time.monotonic() + PATIENCE_S
    while directory.exists() and time.monotonic() < give_up_at:
        # A server that is still ending may put new files into a directory that is being emptied.
        shutil.rmtree(directory, ignore_errors=True)
        time.sleep(0.05)
    for path in others:
        path.unlink(missing_ok=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
