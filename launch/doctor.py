#!/usr/bin/env python3
"""What is installed here, and what is missing for what. Needs no installation: `python launch/doctor.py`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from spmdrl.tools.doctor import main

main()
