"""Programs that measure the optimizers; neither the package nor its tests import them."""

import signal
import sys

# `python -m` still looks for a command: until `command.run` an interrupt ends the process without
# the traceback of whatever import it came in.
if sys.argv[:1] == ["-m"] and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
