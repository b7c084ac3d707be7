"""Entry point of `python -m rl.engines.serve`."""

import sys

try:
    from rl.engines.serve.server import main
except ModuleNotFoundError as error:
    sys.exit(str(error))

sys.exit(main())
