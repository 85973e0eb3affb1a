#!/usr/bin/env python3
"""Report what is installed, and what is missing for which use. Needs no installation: `python launch/doctor.py`.
With a run's folder: what looks wrong in that run."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from spmdrl.tools.doctor import main

sys.exit(main())
