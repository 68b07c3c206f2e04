"""Runs the command as `python -m serving.cli`."""

import sys

from serving.cli import main

sys.exit(main())
