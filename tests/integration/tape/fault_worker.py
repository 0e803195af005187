"""``python -m tape.fault_worker``: runs every fault's program, without the fault and with it, and prints what came of it.

One process with the test build serves all faults. Each run is a fork of it: nothing that was proven in one run is believed in
the next, and a run that dies is a result. A line of the output is JSON: the program's name, the faults that were on, and how it
failed (null when it did not).
"""

from __future__ import annotations

import json
import os
import sys
import traceback

import torch

from hyper_parallel.backends.torch import native

from .fault_programs import PROGRAMS

_FAULT = "HYPER_PARALLEL_NATIVE_FAULT"


def failure_of(name: str, faults: str) -> str | None:
    """How the program fails in a fork of this process; None when it is right."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.environ[_FAULT] = faults
        said = ""
        try:
            PROGRAMS[name]()
        except BaseException as error:
            line = traceback.extract_tb(error.__traceback__)[-1].line
            said = f"{type(error).__name__}: {str(error) or line}".splitlines()[0]
        os.write(writing, said.encode()[:4000])
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as said_by_child:
        text = said_by_child.read().decode(errors="replace")
    _, status = os.waitpid(child, 0)
    return text or (None if status == 0 else f"the process ended with status {status}")


def main() -> None:
    """All programs."""
    torch.set_num_threads(1)
    if native.load() is None:
        raise SystemExit(f"no native recorder: {native.why_not()}")
    for name in sys.argv[1:] or PROGRAMS:
        for faults in ("", name, f"{name},probation"):
            print(json.dumps([name, faults, failure_of(name, faults)]), flush=True)


if __name__ == "__main__":
    main()
