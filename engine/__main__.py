"""`python -m engine key=value ...`: see engine.cli. Workers import this module too, so importing it does nothing."""

import os
import sys
import threading
from typing import NoReturn

from engine.cli import main
from engine.runtime import interrupt

LEAVE_GRACE_S = 5.0  # for threads that the user's code left running in this process


def leave(code: int) -> NoReturn:
    """End the process with `code`. Python waits for every thread at its end; here that has a limit.

    A model is run once in this process to find out its shapes, and may have started a thread that never ends.
    """
    interrupt.ignore()  # an impatient second Ctrl-C would end it by the signal instead
    timer = threading.Timer(LEAVE_GRACE_S, _break_off, (code,))
    timer.daemon = True
    timer.start()
    sys.exit(code)


def _break_off(code: int) -> None:
    names = [t.name for t in threading.enumerate() if not t.daemon and t is not threading.main_thread()]
    if names:  # else it is an exit handler of somebody's that takes its time
        print(
            f"not waited for: {', '.join(names)} (threads that a `_target_` left running)", file=sys.stderr, flush=True
        )
    os._exit(code)


if __name__ == "__main__":
    leave(main())
