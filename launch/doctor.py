#!/usr/bin/env python3
"""Report what is installed here and what is missing; needs no installation: `python launch/doctor.py`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from spmdrl.tools.doctor import main

main()
