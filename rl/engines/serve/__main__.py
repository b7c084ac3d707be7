"""Entry point of `python -m rl.engines.serve`."""

import sys

from rl.engines.serve.server import main

sys.exit(main())
