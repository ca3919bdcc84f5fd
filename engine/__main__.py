"""`python -m engine key=value ...` or `pipeline-engine key=value ...`, see engine.cli; importing it starts nothing."""

import atexit
import contextlib
import gc
import os
import pathlib
import sys
import threading
from typing import NoReturn

from engine.errors import Interrupted
from engine.launch import interrupt

LEAVE_GRACE_S = 5.0  # for threads that the user's code left running in this process
POOL_GRACE_S = 30.0  # where joblib's launcher has a pool of processes, which its own thread sees to their end


def leave(code: int) -> NoReturn:
    """End the process with `code`. Python waits for every thread at its end; here that has a limit.

    A model is run once in this process to find out its shapes, and may have started a thread that never ends.
    """
    interrupt.ignore()  # an impatient second Ctrl-C would end it by the signal instead
    if supervise := sys.modules.get("engine.launch.supervise"):  # else there is nothing to end
        supervise.cool_down()
    gc.freeze()  # at its end Python collects garbage several times, which takes seconds with torch's objects
    pool = "joblib.externals.loky.process_executor" in sys.modules
    timer = threading.Timer(POOL_GRACE_S if pool else LEAVE_GRACE_S, _break_off, (code,))
    timer.daemon = True
    timer.start()
    sys.exit(code)


def _break_off(code: int) -> None:
    """End the process although threads are running; what was registered for the end is done first, within a limit.

    A sweep's launcher (joblib) removes its semaphores and its folder there.
    """
    names = [t.name for t in threading.enumerate() if not t.daemon and t is not threading.main_thread()]
    if names:  # else it is an exit handler of somebody's that takes its time
        print(f"not waited for: {', '.join(names)} (threads that were left running)", file=sys.stderr, flush=True)
        last = threading.Timer(LEAVE_GRACE_S, os._exit, (code,))
        last.daemon = True
        last.start()
        with contextlib.suppress(Exception):
            atexit._run_exitfuncs()
    os._exit(code)


def run() -> int:
    """Run the command line; Ctrl-C during its import ends it as it does later. Return the exit code."""
    try:
        with interrupt.raising():
            from engine.cli.main import main
    except Interrupted as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return main()


def console() -> NoReturn:
    """Run the command `pipeline-engine`, which finds modules in the folder it is started from as `python -m` does."""
    if not sys.flags.safe_path:
        with contextlib.suppress(FileNotFoundError):  # a folder that has been deleted is refused in a moment
            sys.path.insert(0, str(pathlib.Path.cwd()))
    leave(run())


if __name__ == "__main__":
    leave(run())
