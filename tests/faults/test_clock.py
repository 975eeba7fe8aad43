"""The wall clock of a process that preloads the library can be stepped; its monotonic clock is unaffected."""

import os
import subprocess
import sys
from datetime import datetime
from pathlib import Path

from tests.faults.clock import PRELOAD, VARIABLE, Clock, compile_library

PROGRAM = """
import datetime, os, sys, time
os.environ["LORAQ_FAULTS_CLOCK"] = sys.argv[1]
for _ in range(2):
    print(time.time(), datetime.datetime.now().timestamp(), time.monotonic(), flush=True)
    sys.stdin.readline()
"""
HOUR_S = 3600


def test_the_wall_clock_steps_back_and_the_monotonic_clock_does_not(tmp_path: Path) -> None:
    clock = Clock(compile_library(tmp_path), tmp_path)
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, clock.environment[VARIABLE]],
        env=os.environ | {PRELOAD: clock.environment[PRELOAD]},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        before = [float(text) for text in process.stdout.readline().split()]
        clock.step(-HOUR_S)
        print(file=process.stdin, flush=True)
        after = [float(text) for text in process.stdout.readline().split()]
        process.kill()
    now = datetime.now().astimezone().timestamp()
    assert abs(before[0] - now) < 60
    assert all(abs(now - HOUR_S - each) < 60 for each in after[:2])
    assert after[2] >= before[2]
